"""Jobs that take of a bot's CPU, memory, disk and GPUs beside its units, and are told which GPUs they have."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from assigner.cycle import assigner as cycle
from assigner.placement import resources
from assigner.placement.registry import load
from assigner.placement.resources import ResourceSnapshot, read_waiting_demand
from assigner.placement.room import Declared, demand_of
from assigner.placement.strategy import Policy, group_jobs
from bots.protocol import OpenSession
from schema.accounting import counters
from schema.moves.grant import Placement
from schema.picking import constrained, queues
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.requests import JobRequest
from tests.support.explain import explained
from tests.support.plans import statements
from tests.support.pool import Bot, Pool, completed
from tests.support.pool import bot as free_bot
from tests.support.pool import job as ready_job
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
    assert explained(pool, public).sentence == f"it does not run because {closed(pool)[0]}"


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
    again = pool.restarted(bot, capacity=10, resources={"cpu_milli": 5000})
    assert (used(pool, again, "cpu_milli"), used(pool, again, "memory_mib")) == (0, None)
    pool.assigner().run_once()
    assert len(again.take()) == 2
    last = pool.restarted(again, capacity=10)
    assert used(pool, last, "cpu_milli") is None
    pool.assigner().run_once()
    assert len(last.take()) == 2


@pytest.mark.parametrize(
    ("fields", "terms"),
    [
        ({"resources": {"cpu_milli": 500, "memory_mib": 1}}, {"resources": {"cpu_milli": 500, "memory_mib": 1}}),
        ({"resources": {"cpu_milli": 500}, "units": 3}, {"resources": {"cpu_milli": 500}, "units": 3}),
        ({"batch_key": "compile"}, {"batch_key": "compile"}),
    ],
)
def test_what_a_job_takes_and_its_batch_are_terms(fields: dict[str, Any], terms: dict[str, Any]) -> None:
    assert JobRequest(command=["true"], **fields).normal()["terms"] == terms


# Jobs of one batch key go to one bot together.


COMPILE = {"batch_key": "compile"}


def batched(
    rooms: dict[int, int], jobs: int, policy: Policy | None = None, *, units: int = 1, **seen: Any
) -> list[int]:
    """The bots that so many jobs of one key get, in their order, of bots with these free units of ten."""
    waiting = [ready_job(number, units=units) for number in range(1, jobs + 1)]
    bots = [free_bot(number, room, capacity=10) for number, room in rooms.items()]
    given = {"needs": {each.id: {} for each in waiting}, "batched": frozenset(each.id for each in waiting), **seen}
    snapshot = ResourceSnapshot(waiting, group_jobs(waiting), [bots], frozenset(), **given)
    found = snapshot.chosen_by(load("capacity"), policy or Policy(), how={})
    return [each.bot_id for each in sorted(found, key=lambda each: each.job_id)]


@pytest.mark.parametrize(("terms", "given"), [(COMPILE, [0, 4]), ({}, [2, 2])], ids=["of one key", "of none"])
def test_jobs_of_one_key_go_to_a_bot_that_has_room_for_all_of_them(
    pool: Pool, terms: dict[str, Any], given: list[int]
) -> None:
    bots = [pool.bot(name, capacity=4) for name in ("one", "two")]
    pool.submit(4, terms=terms)
    pool.assigner().run_once()
    assert sorted(len(bot.take()) for bot in bots) == given
    decided = pool.rows("SELECT details->>'batch' AS batch FROM job_events WHERE move = 'grant'")
    assert [row.batch for row in decided] == ["4" if terms else None] * 4


def test_what_no_bot_has_room_for_goes_in_as_large_batches_as_there_is_room() -> None:
    assert batched({1: 3, 2: 5}, 8) == [2, 2, 2, 2, 2, 1, 1, 1]
    assert batched({1: 3, 2: 5}, 4, units=2) == [2, 2, 1]


def test_fewer_than_a_batch_go_one_by_one() -> None:
    assert batched({1: 3, 2: 5}, 1) == [2]
    assert sorted(batched({1: 1, 2: 1}, 2)) == [1, 2]
    assert sorted(batched({1: 5, 2: 5}, 4, Policy(min_batch_size=5))) == [1, 1, 2, 2]
    assert set(batched({1: 5, 2: 5}, 4)) in ({1}, {2})


def test_a_batch_fits_by_its_resources_too() -> None:
    declared = {1: Declared((None, 250.0, None, None), (None, 250.0, None, None))}
    needs = {key: {"memory_mib": 100} for key in range(1, 5)}
    assert batched({1: 9, 2: 3}, 4, needs=needs, declared=declared) == [2, 2, 2, 1]


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


# GPUs as devices.


def in_use(pool: Pool) -> dict[str, int]:
    """What is in use of each counter of GPUs of the only bot."""
    rows = pool.rows("SELECT name, used FROM counters WHERE name LIKE 'bot\\:%\\:gpu%' AND used > 0 ORDER BY name")
    return {row.name.split(":", 2)[2]: int(row.used) for row in rows}


def offered(pool: Pool, bot: Bot) -> list[dict[str, Any]]:
    """One cycle of an assigner, and what it has given to the bot."""
    pool.assigner().run_once()
    return list(bot.sync()["leases"])


def devices(leases: list[dict[str, Any]]) -> list[list[int] | None]:
    return sorted((lease["gpus"] for lease in leases), key=str)


@pytest.mark.parametrize(
    ("needs", "gpus", "given", "taken"),
    [
        pytest.param([{"gpu_milli": 460}] * 5, 2, [[0], [0], [1], [1]], {"gpu:0": 920, "gpu:1": 920, "gpu_milli": 1840},
                     id="a part comes from one device: a fifth fits into the sum, and into no device"),
        pytest.param([{"gpu_milli": 100}, {"gpus": 2}, {"gpus": 1}], 4, [[0], [1, 2], [3]],
                     {"gpu:0": 100, "gpu:1": 1000, "gpu:2": 1000, "gpu:3": 1000, "gpu_milli": 100, "gpus": 3},
                     id="nobody shares whole ones"),
        pytest.param([{"gpus": 1, "gpu_milli": 500}], 2, [[0, 1]],
                     {"gpu:0": 500, "gpu:1": 1000, "gpu_milli": 500, "gpus": 1}, id="whole ones and a part of another"),
    ],
)  # fmt: skip
def test_jobs_have_devices_until_they_end(
    pool: Pool, needs: list[dict[str, int]], gpus: int, given: list[list[int]], taken: dict[str, int]
) -> None:
    for need in needs:
        job(pool, need=need)
    bot = pool.bot(capacity=10, resources={"gpus": gpus})
    leases = offered(pool, bot)
    assert devices(leases) == given
    assert in_use(pool) == taken
    assert devices(bot.sync()["leases"]) == given, "they are told the same again until they report"
    bot.sync(*(completed(lease) for lease in leases))
    assert in_use(pool) == {}


def test_only_bots_that_declare_gpus_run_jobs_that_take_whole_ones(pool: Pool) -> None:
    (name,) = job(pool, need={"gpus": 1})
    undeclared, without = pool.bot("undeclared"), pool.bot("without", resources={"gpus": 0})
    assert not offered(pool, undeclared)
    assert not without.take()
    said = "it does not run because it takes 1 whole GPUs, and no bot with room has more than 0 free"
    assert explained(pool, name).sentence == said


@pytest.mark.parametrize(
    ("need", "resources"),
    [({"gpu_milli": 700}, {"gpu_milli": 1500}), ({"cpu_milli": 100}, {"gpus": 1}), ({}, {"gpus": 1})],
)
def test_jobs_that_take_no_devices_are_told_of_none(
    pool: Pool, need: dict[str, int], resources: dict[str, int]
) -> None:
    """Amounts of GPU that are no devices are sums."""
    pool.submit(2, terms={"resources": need} if need else {})
    assert ["gpus" in lease for lease in offered(pool, pool.bot(capacity=10, resources=resources))] == [False, False]


def test_explain_says_that_the_sum_would_do_and_no_device_does(pool: Pool) -> None:
    job(pool, 2, need={"gpu_milli": 600})
    bot = pool.bot(capacity=10, resources={"gpus": 2})
    assert len(offered(pool, bot)) == 2
    (name,) = job(pool, need={"gpu_milli": 500})
    assert explained(pool, name).sentence == (
        "it does not run because it takes 500 gpu_milli of one GPU, and no GPU of a bot with room has more than 400"
        " left, although those of one bot have 800 together"
    )


def test_a_new_session_has_all_of_its_gpus(pool: Pool) -> None:
    job(pool, need={"gpus": 2})
    bot = pool.bot(capacity=10, resources={"gpus": 2})
    assert len(offered(pool, bot)) == 1
    pool.restarted(bot)
    assert not pool.rows("SELECT FROM counters WHERE name LIKE 'bot:%'"), "it declares none"
    again = pool.bot(capacity=10, resources={"gpus": 3})
    assert pool.row("SELECT count(*) AS n FROM counters WHERE name LIKE 'bot\\:%\\:gpu\\:%'").n == 3
    assert devices(offered(pool, again)) == [[0, 1]]


def test_what_a_bot_had_is_forgotten_with_it(pool: Pool) -> None:
    bot = pool.bot(resources={"gpus": 64, "cpu_milli": 2000})
    bot.sync(status="gone")
    pool.change("UPDATE bots SET opened_at = now() - interval '40 days'")
    pool.upkeep().run_once()
    assert not pool.rows("SELECT FROM counters")


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"gpus": 65}, "gpus is at most 64"),
        ({"gpus": 1, "gpu_milli": 500}, "gpu_milli means nothing together with gpus: each GPU has 1000"),
        ({"cpu": 1}, "cpu"),
        ({"cpu_milli": 1.5}, "cpu_milli"),
        ({"cpu_milli": -1}, "cpu_milli"),
    ],
)
def test_what_a_bot_declares_is_checked(resources: dict[str, float], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        OpenSession.model_validate({"bot": "b", "resources": resources})


def test_a_device_that_another_assigner_has_taken_meanwhile_is_not_given_twice(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second assigner takes the device after the first has read the bot as free, and before it locks the bot. The
    bot has more units than a batch has jobs, so that assigners do not wait for each other's batches."""
    late, early = job(pool, need={"gpu_milli": 600})[0], ""
    bot = pool.bot(capacity=100_000, resources={"gpus": 1})
    read = cycle.lock_bots

    def lock_bots(connection: Connection, placements: Sequence[Placement]) -> list[Placement]:
        nonlocal early
        monkeypatch.setattr(cycle, "lock_bots", read)
        (early,) = job(pool, need={"gpu_milli": 600})
        pool.assigner().run_once()
        return read(connection, placements)

    monkeypatch.setattr(cycle, "lock_bots", lock_bots)
    pool.assigner().run_once()
    assert (pool.job(early).state, pool.job(late).state) == ("leased", "queued")
    assert devices(bot.sync()["leases"]) == [[0]]
    assert in_use(pool) == {"gpu:0": 600, "gpu_milli": 600}


