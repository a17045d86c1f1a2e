"""What BuildGrid's scheduler promises about bots, row by row: fetching, eligibility, capacity, leases, attribution."""

import json
import queue
from typing import Any

import pytest
from pydantic import ValidationError

from assigner.preemption.plan import QuotaSettings
from bots.protocol import LeaseReport
from bots.sync.fetch import FetchSettings
from schema.postgres.notify import Wakeups
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, active, busy_bot, completed
from tests.support.race import Race, call, cancel
from tests.support.tenancy import Tenancy


def waiting(pool: Pool) -> tuple[str, str, set[str]]:
    """Queued jobs: a new one, one that rests because nobody could run it, and two whose rest is over."""
    (new,) = pool.submit()
    (resting,) = pool.submit(instance="resting")
    elapsed = pool.submit(2, instance="elapsed")
    pool.rest_queues(3600, f"public_id = '{resting}'")
    pool.rest_queues(-1, f"public_id = '{elapsed[0]}'")
    return new, resting, {*elapsed}


def offered(answer: dict[str, Any]) -> set[str]:
    return {lease["job"] for lease in answer["leases"] if lease["state"] == "pending"}


def holders(pool: Pool) -> list[str]:
    """The bots that hold leases, in the order in which those were granted."""
    return [row.name for row in pool.rows("SELECT b.name FROM live l JOIN bots b ON b.id = l.bot_id ORDER BY l.job_id")]


def test_a_bot_that_reports_finished_work_gets_new_work_in_the_same_call(pool: Pool) -> None:
    """Between two jobs a bot does not idle until an assigner comes around."""
    bot, (work,) = busy_bot(pool, capacity=1)
    (following,) = pool.submit()
    answer = bot.sync(completed(work))
    assert offered(answer) == {following}
    assert answer["leases"][0]["payload"] == {"command": ["true"]}


def test_by_default_a_bot_fetches_no_more_jobs_than_it_has_just_completed(pool: Pool) -> None:
    """The rest of its room stays for the assigners, who see all bots."""
    assert FetchSettings().to_capacity is False
    bot, works = busy_bot(pool, capacity=3)
    pool.submit(5)
    assert len(offered(bot.sync(completed(works[0]), completed(works[1]), active(works[2])))) == 2
    other = pool.bot("other", capacity=3)
    assert offered(other.sync()) == set()


def test_it_fetches_new_jobs_and_those_at_rest_but_none_whose_rest_is_over(pool: Pool) -> None:
    """A job is new until an assigner has looked into its queue in vain; one that is due again is the assigners'."""
    bot, works = busy_bot(pool, capacity=4)
    new, resting, elapsed = waiting(pool)
    assert offered(bot.sync(*map(completed, works))) == {new, resting}
    assert {pool.job(job).state for job in elapsed} == {"queued"}
    pool.assigner().run_once()
    assert {pool.job(job).state for job in elapsed} == {"leased"}


def test_the_literal_mode_compares_times_alone(pool: Pool) -> None:
    """`schedule_after >= now` to the letter: a new job's time is past when anybody looks, so only those at rest."""
    bot, works = busy_bot(pool, capacity=4, filter="literal")
    new, resting, elapsed = waiting(pool)
    assert offered(bot.sync(*map(completed, works))) == {resting}
    assert {pool.job(job).state for job in (new, *elapsed)} == {"queued"}


def test_fetching_to_capacity_fills_all_room_in_one_call_whatever_the_backoff(pool: Pool) -> None:
    """A bot that has finished nothing, or has just come, is full after its first call."""
    new, resting, elapsed = waiting(pool)
    pool.submit(5)
    bot = pool.bot(capacity=6, sync_service=pool.sync_service(to_capacity=True))
    taken = offered(bot.sync())
    assert len(taken) == 6
    assert {new, resting, *elapsed} <= taken


