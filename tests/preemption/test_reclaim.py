"""Preemption on a real pool: how much is evicted, for whom, what is kept for it, and what the history says."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from assigner.cycle import assigner
from schema.accounting import counters, rates
from schema.moves import preempt as preempt_moves
from schema.moves.reassign import add_constraints
from schema.postgres.connection import Connection
from tests.support.explain import closed, explained, gates_of, keep, rest
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import drain
from tests.support.tenancy import Tenancy, assign, cohort_of, contested, no_share, put_cohort, share, used


def kept(pool: Pool) -> dict[str, int]:
    """The units that each bot keeps for an instance."""
    rows = pool.rows("SELECT name, kept_units FROM bots WHERE kept_units > 0 ORDER BY name")
    return {row.name: row.kept_units for row in rows}


def occupied(pool: Pool, name: str = "bot-1", *, capacity: int = 1, **fields: Any) -> tuple[Bot, list[dict[str, Any]]]:
    """A bot that is filled with jobs of team-b, and its leases."""
    pool.submit(capacity, instance="team-b", priority=10, properties=fields.get("properties", {}))
    bot = pool.bot(name, capacity=capacity, **fields)
    return bot, pool.given(bot)


def test_one_bot_keeps_units_for_one_instance_at_a_time(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=2)
    tenancy.quota("team-c", minimum=1)
    for name in ("bot-1", "bot-2"):
        occupied(pool, name, capacity=4)
    pool.submit(instance="team-a", units=2)
    assign(pool)
    pool.submit(instance="team-c", priority=1)
    assign(pool)
    assert tenancy.stop_requests() == 2 + 1
    assert sorted(kept(pool).values()) == [1, 2]
    pool.submit(instance="team-d", priority=-5)
    tenancy.quota("team-d", minimum=1)
    assign(pool)
    assert tenancy.stop_requests() == 3, "both bots are being freed for others"


def test_only_the_commit_of_a_cycle_that_evicts_waits_for_the_disk(
    pool: Pool, tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bot may be told to stop a job by a call that writes nothing, and so flushes nothing of the eviction."""
    lazy: list[Connection] = []
    monkeypatch.setattr(assigner, "commit_lazily", lazy.append)
    tenancy.quota("team-a", minimum=1)
    pool.submit(instance="team-b", properties={"os": ["linux"]}, priority=10)
    bot = pool.bot(properties={"os": ["linux"]})
    assign(pool)
    bot.take()
    assert len(lazy) == 1
    pool.bot("bot-2")
    pool.submit(instance="team-b")
    pool.submit(instance="team-a", properties={"os": ["linux"]})
    assign(pool)
    assert (tenancy.stop_requests(), len(pool.rows("SELECT FROM leases")), len(lazy)) == (1, 2, 1)


def test_evictions_of_one_cycle_for_one_instance_share_a_bot_and_later_ones_wait_for_them(
    pool: Pool, tenancy: Tenancy
) -> None:
    """Or what has been freed for the first would have to wait for what is freed for the last. No more is evicted than
    jobs wait, however far the minimum is."""
    tenancy.quota("team-a", minimum=9)
    bot, held = occupied(pool, capacity=4)
    pool.submit(3, instance="team-a")
    assign(pool)
    assert (tenancy.stop_requests(), kept(pool)) == (3, {"bot-1": 3})
    pool.submit(instance="team-a", priority=-1)
    assign(pool)
    assert tenancy.stop_requests() == 3
    answer = bot.sync(*map(active, held))
    stopping = [work for work in answer["leases"] if work["state"] == "cancelling"]
    running = [work for work in answer["leases"] if work["state"] == "active"]
    bot.sync(completed(stopping[0], "stopped"), *map(active, [*stopping[1:], *running]))
    assign(pool)
    assert tenancy.usage("team-a") == 0, "all of it is gathered first"
    bot.sync(completed(stopping[1], "stopped"), completed(stopping[2], "stopped"), *map(active, running))
    assign(pool)
    assert (tenancy.usage("team-a"), tenancy.stop_requests(), kept(pool)) == (3, 4, {"bot-1": 1})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"properties": {"kind": "one"}}, {"properties": {"kind": "two"}, "priority": -5}),
        ({}, {"terms": {"locks": ["a"]}}),
    ],
    ids=["for another bot", "with gates"],
)
def test_what_is_kept_that_is_not_for_a_job_does_not_count_for_it(
    pool: Pool, tenancy: Tenancy, first: dict[str, Any], second: dict[str, Any]
) -> None:
    tenancy.quota("team-a", minimum=2)
    for kind in ("one", "two"):
        occupied(pool, kind, properties={"kind": kind})
    for fields in (first, second):
        pool.submit(instance="team-a", **fields)
        assign(pool)
    assign(pool)
    assert (tenancy.stop_requests(), kept(pool)) == (2, {"one": 1, "two": 1})


