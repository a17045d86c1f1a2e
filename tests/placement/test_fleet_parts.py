"""Who places a large batch draws from a part of the bots as long as that suffices; few bots of a tenant are found."""

import random

import pytest

from assigner.placement import sampling
from assigner.placement.fleet import SMALL, Fleet, Part
from assigner.placement.sampling import AMPLE, CROWD, FEW
from assigner.placement.strategy import Snapshot
from schema.fleet import candidates
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.picking import ready
from schema.picking.pick import Order
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from tests.support import filling
from tests.support.explain import closed, explained, gates_of
from tests.support.pool import Pool

SAMPLE, PARTS = 5, 8
BOTS = SMALL * PARTS


def bots_of_jobs(seen: Snapshot) -> list[list[FreeBot]]:
    """The candidates of each job, in the order of the jobs."""
    of = {job.id: [*bots] for group, bots in zip(seen.groups, seen.candidates, strict=True) for job in group.jobs}
    return [of[job.id] for job in seen.jobs]


@pytest.fixture
def many(pool: Pool) -> Pool:
    """Many bots and many jobs."""
    pool.submit(4 * CROWD, properties={"kind": "one"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": BOTS}))
    return pool


def snapshot_from(
    pool: Pool, jobs: int, number: int, fleet: Fleet | None = None, *, sample_size: int = SAMPLE
) -> Snapshot:
    """The candidates for `jobs` jobs, drawn from part `number` of the fleet, by one who remembers `fleet`."""
    known = Fleet() if fleet is None else fleet

    def work(connection: Connection) -> Snapshot:
        picked = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=jobs)
        assert len(picked) == jobs
        part = Part(number, PARTS)
        return sampling.sample_snapshot(
            connection, picked, sample_size=sample_size, fleet=known, chance=pool.chance, part=part
        )

    return pool.database.run(work)


def sampled_from(pool: Pool, jobs: int, number: int, fleet: Fleet | None = None) -> set[int]:
    """The bots that a sample shows to `jobs` alike jobs, drawn from part `number` of the fleet."""
    (found,) = snapshot_from(pool, jobs, number, fleet).candidates
    return {bot.id for bot in found}


def widen(pool: Pool, capacity: int) -> None:
    pool.change("UPDATE bots SET capacity = :capacity", capacity=capacity)


def test_those_who_place_many_jobs_at_once_look_at_different_bots(many: Pool) -> None:
    widen(many, 1000)
    found = [sampled_from(many, CROWD, number) for number in range(PARTS)]
    assert min(map(len, found)) >= SAMPLE
    assert sum(map(len, found)) == len(set.union(*found))
    seen = {bot_id for _ in range(20) for bot_id in sampled_from(many, CROWD - 1, 0)}
    assert {bot_id % PARTS for bot_id in seen} == set(range(PARTS)), "who has little to place looks at all of them"
    many.submit(2 * BOTS, properties={"kind": "one"})
    of_part = sampled_from(many, 2 * BOTS, 3)
    assert len(of_part) == BOTS // PARTS, "more jobs than bots: all of the part"
    assert {bot_id % PARTS for bot_id in of_part} == {3}


def test_jobs_of_many_tenants_that_the_same_bots_could_take_are_drawn_from_a_part(pool: Pool) -> None:
    tenants = 3 * CROWD
    for number in range(tenants):
        pool.submit(instance=f"team-{number}", properties={"kind": "one"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": BOTS}, capacity=1000))
    found = bots_of_jobs(snapshot_from(pool, tenants, 3))
    assert len(found) == tenants
    assert {bot.id % PARTS for bots in found for bot in bots} == {3}
    assert min(map(len, found)) >= SAMPLE


def test_groups_that_different_bots_could_take_are_drawn_from_all_bots(pool: Pool) -> None:
    kinds_of_bots = [f"kind-{number}" for number in range(FEW + 1)]
    for kind in kinds_of_bots:
        pool.submit(CROWD, properties={"kind": kind})
    pool.database.run(
        lambda connection: filling.fill_bots(connection, dict.fromkeys(kinds_of_bots, BOTS), capacity=1000)
    )
    found = bots_of_jobs(snapshot_from(pool, CROWD * len(kinds_of_bots), 3))
    assert {bot.id % PARTS for bots in found for bot in bots} == set(range(PARTS))


def test_a_batch_is_spread_over_its_part_although_few_of_its_bots_have_room_for_all(many: Pool) -> None:
    widen(many, 1000)
    assert len(sampled_from(many, 4 * CROWD, 1)) == SMALL
    many.change("UPDATE bots SET capacity = 0 WHERE id % 3 = 0")
    found = sampled_from(many, 4 * CROWD, 1)
    assert {bot_id % PARTS for bot_id in found} == {1}, "all that are free, and no others"
    assert SAMPLE < len(found) < SMALL


def test_bots_with_room_for_several_jobs_of_a_large_batch_are_shared_by_them(
    many: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SPREAD", 0)
    jobs, fleet = 4 * CROWD, Fleet()
    needed = AMPLE * jobs
    widen(many, 10)
    sampled_from(many, jobs, 0, fleet)
    assert len(sampled_from(many, jobs, 1, fleet)) == needed // 10
    # The bots have less room than those had that were read before.
    widen(many, 5)
    assert len(sampled_from(many, jobs, 2, fleet)) == needed // 5
    widen(many, 1)
    found = sampled_from(many, jobs, 3, fleet)
    assert len(found) == SAMPLE + jobs - 1, "a part has not plenty of room, and all bots are looked at"
    assert len({bot_id % PARTS for bot_id in found}) > 1
    assert len(sampled_from(many, 2 * CROWD, 0)) == SAMPLE + 2 * CROWD - 1


def test_of_bots_with_room_for_one_large_job_each_there_is_one_for_every_job(pool: Pool) -> None:
    pool.submit(CROWD, properties={"kind": "one"}, units=4)
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": 5 * CROWD * PARTS}, capacity=7))
    fleet = Fleet()
    sampled_from(pool, CROWD, 0, fleet)
    found = sampled_from(pool, CROWD, 1, fleet)
    assert {bot_id % PARTS for bot_id in found} == {1}
    assert len(found) >= CROWD


def test_free_bots_without_room_for_others_are_no_room_however_large_the_sample_is(pool: Pool) -> None:
    pool.submit(CROWD, properties={"kind": "one"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": 150 * PARTS}))
    kept = "UPDATE bots SET capacity = 1, kept_units = 1, kept_for = 0, kept_until = now() + interval '1 hour'"
    pool.change("UPDATE bots SET capacity = 1")
    pool.change(f"{kept} WHERE id % 10 < 7")
    pool.change("UPDATE bots SET in_use = 1 WHERE id % 10 = 9")
    fleet = Fleet()
    for _ in range(30):
        (found,) = snapshot_from(pool, CROWD, 3, fleet, sample_size=100).candidates
        assert len(found) >= CROWD
        assert not [bot for bot in found if bot.id % 10 < 7]
    pool.change("UPDATE bots SET in_use = 0")


def test_equal_chances_draw_equal_bots_wherever_the_server_keeps_their_rows(many: Pool) -> None:
    for pool in ("'x'", "NULL"):  # their rows are behind the others then
        many.change(f"UPDATE bots SET pool = {pool} WHERE id % 3 = 0")
    fleet = Fleet()
    many.database.run(fleet.refresh)
    cell = fleet.cell_of(1)
    assert cell is not None
    assert cell.ids == sorted(cell.ids)


def test_after_a_crash_of_the_server_all_bots_are_read_again(pool: Pool) -> None:
    """Numbers of transactions that the crash has lost are used again, and an older snapshot takes them as seen."""
    fleet = Fleet()
    pool.database.run(fleet.refresh)
    pool.bot()
    pool.change("UPDATE bot_changes SET transaction = 3")
    pool.database.run(fleet.refresh)
    assert len(fleet) == 0, "it has been told of no change"
    pool.database.close()  # a crash ends all sessions
    pool.database.run(fleet.refresh)
    assert len(fleet) == 1
    pool.change("UPDATE bots SET status = 'unhealthy'")
    pool.change("UPDATE bot_changes SET transaction = 3")
    pool.database.run(fleet.refresh)
    assert len(fleet) == 1, "in the same session only changes are read"


# Few bots that serve a tenant are found among thousands that serve others only.


BOTS_FEW_BOTS, TRIES = 3_000, 5
KIND = {"kind": ["free"]}


SERVES = {
    "instance": "instance = (SELECT id FROM instances WHERE name = 'team-a')",
    "pool": "instance = NULL, pool = 'one'",
    "all": "instance = NULL",
}


@pytest.fixture(params=SERVES)
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
    pool.change(f"UPDATE bots SET {SERVES[request.param]} WHERE name = 'free-1500'")
    return job


def test_the_few_bots_of_a_tenant_are_found_and_told_of_wherever_a_look_begins(pool: Pool, crowded: str) -> None:
    with pool.database.connect() as connection:
        for seed in range(TRIES):
            chance = random.Random(seed)
            (job,) = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10)
            want = CandidateRequest(job.cohort, job.instance, job.platform, units=1, count=10)
            (found,) = sampling.sample(connection, Fleet(), [want], sample_size=10, chance=chance)
            assert [bot.name for bot in found] == ["free-1500"]
            assert [bot.name for bot in candidates.any_free(connection, want)] == ["free-1500"]
            connection.rollback()
    for instances, number in ((None, 1001), (["team-a"], 1)):
        told = explained(pool, crowded, instances=instances)
        assert told.sentence.startswith("nothing stands in its way")
        seen = gates_of(told)["cohort"].evidence
        assert (seen["present"], seen["healthy"]) == (number, number)
    pool.assigner().run_once()
    (late,) = pool.submit(instance="team-a", properties=KIND)
    assert closed(explained(pool, late, instances=["team-a"])) == ["room"]
    with pool.database.connect() as connection:
        assert not ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10)
