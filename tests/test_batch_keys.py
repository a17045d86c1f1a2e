"""Jobs of one batch key go to one bot together."""

from typing import Any

from assigner.fitting import Fitted
from assigner.registry import load
from assigner.sampling import Group
from assigner.strategies import Policy
from schema.candidates import FreeBot
from schema.ready import ReadyJob
from schema.requests import JobRequest
from tests.pool import Pool

COMPILE = {"batch_key": "compile"}


def seen(jobs: int, rooms: dict[int, int], *, units: int = 1, **fields: Any) -> Fitted:
    waiting = [ReadyJob(n, str(n), 0, 1, 1, 0, units, None, 0) for n in range(1, jobs + 1)]
    bots = [FreeBot(bot, f"bot-{bot}", 0, room, 10) for bot, room in rooms.items()]
    fields = {"needs": {job.id: {} for job in waiting}, "batched": frozenset(job.id for job in waiting)} | fields
    return Fitted(waiting, [Group(0, 1, 1, units, tuple(waiting))], [bots], frozenset(), **fields)


def placed(snapshot: Fitted, policy: Policy | None = None) -> list[int]:
    """The bots, in the order of the jobs."""
    found = snapshot.chosen_by(load("capacity"), policy or Policy(), how={})
    return [each.bot_id for each in sorted(found, key=lambda each: each.job_id)]


def test_sa_30_jobs_of_one_key_go_to_a_bot_that_has_room_for_all_of_them(pool: Pool) -> None:
    first, second = pool.bot("one", capacity=4), pool.bot("two", capacity=4)
    pool.submit(3, terms=COMPILE)
    pool.assigner().run_once()
    assert sorted([len(first.take()), len(second.take())]) == [0, 3]
    decided = pool.rows("SELECT details->>'batch' AS batch FROM job_events WHERE move = 'grant'")
    assert [row.batch for row in decided] == ["3"] * 3


def test_sa_30_without_a_key_they_are_spread_over_the_bots(pool: Pool) -> None:
    first, second = pool.bot("one", capacity=4), pool.bot("two", capacity=4)
    pool.submit(4)
    pool.assigner().run_once()
    assert (len(first.take()), len(second.take())) == (2, 2)


def test_sa_30_what_no_bot_has_room_for_goes_in_as_large_batches_as_there_is_room() -> None:
    assert placed(seen(8, {1: 3, 2: 5})) == [2, 2, 2, 2, 2, 1, 1, 1]
    assert placed(seen(4, {1: 3, 2: 5}, units=2)) == [2, 2, 1]


def test_a_40_sa_30_fewer_than_a_batch_go_one_by_one() -> None:
    assert placed(seen(1, {1: 3, 2: 5})) == [2]
    assert sorted(placed(seen(2, {1: 1, 2: 1}))) == [1, 2]
    assert sorted(placed(seen(4, {1: 5, 2: 5}), Policy(min_batch_size=5))) == [1, 1, 2, 2]
    assert set(placed(seen(4, {1: 5, 2: 5}))) in ({1}, {2})


def test_sa_30_a_batch_fits_by_its_resources_too() -> None:
    need = {"needs": {key: {"memory_mib": 100} for key in range(1, 5)}, "amounts": {"bot:1:memory_mib": 250.0}}
    assert placed(seen(4, {1: 9, 2: 3}, **need)) == [2, 2, 2, 1]


def test_sa_30_a_batch_key_is_a_name_of_its_instance() -> None:
    assert JobRequest(command=["true"], batch_key="compile").normal()["terms"] == COMPILE