@pytest.mark.parametrize("first", ["of the instance", "of another"])
def test_units_that_are_kept_go_to_the_first_job_of_the_instance_and_to_no_other(
    pool: Pool, tenancy: Tenancy, first: str
) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    (urgent,) = pool.submit(instance="team-a" if first == "of the instance" else "team-z", priority=-9)
    assert bot.sync(completed(work, "stopped"))["leases"] == [], "it is left to the assigners"
    assert kept(pool) == {"bot-1": 1}
    for nth in range(20):
        pool.bot(f"other-{nth}", priority=-100)
    pool.assigner().run_once()
    (given,) = bot.take()
    assert given["job"] == (urgent if first == "of the instance" else wanting), "before other bots are used"
    assert {row.strategy for row in pool.rows("SELECT strategy FROM live")} == {"preemption", "capacity"}
    assert kept(pool) == {}


@pytest.mark.parametrize("strategy", ["capacity", "success"])
def test_units_that_are_kept_are_placed_beside_other_instances_jobs_that_prefer_other_bots(
    pool: Pool, tenancy: Tenancy, strategy: str
) -> None:
    pool.bot("bot-1", capacity=4)
    keep(pool, "bot-1", "team-a", units=3)
    pool.bot("bot-2", capacity=1, priority=-100)
    tenancy.quota("team-a", minimum=3)
    (large,) = pool.submit(instance="team-a", units=3)
    pool.submit(instance="team-z", priority=5)
    pool.assigner(strategy={"kind": strategy}).run_once()
    assert (pool.job(large).state, tenancy.usage("team-a"), kept(pool)) == ("leased", 3, {})


def test_what_is_kept_covers_the_job_that_it_fits_best(pool: Pool, tenancy: Tenancy) -> None:
    """A small job goes where as much is kept as it needs, and for neither anybody else is stopped."""
    tenancy.quota("team-a", minimum=20)
    held = []
    for name, capacity in (("bot-1", 3), ("bot-2", 1)):
        held.append(occupied(pool, name, capacity=capacity))
        keep(pool, name, "team-a", units=capacity)
    pool.submit(instance="team-a", priority=-5)
    pool.submit(instance="team-a", units=3)
    assign(pool)
    assert (tenancy.stop_requests(), tenancy.usage("team-a")) == (0, 0)
    for bot, leases in held:
        bot.sync(*map(completed, leases))
    pool.assigner().run_once()
    assert (tenancy.usage("team-a"), kept(pool)) == (4, {})


def test_a_bot_that_calls_gives_nothing_away_of_what_it_keeps(pool: Pool, tenancy: Tenancy) -> None:
    """Not even to a small job of the same instance, which fits into the rest."""
    sync_service = pool.sync_service(to_capacity=True)
    pool.submit(4)
    bot = pool.bot("bot-1", capacity=4, sync_service=sync_service)
    held = pool.given(bot)
    keep(pool, "bot-1", "team-a", units=3)
    (large,) = pool.submit(instance="team-a", units=3, priority=5)
    pool.submit(instance="team-a")
    pool.submit(3, instance="team-z", priority=1)
    answer = bot.sync(*map(completed, held))
    assert (len(answer["leases"]), kept(pool)) == (1, {"bot-1": 3})
    answer = bot.sync(active(answer["leases"][0]))
    assert (len(answer["leases"]), kept(pool)) == (1, {"bot-1": 3})
    pool.assigner().run_once()
    assert pool.job(large).state == "leased"


def test_a_bot_keeps_no_more_than_it_has(pool: Pool, tenancy: Tenancy) -> None:
    bot = pool.bot("bot-1", capacity=4)
    keep(pool, "bot-1", "team-a", units=3)
    bot.sync(capacity=2)
    assert kept(pool) == {"bot-1": 2}
    pool.submit(2, instance="team-a")
    pool.assigner().run_once()
    assert kept(pool) == {}