def test_assigners_at_once_take_no_more_than_there_is_and_no_device_twice(pool: Pool) -> None:
    pool.bot(capacity=100_000, resources={"gpus": 4, "memory_mib": 5000})
    job(pool, 20, need={"memory_mib": 1001})
    job(pool, 20, need={"gpu_milli": 450})
    job(pool, 4, need={"gpus": 1})
    job(pool, 20, need={"gpu_milli": 100})
    assigners = [pool.assigner() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(assigner.run_once) for assigner in assigners for _ in range(3)]:
            each.result()
    assert all(used <= 1000 for name, used in in_use(pool).items() if name.startswith("gpu:"))
    assert pool.row("SELECT used FROM counters WHERE name LIKE 'bot:%memory_mib'").used == 4004
    assert pool.row("SELECT count(*) AS n FROM live").n >= 4 + 8


def test_pack_goes_by_all_that_bots_have_left(pool: Pool) -> None:
    """The job takes CPU alone, and the bots differ in what they have of GPUs."""
    for name, gpus in (("gpu", 8), ("plain", 0)):
        pool.bot(name, resources={"gpus": gpus})
    job(pool, need={"cpu_milli": 100})
    pool.assigner(strategy={"kind": "pack"}).run_once()
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert (decision["bot"], decision["strategy"]) == ("plain", "pack")


