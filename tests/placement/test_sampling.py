"""Sampling and the fall-backs around it, and what is remembered of where work ran."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb
from statistics import mean, stdev
from typing import Any

import pytest

from assigner.placement import fleet as fleet_placement
from assigner.placement import sampling
from assigner.placement.capacity import Capacity
from assigner.placement.fleet import Cell, Fleet, Joined, shuffled
from assigner.placement.strategy import Policy, SamplingSettings, Snapshot
from schema.fleet import candidates, kinds, members
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.moves.grant import grant
from schema.moves.sessions import drain
from schema.picking import ready
from schema.picking.pick import Order, ReadyJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.explain import explained, gates_of
from tests.support.plans import statements
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import Race


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sample sizes that were asked for, one entry for each sampling round."""
    found: list[int] = []
    read = sampling.sample_snapshot

    def counted(connection: Connection, jobs: Sequence[ReadyJob], **how: Any) -> Snapshot:
        found.append(how["sample_size"])
        return read(connection, jobs, **how)

    monkeypatch.setattr(sampling, "sample_snapshot", counted)
    return found


def test_a_sample_is_bounded_random_and_read_without_locks(pool: Pool) -> None:
    for number in range(12):
        pool.bot(f"bot-{number}")
    pool.submit()
    seen: set[str] = set()
    with pool.database.connect() as other:
        other.execute_sql("SELECT 1 FROM bots FOR UPDATE")
        with pool.database.begin() as connection:
            jobs = ready.pick(connection, ready.Scope(), order=ready.Order.PRIORITY, batch=1)
            for _ in range(40):
                found = sampling.sample_snapshot(connection, jobs, sample_size=3, fleet=Fleet(), chance=pool.chance)
                (bots,) = found.candidates
                assert len({bot.id for bot in bots}) == 3
                seen |= {bot.name for bot in bots}
        other.rollback()
    assert len(seen) > 6


@pytest.mark.parametrize("strategy", ["capacity", "locality"])
@pytest.mark.parametrize("attempts", [1, 3])
def test_after_the_last_round_any_healthy_bot_will_do(
    pool: Pool, rounds: list[int], attempts: int, strategy: str
) -> None:
    (job,) = pool.submit()
    pool.bot("best", priority=-5)
    pool.bot("spare", priority=5)
    settings: dict[str, Any] = {"kind": strategy, "sampling": {"sample_size": 4, "max_attempts": attempts}}
    with pool.database.connect() as other:
        other.execute_sql("SELECT 1 FROM bots WHERE name = 'best' FOR UPDATE")
        pool.assigner(strategy=settings).run_once()
        other.rollback()
    assert rounds == [4] * (attempts + 1), "a lost race gets a fresh sample first"
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert (decision["bot"], decision["round"]) == ("spare", 0)
    assert pool.queue_of(job).looks == 0


def test_only_a_job_that_not_even_any_healthy_bot_could_take_backs_off(pool: Pool) -> None:
    (job,) = pool.submit(units=2)
    pool.bot("small")
    pool.assigner().run_once()
    row = pool.queue_of(job)
    assert (pool.job(job).state, row.looks, row.schedule_after is None) == ("queued", 1, False)


def test_one_round_is_the_default() -> None:
    assert SamplingSettings() == SamplingSettings(sample_size=10, max_attempts=1)


def worked(pool: Pool, bot: Bot, hints: Sequence[str], verdict: str = "succeeded") -> None:
    """The bot gets one job after another for each hint, and they end so."""
    for hint in hints:
        pool.submit(locality_hint=hint)
        (work,) = pool.given(bot)
        bot.sync(completed(work, verdict))


def remembered(pool: Pool) -> list[str]:
    return [row.hint for row in pool.rows("SELECT hint FROM bot_localities ORDER BY seq")]


def test_a_bot_keeps_the_hints_of_its_ten_latest_successes(pool: Pool) -> None:
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
    worked(pool, bot, [f"repo-{number}" for number in range(11)])
    assert remembered(pool) == [f"repo-{number}" for number in range(1, 11)]
    worked(pool, bot, ["repo-1"])
    assert remembered(pool) == [f"repo-{number}" for number in (*range(2, 11), 1)]