def test_only_a_healthy_bot_with_capacity_that_offers_what_is_required_gets_the_job(pool: Pool) -> None:
    """No job is given to a bot that said that it is unwell or leaving, holds nothing, or lacks a property."""
    fit = {"os": "linux", "gpu": "a100"}
    pool.bot("unwell", properties=fit).sync(status="unhealthy")
    pool.bot("leaving", properties=fit).sync(status="draining")
    pool.bot("gone", properties=fit).sync(status="gone")
    pool.bot("without-capacity", capacity=0, properties=fit)
    pool.bot("without-gpu", properties={"os": "linux"})
    (job,) = pool.submit(properties=fit)
    assigner = pool.assigner()
    assigner.run_once()
    assert pool.job(job).state == "queued"
    pool.bot("healthy", properties={**fit, "cpu": "x86"})
    assigner.run_once()
    assert holders(pool) == ["healthy"]


def test_a_bot_is_locked_when_it_is_assigned_and_a_locked_one_is_passed_over(pool: Pool, race: Race) -> None:
    """The last free slot is never given twice, and nobody waits to find that out."""
    pool.submit(2)
    pool.bot("first")
    with race.first() as ahead:
        ahead.assigner(batch=1).run_once()
        race.unhindered(pool.assigner().run_once, by=ahead)
        ahead.commit()
    assert holders(pool) == ["first"]
    pool.bot("second")
    pool.assigner().run_once()
    assert holders(pool) == ["first", "second"]


def test_of_two_bots_the_one_with_the_lower_priority_number_is_preferred(pool: Pool) -> None:
    """An operator keeps dear bots as a reserve; a bot that says nothing has 0."""
    pool.bot("reserve", priority=5)
    pool.bot("ordinary")
    pool.bot("preferred", priority=-5)
    assigner = pool.assigner(batch=1)
    for _ in range(3):
        pool.submit()
        assigner.run_once()
    assert holders(pool) == ["preferred", "ordinary", "reserve"]