def test_fragmentation_goes_by_jobs_that_wait_and_do_not_fit(pool: Pool) -> None:
    """Jobs for eight GPUs wait, which only one bot has. A small job would fit tightest there."""
    pool.bot("eight", capacity=9, resources={"gpus": 8})
    pool.bot("four", capacity=4, resources={"gpus": 4, "cpu_milli": 1000})
    job(pool, need={"gpu_milli": 900}, priority=-10)
    job(pool, 30, need={"gpus": 4, "cpu_milli": 2000}, priority=10)
    job(pool, 30, need={"gpus": 8}, priority=20)
    pool.assigner(batch=1, strategy={"kind": "fragmentation"}).run_once()
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert decision["bot"] == "four"
    assert decision["score"]["unusable_gpu_milli"] < 0, "four's GPUs were of use to hardly anybody"


def test_waiting_jobs_are_counted_by_what_they_take(pool: Pool) -> None:
    pool.submit(3, units=2)
    pool.submit(2, units=2, properties={"os": ["linux"]})
    job(pool, 4, need={"gpus": 1})
    job(pool, 1, need={"gpus": 1, "cpu_milli": 500})
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 hour' WHERE id = 1")
    counted = {
        (alike.units, str((alike.terms or {}).get("resources"))): alike.jobs
        for alike in pool.database.run(queues.waiting_jobs)
    }
    assert counted == {(2, "None"): 4, (1, "{'gpus': 1}"): 4, (1, "{'gpus': 1, 'cpu_milli': 500}"): 1}
    (of_default,) = pool.database.run(read_waiting_demand).values()
    assert of_default.shares[demand_of(1, {"gpus": 1})] == pytest.approx(4 / 9)


def test_what_waits_is_read_only_for_the_strategy_that_goes_by_it(pool: Pool) -> None:
    with statements() as said:
        for kind in ("capacity", "pack", "fragmentation"):
            job(pool, need={"cpu_milli": 100})
            pool.bot(kind, resources={"cpu_milli": 100})
            pool.assigner(strategy={"kind": kind}).run_once()
    assert sum("UNION ALL SELECT queue FROM needy" in each for each in said) == 1
    assert pool.row("SELECT count(*) AS n FROM live").n == 3
