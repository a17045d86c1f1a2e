"""Sampling and the fall-backs around it, and what is remembered of where work ran."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from assigner.placement import fleet as fleet_placement
from assigner.placement import sampling
from assigner.placement.fleet import Fleet
from assigner.placement.strategies.capacity import Capacity
from assigner.placement.strategy import Policy, Snapshot
from schema.fleet import kinds, members
from schema.moves.grant import grant
from schema.picking import ready
from schema.picking.pick import ReadyJob
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import statements
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, drain
from tests.support.tenancy import Tenancy


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


@pytest.mark.parametrize(("strategy", "attempts"), [("capacity", 1), ("capacity", 3), ("locality", 1)])
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


@pytest.mark.parametrize("enabled", [True, False])
def test_jobs_that_the_same_bots_could_take_fall_back_together_however_many_requirement_sets_they_have(
    pool: Pool, enabled: bool
) -> None:
    pool.bot("small", properties={"version": ["0"]}, capacity=4)
    pool.bot("large", properties={"version": [str(number) for number in range(20)]}, capacity=40)
    for number in range(20):
        pool.submit(instance=f"tenant-{number % 4}", properties={"version": str(number)})
    assigner = pool.assigner(strategy={"kind": "capacity", "sampling": {"enabled": enabled}})
    with pool.database.connect() as other, statements() as sent:
        other.execute_sql("SELECT 1 FROM bots WHERE name = 'large' FOR UPDATE")
        assigner.run_once()
        other.rollback()
    looks = [each for each in sent if "WITH w AS" in each and "SKIP LOCKED" in each]
    assert len(looks) <= 2, "one for the jobs of both bots and one for those of the large one"
    assert pool.row("SELECT count(*) AS leased FROM jobs WHERE state = 'leased'").leased == 1
    assigner.run_once()
    assert pool.row("SELECT count(*) AS leased FROM jobs WHERE state = 'leased'").leased == 20


def test_units_that_are_kept_for_one_instance_hide_no_room_of_other_bots(pool: Pool) -> None:
    for name in ("kept-1", "kept-2"):
        pool.bot(name, priority=-5, capacity=2)
    pool.bot("free", priority=5, capacity=2)
    for instance in ("a", "b"):
        pool.submit(instance=instance, units=2)
    pool.change(
        "UPDATE bots SET kept_units = 1, kept_for = (SELECT id FROM instances WHERE name = 'a'),"
        " kept_until = now() + interval '1 hour' WHERE name LIKE 'kept%'"
    )
    pool.assigner(strategy={"kind": "capacity", "sampling": {"enabled": False}}).run_once()
    rows = pool.rows("SELECT b.name FROM leases l JOIN bots b ON b.id = l.bot_id")
    assert [row.name for row in rows] == ["free"]


def test_a_queue_that_is_too_large_for_every_bot_rests_whatever_the_quota_of_others_says(pool: Pool) -> None:
    for number in range(6):
        pool.bot(f"bot-{number}", capacity=2)
    Tenancy(pool).quota("a", maximum=4)
    for instance, units in (("a", 1), ("a", 4), ("b", 4)):
        pool.submit(instance=instance, units=units)
    pool.assigner().run_once()
    rests = pool.rows("SELECT i.name FROM queues k JOIN instances i ON i.id = k.instance WHERE k.looks > 0")
    assert "b" in {row.name for row in rests}


def test_a_queue_rests_although_what_is_kept_for_another_instance_would_make_room(pool: Pool) -> None:
    pool.bot("bot-1", capacity=4)
    pool.bot("bot-2", capacity=2)
    for instance in ("a", "b"):
        pool.submit(instance=instance, units=4)
    pool.change(
        "UPDATE bots SET kept_units = 1, kept_for = (SELECT id FROM instances WHERE name = 'a'),"
        " kept_until = now() + interval '1 hour' WHERE name = 'bot-1'"
    )
    pool.assigner().run_once()
    rests = pool.rows("SELECT i.name FROM queues k JOIN instances i ON i.id = k.instance WHERE k.looks > 0")
    assert "b" in {row.name for row in rests}


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


def counts(connection: Connection, jobs: Sequence[ReadyJob], fleet: Fleet, *, seed: int = 1) -> list[int]:
    """The number of candidates of each job in a sample of five, in the order of the jobs."""
    seen = sampled(connection, jobs, fleet, seed=seed)
    of = {job.id: len(bots) for group, bots in zip(seen.groups, seen.candidates, strict=True) for job in group.jobs}
    return [of[job.id] for job in seen.jobs]


def sampled(connection: Connection, jobs: Sequence[ReadyJob], fleet: Fleet, *, seed: int, size: int = 5) -> Snapshot:
    return sampling.sample_snapshot(connection, jobs, sample_size=size, fleet=fleet, chance=random.Random(seed))


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
        for seed in range(4):
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
        for seed in range(4):
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


def six_kinds_of_jobs(pool: Pool) -> list[ReadyJob]:
    for letter in LETTERS:
        pool.submit(properties={"kind": letter})
    return waiting(pool)


def test_a_bot_whose_properties_have_changed_since_is_not_given_what_it_no_longer_offers(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", capacity=10, properties={"kind": list(LETTERS)})
    with pool.database.connect() as connection:
        before = sampled(connection, jobs, fleet, seed=1)
        assert counts(connection, jobs, fleet) == [1] * 6
        pool.bot("b", capacity=10, properties={"kind": ["a"]})
        placements = Capacity().choose(before, Policy(), how={})
        granted = grant(connection, placements, assigner="test", strategy="test", ack=1)
        assert [lease.job_id for lease in granted] == [jobs[0].id]
        connection.rollback()
        assert counts(connection, jobs, fleet) == [1, 0, 0, 0, 0, 0]


def test_two_statements_do_for_any_number_of_groups_once_the_fleet_is_known(pool: Pool) -> None:
    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=50, kinds=LETTERS)
        filling.fill_jobs(connection, 300, instances=50, kinds=LETTERS)
        filling.fill_bots(connection, dict.fromkeys(LETTERS, 20))

    pool.database.run(fill)
    jobs, fleet = waiting(pool), Fleet()
    numbers = []
    with pool.database.connect() as connection:
        for seed in range(3):
            with statements() as sent:
                assert min(counts(connection, jobs, fleet, seed=seed)) >= 5
            numbers.append(len(sent))
    assert numbers == [4, 2, 2]


def test_bots_that_come_and_go_are_known_with_the_next_sample(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("early", properties={"kind": ["a", "b"]})
    with pool.database.connect() as connection:
        assert counts(connection, jobs, fleet) == [1, 1, 0, 0, 0, 0]
        late = pool.bot("late", properties={"kind": ["b", "a"]})
        assert counts(connection, jobs, fleet) == [2, 2, 0, 0, 0, 0]
        pool.bot("other", properties={"kind": ["c", "a"]})
        assert counts(connection, jobs, fleet) == [3, 2, 1, 0, 0, 0]
        drain(pool, bot="early")
        assert counts(connection, jobs, fleet) == [2, 1, 1, 0, 0, 0]
        assert len(fleet) == 2
        drain(pool, bot="early", draining=False)
        late.sync(status="gone")
        assert counts(connection, jobs, fleet) == [2, 1, 1, 0, 0, 0]


def test_a_bot_whose_session_opens_while_a_sample_is_drawn_is_known_with_the_next_one(pool: Pool, race: Race) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    with pool.database.connect() as connection:
        with race.first() as first:
            first.bot("b", properties={"kind": "a"})
            # Whoever begins later has a higher number, and ends first.
            pool.bot("c", properties={"kind": "b"})
            assert counts(connection, jobs, fleet) == [0, 1, 0, 0, 0, 0]
            first.commit()
        assert counts(connection, jobs, fleet) == [1, 1, 0, 0, 0, 0]


def test_numbers_of_a_database_that_was_restored_neither_hide_bots_nor_are_read_again_and_again(pool: Pool) -> None:
    pool.bot("a")
    pool.change("UPDATE bot_changes SET transaction = transaction + 1000000")
    with pool.database.connect() as connection:
        first = members.read_changes(connection, None)
        assert (len(first.bots), first.is_complete) == (1, True)
        assert members.read_changes(connection, first.snapshot).bots == {}
        again = members.read_changes(connection, "9000000:9000000:")
        assert (again.bots, again.is_complete) == (first.bots, True)


def test_nothing_that_was_remembered_holds_for_another_database(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", properties={"kind": ["a", "b"]})
    with pool.database.connect() as connection:
        assert counts(connection, jobs, fleet) == [1, 1, 0, 0, 0, 0]
        pool.change('UPDATE kinds SET properties = \'{"kind": ["c"]}\'')
        pool.change("DELETE FROM kind_platforms")
        pool.change(
            "INSERT INTO kind_platforms (platform, kind)"
            " SELECT p.id, k.id FROM platforms p JOIN kinds k ON k.properties @> p.properties"
        )
        read = members.read_changes
        later = "9000000:9000000:"
        monkeypatch.setattr(members, "read_changes", lambda connection, seen: read(connection, seen and later))
        assert counts(connection, jobs, fleet) == [0, 0, 1, 0, 0, 0]


def test_what_an_assigner_remembers_of_requirement_sets_is_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_placement, "MAX_PLATFORMS", 2)
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    pool.bot("b", properties={"kind": ["a", "d"]})
    numbers = []
    with pool.database.connect() as connection:
        for pair in (jobs[:2], jobs[:2], jobs[2:4], jobs[:2]):
            with statements() as sent:
                assert sorted(counts(connection, pair, fleet)) == [0, 1]
            numbers.append(len(sent))
    assert numbers[1] < numbers[3], "what was forgotten is read again"


def test_a_fleet_of_which_a_part_could_not_be_read_is_read_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    with pool.database.connect() as connection:
        sampled(connection, jobs, fleet, seed=1)
        pool.bot("b", properties={"kind": "a"})
        with monkeypatch.context() as broken:
            broken.setattr(kinds, "offers", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sampled(connection, jobs, fleet, seed=1)
        assert counts(connection, jobs, fleet) == [1, 0, 0, 0, 0, 0]


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


def test_a_bot_that_returns_with_other_properties_again_and_again_is_one_bot(pool: Pool) -> None:
    jobs, fleet = six_kinds_of_jobs(pool), Fleet()
    with pool.database.connect() as connection:
        for boot in range(5):
            pool.bot("b", properties={"kind": "a", "boot": str(boot)}, instance=None if boot % 2 else "team")
            assert counts(connection, jobs, fleet) == [boot % 2, 0, 0, 0, 0, 0]
            assert len(fleet) == 1


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
        for seed in range(8):
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
