"""Jobs that take of a bot's CPU, memory, disk and GPU beside its units."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from assigner.cycle import assigner as cycle
from assigner.explain.answer import explain
from assigner.placement import resources
from assigner.placement.registry import load
from assigner.placement.resources import ResourceSnapshot
from assigner.placement.room import Declared
from assigner.placement.strategy import Group, Policy
from bots.protocol import OpenSession
from bots.sync import sessions
from schema.accounting import counters
from schema.diagnostics import invariants
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement
from schema.picking import constrained
from schema.picking.pick import ReadyJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.requests import JobRequest
from tests.support.plans import statements
from tests.support.pool import Bot, Pool, completed
from tests.support.race import Race

SMALL = {"cpu_milli": 2000, "memory_mib": 1024}


def job(pool: Pool, count: int = 1, *, need: dict[str, int], **fields: Any) -> list[str]:
    return pool.submit(count, terms={"resources": need}, **fields)


def used(pool: Pool, bot: Bot, kind: str) -> float | None:
    (row,) = pool.rows("SELECT id FROM bots WHERE name = :name", name=bot.session.bot)
    name = counters.resource_counter(row.id, kind)
    found = pool.database.run(lambda c: counters.read(c, [name]))
    return found[name].used if found else None


def closed(pool: Pool) -> list[str]:
    """Why the queues wait for resources."""

    def read(connection: Any) -> list[str]:
        found = constrained.queues(connection, Scope(), batch=10, after=constrained.FIRST_QUEUE)
        assert found.now is not None
        return [why for each in found.queues if (why := resources.lacking(connection, each, look=100)) is not None]

    return pool.database.run(read)


def test_a_bot_takes_jobs_up_to_what_it_has_and_gets_it_back(pool: Pool) -> None:
    job(pool, 3, need={"cpu_milli": 1000, "memory_mib": 400})
    bot = pool.bot(capacity=10, resources=SMALL)
    given = pool.given(bot)
    assert len(given) == 2
    assert (used(pool, bot, "cpu_milli"), used(pool, bot, "memory_mib")) == (2000, 800)
    bot.sync(completed(given[0]), completed(given[1], "failed"))
    assert (used(pool, bot, "cpu_milli"), used(pool, bot, "memory_mib")) == (0, 0)
    pool.assigner().run_once()
    assert len(bot.take()) == 1


def test_jobs_go_to_the_bots_on_which_they_fit(pool: Pool) -> None:
    small, large = pool.bot("small", capacity=50, resources=SMALL), pool.bot("large", capacity=8, resources={})
    tight = pool.bot("tight", capacity=8, resources={"memory_mib": 100})
    job(pool, 5, need={"memory_mib": 1000})
    job(pool, 1, need={"memory_mib": 100}, priority=5)
    pool.assigner().run_once()
    assert (len(small.take()), len(large.take()) + len(tight.take())) == (1, 5)
    assert used(pool, large, "memory_mib") is None, "of what it has not declared nothing is counted"


def test_the_first_resource_that_is_missing_is_named(pool: Pool) -> None:
    pool.bot("one", capacity=10, resources={"cpu_milli": 500, "memory_mib": 4096})
    pool.bot("two", capacity=10, resources={"cpu_milli": 4000, "memory_mib": 512})
    job(pool, need={"memory_mib": 8192, "disk_mib": 5})
    job(pool, need={"cpu_milli": 8000, "memory_mib": 8192})
    job(pool, need={"cpu_milli": 4000, "memory_mib": 4096})
    job(pool, need={"cpu_milli": 4000, "memory_mib": 512})
    assert sorted(closed(pool)) == [
        "it takes 8000 cpu_milli, and no bot with room has more than 4000 left",
        "it takes 8192 memory_mib, and no bot with room has more than 4096 left",
        "no bot with room has 4000 cpu_milli and 4096 memory_mib left at once",
    ]


def test_what_is_missing_is_asked_of_the_bots_that_have_room(pool: Pool) -> None:
    pool.bot("roomy", capacity=4, resources={"memory_mib": 10})
    pool.bot("rich", capacity=2, resources={"memory_mib": 1000})
    (public,) = pool.submit(terms={"resources": {"memory_mib": 100}, "units": 3}, units=3)
    assert closed(pool) == ["it takes 100 memory_mib, and no bot with room has more than 10 left"]
    told = pool.database.run(lambda c: explain(c, public, instances=None))
    assert told is not None
    assert told.sentence == f"it does not run because {closed(pool)[0]}"


def test_a_job_that_fits_nowhere_keeps_nobody_behind_it_waiting(pool: Pool) -> None:
    job(pool, 5, need={"gpu_milli": 1000}, priority=-10)
    (behind,) = job(pool, need={"cpu_milli": 1000})
    bot = pool.bot(capacity=1, resources={**SMALL, "gpu_milli": 0})
    pool.assigner().run_once()
    assert [lease["job"] for lease in bot.take()] == [behind]


def test_jobs_that_take_of_nothing_cost_nothing(pool: Pool) -> None:
    pool.submit(5)
    with statements() as said:
        bot = pool.bot(capacity=10)
        pool.assigner().run_once()
        assert len(bot.take()) == 5
    (opening,) = {each for each in said if "counters" in each}
    assert "FOR NO KEY UPDATE" in opening, "one look, while a session is opened"
    assert not pool.rows("SELECT FROM counters")


def test_a_new_session_has_what_it_declares_and_nothing_else(pool: Pool) -> None:
    job(pool, 2, need={"cpu_milli": 2000})
    bot = pool.bot(capacity=10, resources=SMALL)
    pool.assigner().run_once()
    assert len(bot.take()) == 1
    again = pool.bot("bot-1", capacity=10, resources={"cpu_milli": 5000}, dead_session=dead(bot))
    assert (used(pool, again, "cpu_milli"), used(pool, again, "memory_mib")) == (0, None)
    pool.assigner().run_once()
    assert len(again.take()) == 2
    last = pool.bot("bot-1", capacity=10, dead_session=dead(again))
    assert used(pool, last, "cpu_milli") is None
    pool.assigner().run_once()
    assert len(last.take()) == 2


def test_what_a_bot_had_is_forgotten_with_it(pool: Pool) -> None:
    bot = pool.bot(resources=SMALL)
    bot.sync(status="gone")
    pool.change("UPDATE bots SET opened_at = now() - interval '40 days'")
    pool.upkeep().run_once()
    assert not pool.rows("SELECT FROM bots")
    assert not pool.rows("SELECT FROM counters")


def test_two_assigners_do_not_both_take_what_is_left(pool: Pool) -> None:
    pool.bot(capacity=100, resources={"memory_mib": 5000})
    job(pool, 20, need={"memory_mib": 999})
    job(pool, 20, need={"memory_mib": 1001})
    assigners = [pool.assigner() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for cycle in [threads.submit(assigner.run_once) for assigner in assigners for _ in range(3)]:
            cycle.result()
    taken = pool.row("SELECT used, most FROM counters WHERE name LIKE 'bot:%'")
    assert taken.most - taken.used < 1001
    assert pool.row("SELECT count(*) AS n FROM live").n in (4, 5)


def test_what_a_job_takes_is_checked_before_it_is_sent() -> None:
    asked = JobRequest(command=["true"], resources={"cpu_milli": 500, "memory_mib": 1}).normal()
    assert asked["terms"] == {"resources": {"cpu_milli": 500, "memory_mib": 1}}
    large = JobRequest(command=["true"], resources={"cpu_milli": 500}, units=3).normal()
    assert large["terms"] == {"resources": {"cpu_milli": 500}, "units": 3}
    for wrong in ({"cpu_milli": 0}, {"cpu": 1}, {"cpu_milli": 1.5}, {"cpu_milli": -1}):
        with pytest.raises(ValidationError):
            JobRequest.model_validate({"command": ["true"], "resources": wrong})
        if wrong != {"cpu_milli": 0}:
            with pytest.raises(ValidationError):
                OpenSession.model_validate({"bot": "b", "resources": wrong})


def dead(bot: Bot) -> str:

    return sessions.digest(bot.session.secret).hex()


@pytest.mark.breaks_invariants
def test_what_is_in_use_of_a_resource_is_what_live_leases_take(pool: Pool) -> None:
    (name,) = job(pool, need={"cpu_milli": 500})
    bot = pool.bot(resources=SMALL)
    pool.given(bot)
    assert not broken(pool)
    pool.change("UPDATE counters SET most = 499 WHERE name LIKE '%cpu_milli'")
    (row,) = pool.rows("SELECT name FROM counters WHERE name LIKE '%cpu_milli'")
    assert broken(pool) == {"S20": [row.name]}
    pool.change("UPDATE counters SET most = 2000, used = 400 WHERE name LIKE '%cpu_milli'")
    assert broken(pool) == {"S19": [row.name]}
    pool.change("UPDATE counters SET used = 400 WHERE name LIKE '%cpu_milli'")
    pool.change("UPDATE leases SET taken = taken || jsonb_build_object(CAST(:name AS text), 400)", name=row.name)
    assert broken(pool) == {"S20": [str(pool.job(name).id)]}


def broken(pool: Pool) -> dict[str, list[str]]:
    return {finding.id: finding.sample for finding in invariants.verify(pool.database) if finding.rows}


# Jobs of one batch key go to one bot together.


COMPILE = {"batch_key": "compile"}


def snapshot_of(jobs: int, rooms: dict[int, int], *, units: int = 1, **fields: Any) -> ResourceSnapshot:
    waiting = [ReadyJob(n, str(n), 1, 0, 1, 1, 0, units, None, False) for n in range(1, jobs + 1)]
    bots = [FreeBot(bot, f"bot-{bot}", 0, room, 10) for bot, room in rooms.items()]
    fields = {"needs": {job.id: {} for job in waiting}, "batched": frozenset(job.id for job in waiting)} | fields
    return ResourceSnapshot(waiting, [Group(0, 1, 1, units, tuple(waiting))], [bots], frozenset(), **fields)


def placed(snapshot: ResourceSnapshot, policy: Policy | None = None) -> list[int]:
    """The bots, in the order of the jobs."""
    found = snapshot.chosen_by(load("capacity"), policy or Policy(), how={})
    return [each.bot_id for each in sorted(found, key=lambda each: each.job_id)]


def test_jobs_of_one_key_go_to_a_bot_that_has_room_for_all_of_them(pool: Pool) -> None:
    first, second = pool.bot("one", capacity=4), pool.bot("two", capacity=4)
    pool.submit(3, terms=COMPILE)
    pool.assigner().run_once()
    assert sorted([len(first.take()), len(second.take())]) == [0, 3]
    decided = pool.rows("SELECT details->>'batch' AS batch FROM job_events WHERE move = 'grant'")
    assert [row.batch for row in decided] == ["3"] * 3


def test_without_a_key_they_are_spread_over_the_bots(pool: Pool) -> None:
    first, second = pool.bot("one", capacity=4), pool.bot("two", capacity=4)
    pool.submit(4)
    pool.assigner().run_once()
    assert (len(first.take()), len(second.take())) == (2, 2)


def test_what_no_bot_has_room_for_goes_in_as_large_batches_as_there_is_room() -> None:
    assert placed(snapshot_of(8, {1: 3, 2: 5})) == [2, 2, 2, 2, 2, 1, 1, 1]
    assert placed(snapshot_of(4, {1: 3, 2: 5}, units=2)) == [2, 2, 1]


def test_fewer_than_a_batch_go_one_by_one() -> None:
    assert placed(snapshot_of(1, {1: 3, 2: 5})) == [2]
    assert sorted(placed(snapshot_of(2, {1: 1, 2: 1}))) == [1, 2]
    assert sorted(placed(snapshot_of(4, {1: 5, 2: 5}), Policy(min_batch_size=5))) == [1, 1, 2, 2]
    assert set(placed(snapshot_of(4, {1: 5, 2: 5}))) in ({1}, {2})


def test_a_batch_fits_by_its_resources_too() -> None:
    need = {
        "needs": {key: {"memory_mib": 100} for key in range(1, 5)},
        "declared": {1: Declared((None, 250.0, None, None), (None, 250.0, None, None))},
    }
    assert placed(snapshot_of(4, {1: 9, 2: 3}, **need)) == [2, 2, 2, 1]


def test_a_batch_key_is_a_name_of_its_instance() -> None:
    assert JobRequest(command=["true"], batch_key="compile").normal()["terms"] == COMPILE


def test_a_bot_that_declares_other_resources_meanwhile_is_passed_over(
    pool: Pool, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lease takes there is read from what the bot had declared before."""
    pool.bot("bot-1")
    (name,) = job(pool, need={"cpu_milli": 500})
    read, write = cycle.lock_bots, cycle.grant
    with race.first() as first:

        def lock_bots(connection: Connection, placements: Sequence[Placement]) -> list[Placement]:
            first.bot("bot-1", resources={"cpu_milli": 100})
            return read(connection, placements)

        def grant(connection: Connection, placements: Sequence[Placement], **fields: Any) -> Any:
            first.commit()
            return write(connection, placements, **fields)

        monkeypatch.setattr(cycle, "lock_bots", lock_bots)
        monkeypatch.setattr(cycle, "grant", grant)
        pool.assigner().run_once()
    assert pool.job(name).state == "queued"