@pytest.mark.parametrize(("limit", "kept"), [(0, []), (2, ["b", "c"])])
def test_the_limit_is_a_setting_and_nought_turns_it_off(pool: Pool, limit: int, kept: list[str]) -> None:
    worked(
        pool, pool.bot(sync_service=pool.sync_service(enabled=False, bot_locality_hint_limit=limit)), ["a", "b", "c"]
    )
    assert remembered(pool) == kept


def test_a_job_that_failed_leaves_no_hint(pool: Pool) -> None:
    worked(pool, pool.bot(sync_service=pool.sync_service(enabled=False)), ["a"], verdict="failed")
    assert remembered(pool) == []


def test_the_pace_of_retries_is_a_setting(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot(sync_service=pool.sync_service(retry_base=100.0, retry_cap=150.0))
    pool.assigner().run_once()
    waits = []
    for _ in range(2):
        (work,) = bot.sync()["leases"]
        bot.sync(active(work))
        bot.sync(completed(work, "error"))
        row = pool.row("SELECT extract(epoch FROM schedule_after - now()) AS wait FROM jobs")
        waits.append(float(row.wait))
        pool.change("UPDATE jobs SET schedule_after = NULL")
        pool.assigner().run_once()
    assert 95 < waits[0] <= 100
    assert 145 < waits[1] <= 150
    assert pool.job(job).attempts == 3


# Candidates for many groups of jobs at once: able ones only, as many as there are, others for every group.


JOBS = """
SELECT id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint,
    false AS tried
FROM jobs WHERE state = 'queued' ORDER BY id
"""
# What a candidate has to be, in words that no statement of ours uses.
ABLE = Statement("""
SELECT b.id FROM bots b JOIN instances i ON i.id = :instance JOIN platforms p ON p.id = :platform
JOIN kinds k ON k.id = b.kind
WHERE k.properties @> p.properties AND b.status = 'ok' AND NOT b.draining AND b.capacity - b.in_use >= :units
    AND b.cohort = :cohort AND coalesce(b.instance, i.id) = i.id AND coalesce(b.pool, i.pool, '') = coalesce(i.pool, '')
    AND (b.pool IS NULL OR i.pool IS NOT NULL)
""")
LETTERS = tuple("abcdef")


def waiting(pool: Pool) -> list[ReadyJob]:
    return [ReadyJob(**row._asdict()) for row in pool.rows(JOBS)]


def sampled(connection: Connection, jobs: Sequence[ReadyJob], fleet: Fleet, *, seed: int, size: int = 5) -> Snapshot:
    return sampling.sample_snapshot(connection, jobs, sample_size=size, fleet=fleet, chance=random.Random(seed))


def bots_of_jobs(seen: Snapshot) -> list[list[FreeBot]]:
    """The candidates of each job, in the order of the jobs."""
    of = {job.id: [*bots] for group, bots in zip(seen.groups, seen.candidates, strict=True) for job in group.jobs}
    return [of[job.id] for job in seen.jobs]


def counts_of_jobs(seen: Snapshot) -> list[int]:
    """The number of candidates of each job, in the order of the jobs."""
    return [len(bots) for bots in bots_of_jobs(seen)]


@pytest.fixture
def motley(pool: Pool) -> list[ReadyJob]:
    """Jobs of every cohort, instance, requirement set and size; bots for most of them, of ten kinds, half of the idle
    ones for one instance or one pool only, every third larger."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=5, kinds=LETTERS)
        filling.fill_jobs(connection, 60, instances=5, kinds=LETTERS)
        filling.fill_jobs(connection, 30, instances=5, kinds=LETTERS, units=2)
        filling.fill_bots(connection, {letter: 3 + 5 * nth for nth, letter in enumerate("abcde")})
        filling.occupy(connection, "b", leaving=2)

    pool.database.run(fill)
    pool.change("INSERT INTO cohorts (id, name, position) VALUES (1, 'left', 1), (2, 'right', 2)")
    pool.change(
        "UPDATE jobs SET cohort = 1 + id % 2, queue = queue_in_cohort(queue, (1 + id % 2)::integer)"
        " WHERE state = 'queued'"
    )
    pool.change("UPDATE instances SET pool = 'shared' WHERE name IN ('i-3', 'i-4')")
    pool.change(
        "UPDATE bots b SET cohort = 1 + b.id % 2, capacity = greatest(b.in_use, 1 + (b.id % 3 = 0)::integer),"
        " instance = CASE WHEN b.id % 4 = 0 AND b.in_use = 0"
        " THEN (SELECT id FROM instances WHERE name = 'i-' || b.id % 3) END,"
        " pool = CASE WHEN b.id % 4 = 1 AND b.in_use = 0 THEN 'shared' END,"
        " kind = CASE b.id % 5 WHEN 0 THEN intern_kind("
        ' (SELECT properties || \'{"host": ["x"]}\' FROM kinds WHERE id = b.kind)) ELSE kind END'
    )
    pool.change("UPDATE leases l SET cohort = b.cohort FROM bots b WHERE b.id = l.bot_id AND l.ended_at IS NULL")
    pool.change(
        "UPDATE jobs j SET cohort = l.cohort, queue = queue_in_cohort(queue, l.cohort)"
        " FROM leases l WHERE l.job_id = j.id AND l.ended_at IS NULL"
    )
    return waiting(pool)


@pytest.mark.parametrize("many_kinds", [1000, 0], ids=["by kind", "one after another"])
def test_candidates_are_able_and_as_many_as_there_are(pool: Pool, motley: list[ReadyJob], many_kinds: int) -> None:
    fleet = Fleet(many_kinds=many_kinds)
    with pool.database.connect() as connection:
        for seed in range(8):
            seen = sampled(connection, motley, fleet, seed=seed)
            assert len(seen.groups) > sampling.FEW
            for group, found in zip(seen.groups, seen.candidates, strict=True):
                want = group.wanted(5)
                able = {row.id for row in connection.execute(ABLE, vars(want))}
                ids = {bot.id for bot in found}
                assert ids <= able
                assert len(ids) == len(found) == min(want.count, len(able)), group


@pytest.mark.parametrize("many_kinds", [1000, 0], ids=["by kind", "one after another"])
def test_the_only_bot_in_two_thousand_that_offers_something_is_found(pool: Pool, many_kinds: int) -> None:
    kinds = tuple(f"common-{number}" for number in range(8))

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("rare", *kinds))
        filling.fill_jobs(connection, 9, instances=1, kinds=("rare", *kinds))
        filling.fill_bots(connection, {"rare": 1, **dict.fromkeys(kinds, 250)})

    pool.database.run(fill)
    rare = pool.row("SELECT id FROM platforms WHERE properties->'kind'->>0 = 'rare'").id
    fleet = Fleet(many_kinds=many_kinds)
    with pool.database.connect() as connection:
        for seed in range(10):
            seen = sampled(connection, waiting(pool), fleet, seed=seed)
            assert len(seen.groups) == 9
            for group, found in zip(seen.groups, seen.candidates, strict=True):
                assert [bot.name for bot in found] == ["rare-1"] if group.platform == rare else len(found) == 5


def test_jobs_of_many_tenants_that_the_same_bots_could_take_are_placed_as_those_of_one(pool: Pool) -> None:
    jobs, bots = 100, 400

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=jobs, kinds=("free", "rare"))
        filling.fill_jobs(connection, jobs, instances=jobs, kinds=("free",))
        filling.fill_jobs(connection, 2, instances=jobs, kinds=("free",), units=2)
        filling.fill_jobs(connection, 1, instances=1, kinds=("rare",))
        filling.fill_bots(connection, {"free": bots, "rare": 1})

    pool.database.run(fill)
    pool.change("UPDATE bots SET capacity = 2 WHERE id % 2 = 0")
    with pool.database.connect() as connection:
        seen = sampled(connection, waiting(pool), Fleet(), seed=1)
    assert sorted((len(group.jobs), len(found)) for group, found in zip(seen.groups, seen.candidates, strict=True)) == [
        (1, 1),
        (2, 6),
        (100, 104),
    ]
    assert all([*group.jobs] == [job for job in seen.jobs if job in group.jobs] for group in seen.groups)
    placed = Capacity().choose(seen, Policy(), how={})
    assert len(placed) == jobs + 3


def test_groups_that_compete_for_few_bots_are_shown_others(pool: Pool) -> None:
    kinds = tuple(f"fine-{number}" for number in range(60))

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("coarse", *kinds))
        filling.fill_jobs(connection, len(kinds), instances=1, kinds=kinds)
        filling.fill_bots(connection, {"coarse": 2_000, kinds[0]: 200})

    pool.database.run(fill)
    pool.change(
        "UPDATE bots SET kind = intern_kind(jsonb_build_object('kind', CAST(:kinds AS text[])))"
        " WHERE name LIKE 'fine%'",
        kinds=list(kinds),
    )
    jobs, fleet = waiting(pool), Fleet()
    with pool.database.connect() as connection:
        for seed in range(3):
            seen = sampled(connection, jobs, fleet, seed=seed)
            placed = Capacity().choose(seen, Policy(), how={})
            # Without regard to the others it would be fewer.
            assert len({placement.bot_id for placement in placed}) == len(placed) > 45


def test_bots_for_one_tenant_among_many_are_found_among_thousands_for_another(pool: Pool) -> None:
    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=40, kinds=("free",))
        filling.fill_jobs(connection, 40, instances=40, kinds=("free",))
        filling.fill_bots(connection, {"free": 3_000})

    pool.database.run(fill)
    pool.change("UPDATE instances SET pool = 'one' WHERE name = 'i-3'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'i-0')")
    pool.change("UPDATE bots SET instance = NULL, pool = 'one' WHERE name = 'free-7'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'i-9') WHERE name = 'free-2000'")
    names = {row.id: row.name for row in pool.rows("SELECT id, name FROM instances")}
    with pool.database.connect() as connection:
        for seed in range(5):
            seen = sampled(connection, waiting(pool), Fleet(), seed=seed)
            found = {
                names[group.instance]: [bot.name for bot in bots]
                for group, bots in zip(seen.groups, seen.candidates, strict=True)
                if bots
            }
            assert len(found.pop("i-0")) == 5
            assert found == {"i-3": ["free-7"], "i-9": ["free-2000"]}


def six_kinds_of_jobs(pool: Pool) -> list[ReadyJob]:
    for letter in LETTERS:
        pool.submit(properties={"kind": letter})
    return waiting(pool)


def test_a_bot_whose_properties_have_changed_since_is_not_given_what_it_no_longer_offers(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", capacity=10, properties={"kind": list(LETTERS)})
    with pool.database.connect() as connection:
        before = sampled(connection, jobs, fleet, seed=1)
        assert counts_of_jobs(before) == [1] * 6
        pool.bot("b", capacity=10, properties={"kind": ["a"]})
        placements = Capacity().choose(before, Policy(), how={})
        granted = grant(connection, placements, assigner="test", strategy="test", ack=1)
        assert [lease.job_id for lease in granted] == [jobs[0].id]
        connection.rollback()
        after = sampled(connection, jobs, fleet, seed=1)
        assert counts_of_jobs(after) == [1, 0, 0, 0, 0, 0]


def test_an_assigner_that_knew_a_bot_places_by_what_it_offers_now(pool: Pool) -> None:
    assigner = pool.assigner()
    bot = pool.bot("b", capacity=10, properties={"kind": list(LETTERS)})
    six_kinds_of_jobs(pool)
    assigner.run_once()
    assert len(bot.take()) == 6
    pool.bot("b", capacity=10, properties={"kind": ["a", "c"]})
    for letter in LETTERS:
        pool.submit(properties={"kind": letter}, label="late")
    assigner.run_once()
    late = pool.rows(
        "SELECT p.properties->'kind'->>0 AS kind FROM jobs j JOIN platforms p ON p.id = j.platform"
        " WHERE j.label = 'late' AND j.state = 'leased' ORDER BY 1"
    )
    assert [row.kind for row in late] == ["a", "c"]


def test_two_statements_do_for_any_number_of_groups_once_the_fleet_is_known(pool: Pool) -> None:
    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=50, kinds=LETTERS)
        filling.fill_jobs(connection, 300, instances=50, kinds=LETTERS)
        filling.fill_bots(connection, dict.fromkeys(LETTERS, 20))

    pool.database.run(fill)
    jobs, fleet = waiting(pool), Fleet()
    counts = []
    with pool.database.connect() as connection:
        for seed in range(3):
            with statements() as sent:
                seen = sampled(connection, jobs, fleet, seed=seed)
            assert min(counts_of_jobs(seen)) >= 5
            counts.append(len(sent))
    assert counts == [4, 2, 2]


def test_bots_that_come_and_go_are_known_with_the_next_sample(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("early", properties={"kind": ["a", "b"]})

    def found(connection: Connection) -> list[int]:
        return counts_of_jobs(sampled(connection, jobs, fleet, seed=1))

    with pool.database.connect() as connection:
        assert found(connection) == [1, 1, 0, 0, 0, 0]
        late = pool.bot("late", properties={"kind": ["b", "a"]})
        assert found(connection) == [2, 2, 0, 0, 0, 0]
        pool.bot("other", properties={"kind": ["c", "a"]})
        assert found(connection) == [3, 2, 1, 0, 0, 0]
        pool.database.run(lambda c: drain(c, "early", draining=True, actor="test", reason=""))
        assert found(connection) == [2, 1, 1, 0, 0, 0]
        assert len(fleet) == 2
        pool.database.run(lambda c: drain(c, "early", draining=False, actor="test", reason=""))
        late.sync(status="gone")
        assert found(connection) == [2, 1, 1, 0, 0, 0]


def test_a_bot_whose_session_opens_while_a_sample_is_drawn_is_known_with_the_next_one(pool: Pool, race: Race) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    with pool.database.connect() as connection:
        with race.first() as first:
            first.bot("b", properties={"kind": "a"})
            # Whoever begins later has a higher number, and ends first.
            pool.bot("c", properties={"kind": "b"})
            assert counts_of_jobs(sampled(connection, jobs, fleet, seed=1)) == [0, 1, 0, 0, 0, 0]
            first.commit()
        assert counts_of_jobs(sampled(connection, jobs, fleet, seed=1)) == [1, 1, 0, 0, 0, 0]


def test_numbers_of_a_database_that_was_restored_neither_hide_bots_nor_are_read_again_and_again(pool: Pool) -> None:
    pool.bot("a")
    pool.change("UPDATE bot_changes SET transaction = transaction + 1000000")
    with pool.database.connect() as connection:
        first = members.read_changes(connection, None)
        assert (len(first.bots), first.is_complete) == (1, True)
        assert members.read_changes(connection, first.snapshot).bots == {}
        again = members.read_changes(connection, "9000000:9000000:")
        assert (again.bots, again.is_complete) == (first.bots, True)


def test_a_requirement_set_that_was_deleted_has_no_bots_and_breaks_nothing(pool: Pool) -> None:
    gone, fleet = CandidateRequest(0, 1, 4711, units=1, count=5), Fleet()
    with pool.database.connect() as connection:
        for kind in "ab":
            pool.bot(f"bot-{kind}", properties={"kind": kind})
            assert sampling.sample(connection, fleet, [gone], sample_size=5, chance=pool.chance) == [[]]


def test_what_an_assigner_remembers_of_requirement_sets_is_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_placement, "MAX_PLATFORMS", 2)
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", properties={"kind": ["a", "d"]})
    with pool.database.connect() as connection:
        for pair in (jobs[:2], jobs[2:4], jobs[:2]):
            found = sampled(connection, pair, fleet, seed=1).candidates
            assert sorted(map(len, found)) == [0, 1]
            assert len(fleet._wanted) <= 2


def test_a_fleet_of_which_a_part_could_not_be_read_is_read_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    with pool.database.connect() as connection:
        sampled(connection, jobs, fleet, seed=1)
        pool.bot("b", properties={"kind": "a"})
        with monkeypatch.context() as broken:
            broken.setattr(kinds, "offers", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sampled(connection, jobs, fleet, seed=1)
        assert counts_of_jobs(sampled(connection, jobs, fleet, seed=1)) == [1, 0, 0, 0, 0, 0]


def test_nothing_that_was_remembered_holds_for_another_database(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", properties={"kind": ["a", "b"]})

    def found(connection: Connection) -> list[int]:
        return counts_of_jobs(sampled(connection, jobs, fleet, seed=1))

    with pool.database.connect() as connection:
        assert found(connection) == [1, 1, 0, 0, 0, 0]
        pool.change('UPDATE kinds SET properties = \'{"kind": ["c"]}\'')
        pool.change("DELETE FROM kind_platforms")
        pool.change(
            "INSERT INTO kind_platforms (platform, kind)"
            " SELECT p.id, k.id FROM platforms p JOIN kinds k ON k.properties @> p.properties"
        )
        fleet._snapshot = "9000000:9000000:"
        assert found(connection) == [0, 0, 1, 0, 0, 0]


def test_a_bot_that_was_deleted_is_forgotten_in_the_end(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_placement, "REFRESHES", 3)
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", properties={"kind": ["a"]})
    with pool.database.connect() as connection:
        sampled(connection, jobs, fleet, seed=1)
        pool.change("DELETE FROM bots")
        pool.change("DELETE FROM bot_changes")
        assert len(fleet) == 1
        for _ in range(3):
            sampled(connection, jobs, fleet, seed=1)
        assert len(fleet) == 0


def test_a_bot_that_returns_with_other_properties_again_and_again_leaves_nothing_behind(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    with pool.database.connect() as connection:
        for boot in range(5):
            pool.bot("b", properties={"kind": "a", "boot": str(boot)}, instance=None if boot % 2 else "team")
            sampled(connection, jobs, fleet, seed=1)
            assert (len(fleet._members), [len(cells) for cells in fleet._cells.values()]) == (1, [1])


def test_groups_that_are_only_looked_at_take_no_bots_from_each_other(pool: Pool) -> None:
    """A job that fits on no bot for lack of resources keeps the only free bot from nobody."""
    pool.database.run(lambda connection: filling.fill_bots(connection, {"common": 500, "scarce": 500}))
    pool.change("UPDATE bots SET in_use = 1, held = 0 WHERE name LIKE 'scarce%'")
    pool.bot("only", properties={"kind": ["a", "b"]}, resources={"cpu_milli": 10})
    for kind, need in (("common", 1), ("scarce", 1), ("a", 1), ("b", 99)):
        pool.submit(5, properties={"kind": kind}, terms={"resources": {"cpu_milli": need}})
    pool.assigner().run_once()
    leased = pool.rows(
        "SELECT p.properties->'kind'->>0 AS kind FROM jobs j JOIN platforms p ON p.id = j.platform"
        " WHERE j.state = 'leased' ORDER BY 1"
    )
    assert Counter(row.kind for row in leased) == {"a": 1, "common": 5}
    pool.change("UPDATE bots SET in_use = 0 WHERE name LIKE 'scarce%'")


def test_few_free_bots_among_many_are_found_beside_a_group_whose_bots_are_all_free(pool: Pool) -> None:
    for kind in "ab":
        pool.submit(properties={"kind": kind})
    jobs, fleet = waiting(pool), Fleet()
    pool.database.run(lambda connection: filling.fill_bots(connection, {"a": 2_000, "b": 2_000}))
    pool.change("UPDATE bots SET in_use = 1 WHERE name LIKE 'b-%' AND name NOT LIKE 'b-%00'")
    with pool.database.connect() as connection:
        for seed in range(20):
            all_free, few_free = sampled(connection, jobs, fleet, seed=seed).candidates
            assert (len(all_free), len(few_free) > 0) == (5, True)
    pool.change("UPDATE bots SET in_use = 0")


def test_jobs_are_not_too_large_because_somebody_holds_the_only_bot_that_is_large_enough(pool: Pool) -> None:
    (job,) = pool.submit(units=4)
    pool.bot("small")
    pool.bot("large", capacity=4)
    assigner = pool.assigner()
    with pool.database.connect() as other:
        other.execute_sql("SELECT FROM bots WHERE name = 'large' FOR UPDATE")
        assigner.run_once()
        other.rollback()
    assert pool.queue_of(job).looks == 0
    assigner.run_once()
    assert pool.job(job).state == "leased"


# Each free bot that could take a job is as likely to be in its sample as any other, and so is each pair of them.


def inclusions(samples: Sequence[Sequence[int]]) -> Counter[object]:
    return Counter(each for sample in samples for each in sample)


def pairs(samples: Sequence[Sequence[int]]) -> Counter[object]:
    return Counter(pair for sample in samples for pair in combinations(sorted(sample), 2))


def chi_square(counts: Counter[object], cells: int) -> float:
    """The statistic of counts, which are equal in expectation."""
    expected = counts.total() / cells
    return (sum((count - expected) ** 2 for count in counts.values()) + (cells - len(counts)) * expected**2) / expected


def is_uniform(samples: Sequence[Sequence[int]], able: Sequence[int]) -> bool:
    """Whether samples are as even as those that `random.sample` draws: of both statistics, the difference from the mean
    of a hundred reference runs is less than four of their standard deviations (p > 0.0001 for one that is normal)."""
    size, chance = len(samples[0]), random.Random(1)
    assert {len(sample) for sample in samples} == {size}
    references = [[chance.sample(able, size) for _ in samples] for _ in range(100)]
    for statistic, cells in ((inclusions, len(able)), (pairs, comb(len(able), 2))):
        expected = [chi_square(statistic(each), cells) for each in references]
        if chi_square(statistic(samples), cells) > mean(expected) + 4 * stdev(expected):
            return False
    return True


def test_the_test_of_uniform_samples_finds_contiguous_ones() -> None:
    able, chance = list(range(40)), random.Random(1)
    fair = [chance.sample(able, 5) for _ in range(500)]
    starts = [chance.randrange(40) for _ in range(500)]
    assert is_uniform(fair, able)
    assert not is_uniform([[able[(start + n) % 40] for n in range(5)] for start in starts], able)


@pytest.mark.parametrize("many_kinds", [1000, 0], ids=["by kind", "one after another"])
@pytest.mark.parametrize("groups", [1, 8])
def test_samples_of_forty_bots_with_mixed_room_are_uniform(pool: Pool, many_kinds: int, groups: int) -> None:
    pool.submit(properties={"kind": "a"}, units=2)
    for number in range(1, groups):
        pool.submit(instance=f"other-{number}", properties={"kind": "ab"[number % 2]})
    jobs = waiting(pool)
    pool.database.run(lambda connection: filling.fill_bots(connection, {"a": 40, "b": 40}, capacity=8))
    pool.change("UPDATE bots SET in_use = id % 8")
    able = [row.id for row in pool.rows("SELECT id FROM bots WHERE name LIKE 'a-%' AND capacity - in_use >= 2")]
    fleet, samples = Fleet(many_kinds=many_kinds), list[list[int]]()
    with pool.database.connect() as connection:
        for seed in range(600):
            seen = sampled(connection, jobs, fleet, seed=seed, size=4)
            samples.append([bot.id for bot in seen.candidates[0]])
    assert len(able) == 35
    assert is_uniform(samples, able)
    pool.change("UPDATE bots SET in_use = 0")


@pytest.mark.parametrize("free", [500, 5_000, 10_000])
def test_samples_of_ten_thousand_bots_are_uniform_however_many_are_free(pool: Pool, free: int) -> None:
    pool.submit(properties={"kind": "a"})
    jobs = waiting(pool)
    pool.database.run(lambda connection: filling.fill_bots(connection, {"a": 10_000}, capacity=4))
    pool.change("UPDATE bots SET in_use = CASE WHEN 7919 * id % 10000 < :free THEN id % 4 ELSE 4 END", free=free)
    able = [row.id for row in pool.rows("SELECT id FROM bots WHERE free ORDER BY id")]
    blocks = {bot_id: nth * 40 // free for nth, bot_id in enumerate(able)}
    fleet, samples = Fleet(), list[list[int]]()
    with pool.database.connect() as connection:
        for seed in range(300):
            (found,) = sampled(connection, jobs, fleet, seed=seed, size=10).candidates
            assert len({bot.id for bot in found}) == 10
            samples.append([blocks[bot.id] for bot in found])
    reference = random.Random(1)
    expected = [
        chi_square(statistic(drawn), cells)
        for statistic, cells in ((inclusions, 40), (pairs, comb(41, 2)))
        for drawn in [[[blocks[each] for each in reference.sample(able, 10)] for _ in samples]]
    ]
    assert chi_square(inclusions(samples), 40) < 2 * expected[0]
    assert chi_square(pairs(samples), comb(41, 2)) < 1.5 * expected[1]
    pool.change("UPDATE bots SET in_use = 0")


def test_a_shuffle_gives_each_element_once_and_every_order_as_often() -> None:
    chance = random.Random(1)
    orders = Counter(tuple(shuffled("abcd", chance)) for _ in range(2400))  # type: ignore[arg-type]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(orders) == 24
    assert chi_square(Counter(orders), 24) < 49.7, "the bound of 23 degrees of freedom for p = 0.001"


def test_joined_lists_are_one_list() -> None:
    joined = Joined([[1, 2], [], [3], [4, 5, 6]])
    assert [joined[place] for place in range(len(joined))] == [1, 2, 3, 4, 5, 6]
    assert list(shuffled(Joined([]), random.Random(1))) == []


def test_a_cell_holds_what_was_put_there_and_not_taken_out() -> None:
    chance, held = random.Random(1), set[int]()
    cell = Cell(members.Member(members.Service(0, None, None), 1))
    for bot_id in [chance.randrange(20) for _ in range(500)]:
        (cell.remove if bot_id in held else cell.add)(bot_id)
        held ^= {bot_id}
        assert sorted(cell.ids) == sorted(held)


# Few bots that serve a tenant are found among thousands that serve others only.


BOTS_FEW_BOTS, TRIES = 3_000, 5
KIND = {"kind": ["free"]}


@pytest.fixture(params=["instance", "pool", "all"])
def crowded(request: pytest.FixtureRequest, pool: Pool) -> str:
    """Three thousand free bots serve team-b, and one serves team-a: it alone, its pool, or everybody. A job waits."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("free",))
        filling.fill_bots(connection, {"free": BOTS_FEW_BOTS})

    pool.database.run(fill)
    pool.change("SELECT intern_instance('team-b')")
    (job,) = pool.submit(instance="team-a", properties=KIND)
    pool.change("UPDATE instances SET pool = 'one' WHERE name = 'team-a'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'team-b')")
    serves = {"instance": "(SELECT id FROM instances WHERE name = 'team-a')", "pool": "NULL", "all": "NULL"}
    of_pool = "'one'" if request.param == "pool" else "NULL"
    pool.change(f"UPDATE bots SET instance = {serves[request.param]}, pool = {of_pool} WHERE name = 'free-1500'")
    return job


def test_the_few_bots_of_a_tenant_are_found_wherever_a_look_begins(pool: Pool, crowded: str) -> None:
    with pool.database.connect() as connection:
        for seed in range(TRIES):
            chance = random.Random(seed)
            (job,) = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10)
            want = CandidateRequest(job.cohort, job.instance, job.platform, units=1, count=10)
            (found,) = sampling.sample(connection, Fleet(), [want], sample_size=10, chance=chance)
            assert [bot.name for bot in found] == ["free-1500"]
            assert [bot.name for bot in candidates.any_free(connection, want)] == ["free-1500"]
            connection.rollback()


@pytest.mark.parametrize("instances", [None, ["team-a"]])
def test_explain_sees_the_few_bots_of_a_tenant(pool: Pool, crowded: str, instances: list[str] | None) -> None:
    found = explained(pool, crowded, instances=instances)
    assert found.sentence.startswith("nothing stands in its way")
    seen = gates_of(found)["cohort"].evidence
    assert (seen["present"], seen["healthy"]) == ((1, 1) if instances else (1001, 1001))


def test_a_tenant_with_only_full_bots_is_told_of_those(pool: Pool, crowded: str) -> None:
    pool.assigner().run_once()
    (late,) = pool.submit(instance="team-a", properties=KIND)
    assert [
        gate for gate, answer in gates_of(explained(pool, late, instances=["team-a"])).items() if not answer.open
    ] == ["room"]
    with pool.database.connect() as connection:
        assert not ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10)