def test_small_jobs_take_nothing_of_what_is_gathered_for_a_large_one(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=3)
    pool.submit(2, instance="team-b", priority=10)
    bot = pool.bot(capacity=3)
    held = pool.given(bot)
    (large,) = pool.submit(instance="team-a", units=3)
    assign(pool)
    assert (tenancy.stop_requests(), kept(pool)) == (2, {"bot-1": 3})
    pool.submit(2, instance="team-a", priority=5)
    pool.submit(2, instance="team-z", priority=5)
    assign(pool)
    bot.sync(completed(held[0], "stopped"), active(held[1]))
    assign(pool)
    assert tenancy.usage("team-a") == 0
    bot.sync(completed(held[1], "stopped"))
    assign(pool)
    assert [each["job"] for each in bot.take()] == [large]


def test_an_instance_that_uses_its_maximum_elsewhere_leaves_what_is_kept_until_its_time_is_over(
    pool: Pool, tenancy: Tenancy
) -> None:
    """Its quota has closed meanwhile: what was evicted was evicted in vain, and upkeep says so."""
    _, wanting, bot, work = contested(pool, tenancy, properties={"kind": "one"})
    tenancy.quota("team-a", minimum=1, maximum=1)
    assign(pool)
    (sibling,) = pool.submit(instance="team-a", properties={"kind": "two"}, priority=-9)
    pool.bot("bot-2", properties={"kind": "two"})
    assign(pool)
    assert (pool.job(sibling).state, tenancy.usage("team-a")) == ("leased", 1)
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert (pool.job(wanting).state, kept(pool)) == ("queued", {"bot-1": 1})
    pool.change("UPDATE bots SET kept_until = now() - interval '1 s' WHERE kept_units > 0")
    with capture_logs() as logs:
        pool.upkeep().run_once()
    (told,) = (entry for entry in logs if entry["event"] == "leasehold.kept_units_unused")
    assert (told["bot"], told["instance"], told["units"]) == ("bot-1", "team-a", 1)
    assert kept(pool) == {}
    assign(pool)
    assert tenancy.running() == {"team-a": 1, "team-b": 1}


@pytest.mark.parametrize(
    ("leaving", "left"),
    [
        ("drained", {}),
        ("unhealthy", {}),
        ("closing", {}),
        ("to blue", {}),
        ("undrained", {"bot-1": 1}),
        ("ok", {"bot-1": 1}),
    ],
)
def test_a_bot_that_takes_no_work_keeps_no_units(
    pool: Pool, tenancy: Tenancy, leaving: str, left: dict[str, int]
) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    if leaving in ("drained", "undrained"):
        drain(pool, draining=leaving == "drained")
        assert kept(pool) == left, "at once"
    elif leaving == "to blue":
        pool.change("UPDATE bots SET labels = '{blue}'")
        put_cohort(pool, "blue", "blue")
        assert kept(pool) == left, "at once"
    elif leaving == "closing":
        pool.change("UPDATE bots SET closing = true")
    else:
        bot.sync(active(work), status=leaving)
    pool.upkeep().run_once()
    assert kept(pool) == left
    if left:
        return
    pool.bot("bot-2")
    assign(pool)
    assert pool.job(wanting).state == "leased", "it does not rest beside a free bot"


@pytest.mark.parametrize(("timeout", "stop_requests"), [(3, 0), (600, 1)])
def test_nothing_is_stopped_for_a_job_that_gives_up_before(
    pool: Pool, tenancy: Tenancy, timeout: float, stop_requests: int
) -> None:
    tenancy.quota("team-a", minimum=1)
    occupied(pool)
    pool.submit(instance="team-a", queue_timeout_seconds=timeout)
    assign(pool)
    assert tenancy.stop_requests() == stop_requests


def test_a_job_that_gives_up_soon_gets_the_room_of_a_bot_that_frees_it_in_time(pool: Pool, tenancy: Tenancy) -> None:
    """The other one runs what would be stopped first, but may take a minute to stop it."""
    tenancy.quota("team-a", minimum=1)
    slow, quick = pool.bot("slow", kill_grace=60.0), pool.bot("quick")
    for bot, priority in ((slow, 100), (quick, 10)):
        pool.submit(instance="team-b", priority=priority)
        pool.given(bot)
    pool.submit(instance="team-a", queue_timeout_seconds=60)
    assign(pool)
    assert kept(pool) == {"quick": 1}


