"""Who places a large batch draws from a part of the bots, and only as long as that suffices; what is remembered."""

import pytest

from assigner.placement import sampling
from assigner.placement.fleet import Fleet, Part
from assigner.placement.sampling import AMPLE, CROWD, FEW, SMALL
from assigner.placement.strategy import Snapshot
from schema.fleet.candidates import FreeBot
from schema.picking import ready
from schema.picking.pick import Order
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from tests.support import filling
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
    widen(many, 100)
    found = [sampled_from(many, CROWD, number) for number in range(PARTS)]
    assert min(map(len, found)) >= SAMPLE
    assert sum(map(len, found)) == len(set.union(*found))


def test_a_batch_of_more_jobs_than_there_are_bots_is_drawn_from_a_part(many: Pool) -> None:
    many.submit(2 * BOTS, properties={"kind": "one"})
    widen(many, 1000)
    found = sampled_from(many, 2 * BOTS, 3)
    assert {bot_id % PARTS for bot_id in found} == {3}
    assert len(found) == BOTS // PARTS


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


def test_where_a_part_has_not_plenty_of_room_all_bots_are_looked_at(many: Pool) -> None:
    widen(many, 1)
    assert len(sampled_from(many, 2 * CROWD, 0)) == SAMPLE + 2 * CROWD - 1


def test_bots_with_room_for_several_jobs_of_a_large_batch_are_shared_by_them(many: Pool) -> None:
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
    assert len(found) == SAMPLE + jobs - 1
    assert len({bot_id % PARTS for bot_id in found}) > 1


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


def test_a_part_of_few_bots_is_not_crowded(pool: Pool) -> None:
    pool.submit(4 * CROWD, properties={"kind": "one"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": BOTS - PARTS}, capacity=1000))
    found = sampled_from(pool, 4 * CROWD, 3)
    assert {bot_id % PARTS for bot_id in found} == set(range(PARTS))


def test_who_has_little_to_place_looks_at_all_bots(many: Pool) -> None:
    widen(many, 100)
    found = {bot_id for _ in range(20) for bot_id in sampled_from(many, CROWD - 1, 0)}
    assert {bot_id % PARTS for bot_id in found} == set(range(PARTS))


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
