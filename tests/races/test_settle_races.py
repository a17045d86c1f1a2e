"""Batches against each other and against everybody else: one order of locks, no job twice, no bot robbed."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from bots.sync.settle import SyncService
from schema.accounting import counters
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.patience import eventually
from tests.support.pool import Bot, Pool, active, completed, submitted
from tests.support.race import DEADLOCK_TIMEOUT, Race, at_service_of, cancel, outcome
from tests.support.sync import alone, crew, new_calls, offered, plain, together
from tests.support.tenancy import Tenancy, assign, contested, grown_too_far, watch_maxima

ROUNDS, CREWS, CREW = 40, 3, 4
LOCK_JOB = Statement("SELECT FROM jobs WHERE public_id = CAST(:job AS uuid) FOR NO KEY UPDATE")
LOCK_QUOTA = """
SELECT q.usage FROM quotas q JOIN instances i ON i.id = q.instance WHERE i.name = :instance
FOR NO KEY UPDATE OF q"""


def test_a_batch_with_a_bot_that_keeps_units_locks_quotas_in_order(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("first", maximum=5)
    other = pool.bot("other", properties={"for": "other"})
    pool.submit(instance="first", properties={"for": "other"})
    (fine,) = pool.given(other)
    _, _, keeper, work = contested(pool, tenancy, properties={"for": "keeper"})
    assign(pool)
    calls = [keeper.message(completed(work, "stopped")), other.message(completed(fine))]
    with race.first() as first:
        first.row(LOCK_QUOTA, instance="first")
        batch = race.second(lambda: together(keeper.sync_service, *calls), behind=first)
        first.row(LOCK_QUOTA + " NOWAIT", instance="team-a")
        first.row(LOCK_QUOTA + " NOWAIT", instance="team-b")
        first.commit()
        answers = outcome(batch)
    assert race.errors == []
    assert offered(answers[0]) == []
    assert (tenancy.usage("first"), tenancy.usage("team-b")) == (0, 0)


def test_a_batch_tells_bots_of_their_leases_in_the_order_in_which_others_stop_them(pool: Pool, race: Race) -> None:
    sync_service = pool.sync_service()
    late, early = (
        pool.bot("late", properties={"at": "late"}, sync_service=sync_service),
        pool.bot("early", sync_service=sync_service),
    )
    (low,) = pool.submit()
    pool.change("UPDATE bots SET draining = true WHERE name = 'late'")
    pool.assigner().run_once()
    pool.change("UPDATE bots SET draining = false WHERE name = 'late'")
    (high,) = pool.submit(properties={"at": "late"})
    pool.assigner().run_once()
    calls = [late.message(), early.message()]
    with race.first() as first:
        cancel(first, low)
        batch = race.second(lambda: together(sync_service, *calls), behind=first)
        cancel(first, high)
        first.commit()
        answers = outcome(batch)
    assert race.errors == []
    works = [answer["leases"][0] for answer in answers]
    assert [work["job"] for work in works] == [high, low]
    told = together(sync_service, late.message(active(works[0])), early.message(active(works[1])))
    assert [[lease["state"] for lease in answer["leases"]] for answer in told] == [["cancelling"], ["cancelling"]]


def test_a_batch_that_waits_for_one_bot_sees_what_became_of_it(pool: Pool, race: Race) -> None:
    bots, works = crew(pool, 3)
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    answers = race.in_turn(
        lambda first: at_service_of(first, bots[1]).sync(completed(works[1], "failed")),
        lambda: together(bots[0].sync_service, *calls),
    )
    assert answers[1] == "stale_seq"
    assert [pool.job(work["job"]).state for work in works] == ["succeeded", "failed", "succeeded"]
    assert race.errors == []


def test_a_job_that_goes_on_keeps_no_call_waiting_that_ends_and_starts_others(pool: Pool, race: Race) -> None:
    bot = pool.bot(capacity=3)
    pool.submit(3)
    pool.assigner().run_once()
    goes_on, ends, starts = bot.sync()["leases"]
    bot.sync(active(goes_on), active(ends))
    with race.first() as first:
        first.connection.execute(LOCK_JOB, {"job": goes_on["job"]})
        call = bot.message(active(goes_on), completed(ends), active(starts))
        (told,) = race.unhindered(lambda: together(bot.sync_service, call), by=first)
    assert [(lease["job"], lease["state"]) for lease in told["leases"]] == [
        (goes_on["job"], "active"), (starts["job"], "active")]  # fmt: skip


def test_two_batches_with_some_bots_in_common_answer_a_repeated_call_once_and_alike(pool: Pool, race: Race) -> None:
    bots, works = crew(pool, 3)
    jobs = pool.submit(5)
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    with race.first() as first:
        ours = first.sync_service().answer(new_calls(*calls[:2]))
        batch = race.second(lambda: bots[0].sync_service.answer(new_calls(*reversed(calls))), behind=first)
        first.commit()
        theirs = outcome(batch)
    assert [offered(plain(answer)) for answer in theirs[1:]] == [offered(plain(answer)) for answer in reversed(ours)]
    assert [offered(plain(answer)) for answer in [*ours, theirs[0]]] == [[job] for job in jobs[:3]]


def test_two_batches_at_one_queue_pass_over_what_the_other_one_has_picked(pool: Pool, race: Race) -> None:
    bots, works = crew(pool, 4)
    jobs = pool.submit(6)
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    with race.first() as first:
        ours = together(first.sync_service(), *calls[:2])
        theirs = race.unhindered(lambda: together(bots[0].sync_service, *calls[2:]), by=first)
        first.commit()
    assert [offered(answer) for answer in ours + theirs] == [[job] for job in jobs[:4]]


@pytest.mark.parametrize("commit", [True, False])
def test_two_batches_at_one_quota_never_exceed_it(pool: Pool, tenancy: Tenancy, race: Race, commit: bool) -> None:
    bots, works = crew(pool, 4, instance="team-b")
    tenancy.quota("team-a", maximum=3)
    pool.submit(6, instance="team-a")
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    with race.first() as first:
        ours = together(first.sync_service(), *calls[:2])
        assert sum(len(offered(answer)) for answer in ours) == 2
        theirs = race.unhindered(lambda: together(bots[0].sync_service, *calls[2:]), by=first)
        first.decide(commit)
    assert sum(len(offered(answer)) for answer in theirs) == 0, "a quota that somebody else holds counts as used up"
    assert tenancy.usage("team-a") == (2 if commit else 0)
    assert race.errors == []


def test_a_bot_that_is_locked_by_a_batch_is_robbed_of_nothing_by_an_assigner(pool: Pool, race: Race) -> None:
    bots, works = crew(pool, 3)
    with race.first() as first:
        together(
            first.sync_service(enabled=False),
            *[bot.message(active(work)) for bot, work in zip(bots, works, strict=True)],
        )
        extra = pool.bot("free", sync_service=bots[0].sync_service, properties={"for": "it"})
        (job,) = pool.submit(properties={"for": "it"})
        with race.first() as second:
            together(second.sync_service(), extra.message())
            race.unhindered(lambda: pool.assigner().run_once(), by=second)
            second.commit()
        first.commit()
    row = pool.job(job)
    assert (row.state, row.fence, row.attempts, row.schedule_after) == ("queued", 0, 0, None)
    assert pool.row("SELECT count(*) AS n FROM live").n == 3, "every lease is still there"
    pool.assigner().run_once()
    assert [lease["job"] for lease in extra.sync()["leases"]] == [job]


@pytest.fixture
def crowd(database_url: str, pool: Pool, timing: Timing) -> Iterator[Pool]:
    """A pool with a connection for each thread, on a server that finds deadlocks at once."""
    pool.change(DEADLOCK_TIMEOUT)
    settings = DatabaseSettings(pool=CREWS, reserve=CREWS)
    wide = Database(database_url, settings, role="crowd", chance=pool.chance)
    yield Pool(wide, timing.model_copy(update={"ttl": 30.0}), pool.chance)
    wide.close()


def rounds(sync_service: SyncService, crew: list[Bot], start: threading.Barrier) -> list[str]:
    """Finish whatever was given, in one batch, again and again; returns every job that was offered, with its fence."""
    held: dict[str, list[dict[str, object]]] = {bot.session.bot: [] for bot in crew}
    given: list[str] = []
    start.wait()
    for _ in range(ROUNDS):
        answers = together(sync_service, *[bot.message(*map(completed, held[bot.session.bot])) for bot in crew])
        for bot, answer in zip(crew, answers, strict=True):
            held[bot.session.bot] = answer["leases"]
            given += [f"{lease['job']}:{lease['fence']}" for lease in answer["leases"]]
    alone(sync_service, *[bot.message(*map(completed, held[bot.session.bot])) for bot in crew])
    return given


def test_batches_over_one_queue_and_quota_never_deadlock_and_give_no_job_twice(crowd: Pool) -> None:
    tenancy, sync_service, start = Tenancy(crowd), crowd.sync_service(to_capacity=True), threading.Barrier(CREWS)
    for instance, maximum in (("team-a", 9), ("team-b", 5), ("team-c", None)):
        tenancy.quota(instance, minimum=2, maximum=maximum)
        for units in (1, 2):
            crowd.submit(300, instance=instance, units=units, priority=units, locality_hint=f"{instance}-{units}")
    watch_maxima(crowd)
    errors = Race(crowd)
    names = [f"bot-{n}" for n in range(CREWS * CREW)]
    crowd.chance.shuffle(names)
    bots = [crowd.bot(name, sync_service=sync_service, capacity=3) for name in names]
    with ThreadPoolExecutor(CREWS) as threads:
        crews = [bots[n * CREW : (n + 1) * CREW] for n in range(CREWS)]
        futures = [threads.submit(rounds, sync_service, crew, start) for crew in crews]
        given = [job for future in futures for job in future.result()]
    errors.close()
    assert "40P01" not in errors.errors
    assert len(given) == len(set(given)) > ROUNDS
    assert crowd.rows("SELECT job_id FROM job_events WHERE move = 'grant' GROUP BY job_id HAVING count(*) > 1") == []
    assert grown_too_far(crowd) == []


# --- charge × charge: counters that exist, that are created, and that are named twice


LOCK_COUNTER = "SELECT name FROM counters WHERE name = :name FOR NO KEY UPDATE"


def charged(pool: Pool, *names: str) -> None:
    """Charge nothing to each of these counters, which creates those that are missing."""
    pool.database.run(lambda connection: counters.take(connection, [dict.fromkeys(names, 0.0)]))


@pytest.mark.conflicts
def test_a_charge_whose_new_counter_somebody_else_locks_starts_again_and_never_waits(pool: Pool, race: Race) -> None:
    """To wait for that lock could deadlock, because the charge holds counters with later names by then."""
    with race.first() as creator, race.first() as holder:
        charged(creator, "lock:default:a")
        late = race.second(lambda: charged(pool, "lock:default:a", "lock:default:b", "pool:jobs"), behind=creator)
        charged(pool, "lock:default:b")
        holder.row(LOCK_COUNTER, name="lock:default:b")
        creator.commit()
        eventually(lambda: "40001" in race.errors, what="the charge starts again")
        holder.roll_back()
        outcome(late)
    names = pool.row("SELECT array_agg(name ORDER BY name) FROM counters WHERE name LIKE 'lock:%'")[0]
    assert names == ["lock:default:a", "lock:default:b"]


def test_a_charge_counts_names_in_any_order_and_each_as_often_as_it_is_given(pool: Pool) -> None:
    def charge(names: list[str], amounts: list[int]) -> None:
        values = {"names": names, "amounts": list(map(str, amounts)), "may_overshoot": False, "numbers": None}
        pool.database.run(lambda connection: connection.execute(counters.TAKE, values))

    def used() -> list[str]:
        locks = "SELECT array_agg(name || '=' || trunc(used) ORDER BY name) FROM counters WHERE name LIKE 'lock:%'"
        return list(pool.row(locks)[0])

    charged(pool, "lock:default:a", "lock:default:b")
    pool.change("UPDATE counters SET most = NULL WHERE name LIKE 'lock:%'")
    charge(["lock:default:b", "lock:default:a", "lock:default:b"], [1, 5, 2])
    assert used() == ["lock:default:a=5", "lock:default:b=3"]
    charge(["lock:default:a", "lock:default:b"], [-5, -3])
    assert used() == ["lock:default:a=0", "lock:default:b=0"]


HELD_ROWS = {
    "quota": "SELECT FROM quotas WHERE usage > 0 FOR UPDATE",
    "counter": "SELECT FROM counters WHERE name LIKE 'lock:%' FOR UPDATE",
    "lease": "SELECT FROM leases WHERE bot_id = 1 FOR UPDATE",
    "job": "SELECT FROM jobs WHERE locality_hint = 'held' FOR UPDATE",
    "node": "SELECT FROM graph_nodes WHERE pending_deps > 0 FOR UPDATE",
}


@pytest.mark.conflicts
@pytest.mark.parametrize("what", HELD_ROWS)
def test_a_row_that_somebody_holds_ends_no_session_and_puts_off_no_end_but_its_own(
    pool: Pool, tenancy: Tenancy, race: Race, what: str
) -> None:
    tenancy.quota("default", maximum=9)
    bot, other = pool.bot("bot-1"), pool.bot("bot-2", instance="other")
    if what == "node":
        held = submitted(pool, {1: [], 2: [1]}).jobs[1]
    else:
        (held,) = pool.submit(locality_hint="held", terms={"locks": ["tree"]})
    (work,) = pool.given(bot)
    pool.submit(instance="other")
    (sound,) = pool.given(other)
    pool.change("UPDATE bots SET expires_at = now() + interval '9 s'")
    settings = DatabaseSettings(lock_timeout=0.05)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        service = Pool(database, pool.timing, pool.chance).sync_service(enabled=False)
        with race.first() as stranger:
            stranger.connection.execute_sql(HELD_ROWS[what])
            calls = new_calls(bot.message(completed(work)), other.message(completed(sound)))
            with pytest.raises(psycopg.errors.LockNotAvailable):
                service.answer(calls)
            put_off, answered = (json.loads(each) for call in calls for each in service.answer([call]))
            assert [lease["job"] for lease in put_off["leases"]] == [held]
            assert put_off["expires_in"] > 20, "its session goes on"
            assert (answered["leases"], pool.job(sound["job"]).state) == ([], "succeeded")
            again = json.loads(service.answer(new_calls(bot.message(completed(work))))[0])
            assert [lease["job"] for lease in again["leases"]] == [held]
    race.forget_errors()
    bot.sync(completed(work))
    assert pool.job(held).state == "succeeded"


def test_a_wrong_row_ends_no_session_and_keeps_no_other_lease_or_session_from_ending(pool: Pool) -> None:
    """The job that depends on one of them has a queue that is not there."""
    first = submitted(pool, {1: [], 2: [{"node": 1, "on_failure": "run"}]}).jobs[1]
    plain, beside = pool.submit(2)
    bot = pool.bot("bot-1", capacity=3)
    works = pool.given(bot)
    bot.sync(*(active(work) for work in works))
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    answer = bot.sync(*((active if work["job"] == beside else completed)(work) for work in works))
    assert {lease["job"] for lease in answer["leases"]} == {first, beside}
    assert pool.job(plain).state == "succeeded"
    pool.bot("bot-2")
    pool.change("INSERT INTO ticks (name, at, grace_until) VALUES ('reaper', now(), now() - interval '1 s')")
    pool.change("UPDATE jobs SET attempts = max_attempts - 1, kills = 2 WHERE state = 'running'")
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    (sessions,) = (duty for duty in pool.upkeep().duties if duty.name == "sessions")
    sessions.run()
    assert [row.status for row in pool.rows("SELECT status FROM bots ORDER BY name")] == ["ok", "gone"]
    assert pool.job(beside).state == "dead"
    pool.submit()
    pool.assigner().run_once()
    assert pool.row("SELECT held FROM bots WHERE status = 'ok'").held == 1, "it is given nothing more"
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    sessions.run()
    assert pool.job(first).state == "dead"