@pytest.mark.parametrize("change", ["deadline", "drain"])
def test_nothing_is_stopped_for_a_job_that_has_become_hopeless_since_it_was_found(
    pool: Pool, tenancy: Tenancy, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contested(pool, tenancy)
    preempt = preempt_moves.preempt

    def late(connection: Any, **fields: Any) -> bool:
        if change == "drain":
            pool.change("UPDATE instances SET draining = true WHERE name = 'team-a'")
        else:
            fields["sync"] = 10_000
            connection.execute_sql("UPDATE jobs SET queue_deadline = now() + interval '1 h' WHERE state = 'queued'")
        return preempt(connection, **fields)

    monkeypatch.setattr("assigner.preemption.reclaim.preempt", late)
    assign(pool)
    assert tenancy.stop_requests() == 0


@pytest.mark.parametrize(
    "hopeless", [{"count": 30, "properties": {"gpu": ["yes"]}}, {"count": 30, "units": 3}, {"count": 600, "units": 4}]
)
def test_a_minimum_is_met_however_many_jobs_come_first_that_nobody_could_run(
    pool: Pool, tenancy: Tenancy, hopeless: dict[str, Any]
) -> None:
    """For want of such a bot, of a bot so large, or because the minimum is not so large."""
    tenancy.quota("team-a", minimum=3)
    occupied(pool)
    pool.submit(hopeless.pop("count"), instance="team-a", **hopeless)
    pool.submit(instance="team-a", priority=1)
    assign(pool)
    assign(pool)
    assert tenancy.stop_requests() == 1


@pytest.mark.parametrize(("verdict", "evictions"), [("succeeded", 0), ("stopped", 1)])
def test_an_eviction_is_one_once_the_job_has_lost_its_work(
    pool: Pool, tenancy: Tenancy, verdict: str, evictions: int
) -> None:
    victim, _, bot, work = contested(pool, tenancy)
    assign(pool)
    assert (tenancy.stop_requests(), tenancy.evictions(), tenancy.effective_maximum("team-b")) == (1, 0, 3)
    bot.sync(completed(work, verdict))
    assert (tenancy.evictions(), tenancy.effective_maximum("team-b")) == (evictions, 3 - evictions)
    assert pool.job(victim).evictions == evictions


# Preemption for jobs that ask for more than a place: only where their gates are open.


@pytest.fixture
def below(pool: Pool) -> Tenancy:
    """One bot that team-b fills, and team-a, which has a share of the pool and a minimum, and waits."""
    tenancy = Tenancy(pool)
    tenancy.quota("team-a", minimum=1, maximum=5)
    share(pool, "team-a", max_concurrent=2)
    return tenancy


def taken(pool: Pool) -> tuple[float, float]:
    """The jobs and the cost that team-a has taken of its counters."""
    return used(pool, "instance:team-a:jobs"), used(pool, "instance:team-a:cost")


def test_a_job_with_gates_of_an_instance_below_its_minimum_gets_the_place_of_another(
    pool: Pool, below: Tenancy
) -> None:
    bot, (work,) = occupied(pool)
    (job,) = pool.submit(instance="team-a", estimated_cost=3)
    assign(pool)
    assert below.stop_requests() == 1
    assert taken(pool) == (0, 0), "until it starts"
    assert closed(explained(pool, job)) == ["room"]
    bot.sync(completed(work, "stopped"))
    assign(pool)
    (given,) = bot.take()
    assert (given["job"], taken(pool)) == (job, (1, 3))
    bot.sync(completed(given))
    assert (taken(pool), pool.job(job).state) == ((0, 3), "succeeded")


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"max_concurrent": 0}, {}),
        ({"budget": 2}, {"estimated_cost": 3}),
        ({}, {"terms": {"locks": ["tree"]}}),
        ({}, {"terms": {"resources": {"cpu_milli": 100}}}),
    ],
)
def test_nothing_is_stopped_for_a_job_whose_gates_are_closed_or_that_takes_of_what_bots_have(
    pool: Pool, below: Tenancy, limits: dict[str, float], request_: dict[str, Any]
) -> None:
    share(pool, "team-a", **limits)
    pool.database.run(lambda c: counters.limit_all(c, {"lock:team-a:tree": 0}))
    occupied(pool, resources={"cpu_milli": 100})
    pool.submit(instance="team-a", **request_)
    assign(pool)
    assert below.stop_requests() == 0