@pytest.mark.parametrize("ending", ["succeeded", "failed", "error", "released", "cancelled"])
def test_a_bot_holds_as_much_as_its_capacity_and_every_ending_gives_room_back(pool: Pool, ending: str) -> None:
    """Never more than fits, and never less for long; a bot that says nothing has room for one."""
    pool.submit(3, units=2)
    bot = pool.bot(capacity=5, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner()
    assigner.run_once()
    first, second = bot.take()
    assigner.run_once()
    row = pool.row("SELECT in_use, capacity FROM bots")
    assert (row.in_use, row.capacity) == (4, 5)
    if ending == "cancelled":
        cancel(pool, first["job"])
    bot.sync(completed(first, "stopped" if ending == "cancelled" else ending), active(second))
    assert pool.row("SELECT in_use FROM bots").in_use == 2
    assigner.run_once()
    assert pool.row("SELECT in_use FROM bots").in_use == 4
    pool.bot("modest")
    assert pool.row("SELECT capacity FROM bots WHERE name = 'modest'").capacity == 1


def test_the_answer_to_a_sync_is_the_set_of_leases_that_the_bot_should_have(pool: Pool) -> None:
    """What it does not know of is listed, what it holds without a right is not, and it may not cancel by itself."""
    job, bot, work = pool.running()
    stranger = LeaseReport(job=pool.submit()[0], fence=7, state="active")
    (held,) = bot.sync(active(work), stranger)["leases"]
    assert (held["job"], held["state"]) == (job, "active")
    cancel(pool, job)
    (held,) = bot.sync(active(work))["leases"]
    assert held["state"] == "cancelling"
    assert bot.sync(completed(work, "stopped"), status="draining")["leases"] == []
    with pytest.raises(ValidationError, match="state"):
        LeaseReport.model_validate({"job": job, "fence": 1, "state": "cancelled"})


def test_a_sync_that_is_repeated_gets_the_current_leases_and_changes_nothing(pool: Pool) -> None:
    """Better than to compare versions of the leases: the number of the call tells a repetition from news, also where
    the lost answer held a new lease and where nothing has changed since."""
    bot, (work,) = busy_bot(pool, capacity=1)
    pool.submit(2)
    message = bot.message(completed(work))
    (first,) = json.loads(call(bot, message))["leases"]
    (again,) = json.loads(call(bot, message))["leases"]
    assert again == first
    cancel(pool, first["job"])
    (asked_to_stop,) = json.loads(call(bot, message))["leases"]
    assert (asked_to_stop["job"], asked_to_stop["state"]) == (first["job"], "cancelling")
    assert pool.row("SELECT count(*) AS n FROM live").n == 1
    assert pool.history(work["job"])[-1] == "finish"


@pytest.mark.parametrize("strategy", ["capacity", "locality", "proactive", "preemption"])
def test_a_lease_and_its_history_tell_who_placed_the_job_and_by_which_strategy(pool: Pool, strategy: str) -> None:
    """Who asks later why a job ran where it ran is told by the job itself."""
    job, who = {"proactive": fetched, "preemption": preempting}.get(strategy, placed)(pool, strategy)
    row = pool.row(
        "SELECT l.assigner, l.strategy, e.actor, e.details->>'strategy' AS told, e.details->>'bot' AS bot"
        " FROM jobs j JOIN leases l ON l.job_id = j.id JOIN job_events e ON e.job_id = j.id AND e.move = 'grant'"
        " WHERE j.public_id = CAST(:id AS uuid)",
        id=job,
    )
    assert (row.assigner, row.actor, row.strategy, row.told, row.bot) == (who, who, strategy, strategy, "bot-1")


def placed(pool: Pool, strategy: str) -> tuple[str, str]:
    pool.bot(capacity=2, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner(strategy={"kind": strategy})
    (job,) = pool.submit()
    assigner.run_once()
    return job, "assigner:test"


def fetched(pool: Pool, _: str) -> tuple[str, str]:
    bot, (work,) = busy_bot(pool, capacity=1)
    (job,) = pool.submit()
    bot.sync(completed(work))
    return job, "bot:bot-1"


def preempting(pool: Pool, _: str) -> tuple[str, str]:
    tenancy = Tenancy(pool)
    tenancy.quota("team-a", minimum=1, maximum=1)
    _, bot, work = pool.running(priority=10)
    (job,) = pool.submit(instance="team-a")
    tenancy.assigner(QuotaSettings(preemption_delay=0)).run_once()
    bot.sync(completed(work, "stopped"))
    pool.assigner().run_once()
    return job, "assigner:test"


def test_a_bot_hears_of_its_job_and_a_caller_of_its_result(pool: Pool, wakeups: Wakeups) -> None:
    """An idle pool is quick; with wake-ups lost or off, the next poll finds the same."""
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
    heard: dict[str, queue.Queue[frozenset[str]]] = {"bots": queue.Queue(), "done": queue.Queue()}
    for topic, news in heard.items():
        wakeups.subscribe(topic, news.put)
    eventually(lambda: wakeups.connected)
    with wakeups.idle("bots"), wakeups.idle("done"):
        (job,) = pool.submit()
        pool.assigner().run_once()
        assert heard["bots"].get(timeout=MINUTE) == {str(pool.row("SELECT id FROM bots").id)}
        (work,) = bot.take()
        bot.sync(completed(work))
        assert heard["done"].get(timeout=MINUTE) == {job}
    (unheard,) = pool.submit()
    pool.assigner().run_once()
    assert offered(bot.sync()) == {unheard}


def test_a_requirement_is_met_by_a_bot_that_offers_all_of_it_among_any_number_of_properties(pool: Pool) -> None:
    """By containment, better than a power set of each bot's properties, which BuildGrid warns of above ten: thirty
    cost no more than one, and a property may have several values."""
    offer = {f"p{number}": ["a", "b"] for number in range(30)}
    wanted = {f"p{number}": "b" for number in range(0, 30, 2)}
    (matching,) = pool.submit(properties=wanted)
    (one_more,) = pool.submit(properties={**wanted, "p30": "a"})
    (another_value,) = pool.submit(properties={**wanted, "p1": "c"})
    (anything,) = pool.submit()
    bot = pool.bot(capacity=4, properties=offer)
    pool.assigner().run_once()
    assert offered(bot.sync()) == {matching, anything}
    assert {pool.job(job).state for job in (one_more, another_value)} == {"queued"}
    assert pool.row("SELECT count(*) AS n FROM kind_platforms").n == 2