def test_only_as_many_as_the_gates_let_through_have_somebody_stopped(pool: Pool, below: Tenancy) -> None:
    below.quota("team-a", minimum=4)
    occupied(pool, capacity=4)
    pool.submit(4, instance="team-a")
    for _ in range(2):
        assign(pool)
    assert below.stop_requests() == 2


def test_a_gate_that_closes_meanwhile_leaves_the_units_to_the_next_job_of_the_instance(
    pool: Pool, below: Tenancy
) -> None:
    bot, (work,) = occupied(pool)
    (job,) = pool.submit(instance="team-a", terms={"locks": ["tree"]})
    assign(pool)
    assert below.stop_requests() == 1
    (rival,) = pool.submit(instance="team-a", terms={"locks": ["tree"]}, priority=-5)
    other = pool.bot("bot-2")
    pool.assigner().run_once()
    assert [each["job"] for each in other.take()] == [rival], "it has the lock"
    (follower,) = pool.submit(instance="team-a", priority=9)
    bot.sync(completed(work, "stopped"))
    pool.assigner().run_once()
    assert [each["job"] for each in bot.take()] == [follower]
    assert gates_of(explained(pool, job))["locks"].open is False


def test_a_large_job_that_comes_back_from_its_rest_is_preempted_for(pool: Pool, below: Tenancy) -> None:
    below.quota("team-a", minimum=4)
    occupied(pool, capacity=4)
    (job,) = pool.submit(instance="team-a", units=4)
    rest(pool, job, -1)
    assign(pool)
    assert below.stop_requests() == 4


def test_a_job_whose_rate_is_limited_takes_no_token_for_units_that_are_being_freed(pool: Pool, below: Tenancy) -> None:
    pool.database.run(lambda c: rates.set_rates(c, {"llm": rates.RateTerms(0.001, 5)}, actor="test"))
    bot, (work,) = occupied(pool)
    (job,) = pool.submit(instance="team-a", terms={"resource_class": "llm"})
    assign(pool)
    assert below.stop_requests() == 1
    assert pool.row("SELECT tokens FROM rate_buckets").tokens == 5
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert pool.job(job).state == "leased"
    assert pool.row("SELECT tokens FROM rate_buckets").tokens < 5


def test_an_instance_that_gets_a_share_while_units_are_kept_for_it_still_gets_them(pool: Pool, below: Tenancy) -> None:
    no_share(pool, "team-a")
    bot, (work,) = occupied(pool)
    (job,) = pool.submit(instance="team-a")
    assign(pool)
    share(pool, "team-a", max_concurrent=1)
    assert pool.database.run(lambda connection: add_constraints(connection, 100)) == 1
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert [each["job"] for each in bot.take()] == [job]
    assert pool.row("SELECT strategy FROM live").strategy == "preemption"


@pytest.mark.parametrize("protected", [False, True])
def test_a_lease_of_the_cohort_that_its_bot_was_in_is_a_victim_as_any_other(
    pool: Pool, tenancy: Tenancy, *, protected: bool
) -> None:
    """What its instance has to spare is counted in that cohort."""
    bot, (work,) = occupied(pool, labels=["night"])
    put_cohort(pool, "nights", "night")
    tenancy.quota("team-a", minimum=1, cohort="nights")
    tenancy.quota("team-b", minimum=1 if protected else 0)
    (wanting,) = pool.submit(instance="team-a", label="night")
    sentence = gates_of(explained(pool, wanting))["room"].sentence
    assert "1 unit held by jobs that started while their bot was in another cohort" in sentence
    assign(pool)
    if protected:
        assert (tenancy.stop_requests(), kept(pool)) == (0, {})
        return
    assert (tenancy.stop_requests(), kept(pool)) == (1, {"bot-1": 1})
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert (pool.job(wanting).state, pool.job(work["job"]).evictions) == ("leased", 1)
    assert cohort_of(pool, "evictions") == "default"
