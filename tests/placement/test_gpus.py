"""GPUs of bots as devices: a part is taken of one device, and the job is told which devices it has."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from assigner.cycle import assigner as cycle
from assigner.explain.answer import explain
from assigner.placement.registry import StrategySettings
from assigner.placement.resources import read_waiting_kinds
from assigner.placement.room import demand_of
from bots.protocol import OpenSession
from schema.diagnostics import invariants
from schema.moves.grant import Placement
from schema.picking import queues
from schema.postgres.connection import Connection
from tests.support.plans import statements
from tests.support.pool import Bot, Pool, completed
from tests.support.race import Race


def job(pool: Pool, count: int = 1, *, need: dict[str, int], **fields: Any) -> list[str]:
    return pool.submit(count, terms={"resources": need}, **fields)


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


def test_a_part_of_a_gpu_comes_from_one_device(pool: Pool) -> None:
    jobs = job(pool, 5, need={"gpu_milli": 460})
    bot = pool.bot(capacity=10, resources={"gpus": 2})
    given = offered(pool, bot)
    assert devices(given) == [[0], [0], [1], [1]], "920 of each: the fifth fits into the sum, and into no device"
    assert in_use(pool) == {"gpu:0": 920, "gpu:1": 920, "gpu_milli": 1840}
    bot.sync(*(completed(lease) for lease in given))
    assert in_use(pool) == {}
    assert sum(pool.job(each).state == "queued" for each in jobs) == 1


def test_whole_gpus_are_devices_that_nobody_shares(pool: Pool) -> None:
    job(pool, need={"gpu_milli": 100}, priority=-1)
    job(pool, need={"gpus": 2})
    job(pool, need={"gpus": 1})
    bot = pool.bot(capacity=10, resources={"gpus": 4})
    assert devices(offered(pool, bot)) == [[0], [1, 2], [3]]
    assert in_use(pool) == {"gpu:0": 100, "gpu:1": 1000, "gpu:2": 1000, "gpu:3": 1000, "gpu_milli": 100, "gpus": 3}


def test_a_job_may_take_whole_gpus_and_a_part_of_another(pool: Pool) -> None:
    job(pool, need={"gpus": 1, "gpu_milli": 500})
    bot = pool.bot(capacity=10, resources={"gpus": 2})
    assert devices(offered(pool, bot)) == [[0, 1]]
    assert in_use(pool) == {"gpu:0": 500, "gpu:1": 1000, "gpu_milli": 500, "gpus": 1}


def test_only_bots_that_declare_gpus_run_jobs_that_take_whole_ones(pool: Pool) -> None:
    (name,) = job(pool, need={"gpus": 1})
    undeclared, without = pool.bot("undeclared"), pool.bot("without", resources={"gpus": 0})
    assert not offered(pool, undeclared)
    assert not without.take()
    told = pool.database.run(lambda c: explain(c, name, instances=None))
    assert told is not None
    assert told.sentence == ("it does not run because it takes 1 whole GPUs, and no bot with room has more than 0 free")


def test_amounts_of_gpu_that_are_no_devices_are_sums(pool: Pool) -> None:
    job(pool, 2, need={"gpu_milli": 700})
    bot = pool.bot(capacity=10, resources={"gpu_milli": 1500})
    assert [lease.get("gpus") for lease in offered(pool, bot)] == [None, None]


def test_jobs_that_take_no_gpu_are_told_of_none(pool: Pool) -> None:
    pool.submit()
    job(pool, need={"cpu_milli": 100})
    bot = pool.bot(capacity=10, resources={"gpus": 1})
    assert ["gpus" in lease for lease in offered(pool, bot)] == [False, False]


def test_explain_says_that_the_sum_would_do_and_no_device_does(pool: Pool) -> None:
    job(pool, 2, need={"gpu_milli": 600})
    bot = pool.bot(capacity=10, resources={"gpus": 2})
    assert len(offered(pool, bot)) == 2
    (name,) = job(pool, need={"gpu_milli": 500})
    told = pool.database.run(lambda c: explain(c, name, instances=None))
    assert told is not None
    assert told.sentence == (
        "it does not run because it takes 500 gpu_milli of one GPU, and no GPU of a bot with room has more than 400"
        " left, although those of one bot have 800 together"
    )


def test_a_job_is_told_the_same_devices_again_until_it_reports(pool: Pool) -> None:
    job(pool, need={"gpus": 2})
    bot = pool.bot(capacity=10, resources={"gpus": 3})
    assert devices(offered(pool, bot)) == [[0, 1]]
    assert devices(bot.sync()["leases"]) == [[0, 1]]


def test_a_new_session_has_all_of_its_gpus(pool: Pool) -> None:
    job(pool, need={"gpus": 2})
    bot = pool.bot(capacity=10, resources={"gpus": 2})
    assert len(offered(pool, bot)) == 1
    pool.restarted(bot)
    assert not pool.rows("SELECT FROM counters WHERE name LIKE 'bot:%'"), "it declares none"
    again = pool.bot(capacity=10, resources={"gpus": 3})
    assert pool.row("SELECT count(*) AS n FROM counters WHERE name LIKE 'bot\\:%\\:gpu\\:%'").n == 3
    assert devices(offered(pool, again)) == [[0, 1]]


def test_the_gpus_of_a_bot_are_forgotten_with_it(pool: Pool) -> None:
    bot = pool.bot(resources={"gpus": 64})
    bot.sync(status="gone")
    pool.change("UPDATE bots SET opened_at = now() - interval '40 days'")
    pool.upkeep().run_once()
    assert not pool.rows("SELECT FROM counters")


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"gpus": 65}, "gpus is at most 64"),
        ({"gpus": 1, "gpu_milli": 500}, "gpu_milli means nothing together with gpus: each GPU has 1000"),
    ],
)
def test_a_bot_counts_its_gpus_once(resources: dict[str, int], reason: str) -> None:
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


def test_a_bot_that_another_transaction_holds_gives_no_device(pool: Pool, race: Race) -> None:
    (name,) = job(pool, need={"gpus": 1})
    pool.bot("bot-1", resources={"gpus": 1})
    with race.first() as first:
        first.connection.execute_sql("SELECT FROM bots FOR NO KEY UPDATE")
        pool.assigner().run_once()
        assert pool.job(name).state == "queued"
    pool.assigner().run_once()
    assert pool.job(name).state == "leased"


def test_assigners_at_once_give_no_device_twice(pool: Pool) -> None:
    pool.bot(capacity=100_000, resources={"gpus": 4})
    job(pool, 20, need={"gpu_milli": 450})
    job(pool, 4, need={"gpus": 1})
    job(pool, 20, need={"gpu_milli": 100})
    assigners = [pool.assigner() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(assigner.run_once) for assigner in assigners for _ in range(3)]:
            each.result()
    assert not [finding for finding in invariants.verify(pool.database) if finding.rows]
    assert all(used <= 1000 for name, used in in_use(pool).items() if name.startswith("gpu:"))
    assert pool.row("SELECT count(*) AS n FROM live").n >= 8


@pytest.mark.breaks_invariants
def test_a_part_that_is_taken_of_two_devices_is_found(pool: Pool) -> None:
    (name,) = job(pool, need={"gpu_milli": 460})
    bot = pool.bot(resources={"gpus": 2})
    assert len(offered(pool, bot)) == 1
    pool.change(
        "UPDATE leases SET taken = taken || jsonb_build_object('bot:' || bot_id || '\\:gpu\\:0', 230,"
        " 'bot:' || bot_id || '\\:gpu\\:1', 230)"
    )
    pool.change("UPDATE counters SET used = 230 WHERE name LIKE 'bot\\:%\\:gpu\\:%'")
    found = {finding.id: finding.sample for finding in invariants.verify(pool.database) if finding.rows}
    assert found == {"S23": [str(pool.job(name).id)]}


def bot_of(leases: dict[str, Bot]) -> list[str]:
    return sorted(name for name, bot in leases.items() if bot.take())


def test_pack_goes_by_all_that_bots_have_left(pool: Pool) -> None:
    """The job takes CPU alone, and the bots differ in what they have of GPUs."""
    bots = {"gpu": pool.bot("gpu", resources={"gpus": 8}), "plain": pool.bot("plain", resources={"gpus": 0})}
    job(pool, need={"cpu_milli": 100})
    pool.assigner(strategy=StrategySettings(kind="pack")).run_once()
    assert bot_of(bots) == ["plain"]
    assert pool.row("SELECT strategy FROM leases").strategy == "pack"


def test_fragmentation_goes_by_jobs_that_wait_and_do_not_fit(pool: Pool) -> None:
    """Jobs for eight GPUs wait, which only one bot has. A small job would fit tightest there."""
    bots = {"eight": pool.bot("eight", capacity=9, resources={"gpus": 8}),
            "four": pool.bot("four", capacity=4, resources={"gpus": 4, "cpu_milli": 1000})}  # fmt: skip
    job(pool, need={"gpu_milli": 900}, priority=-10)
    job(pool, 30, need={"gpus": 4, "cpu_milli": 2000}, priority=10)
    job(pool, 30, need={"gpus": 8}, priority=20)
    pool.assigner(batch=1, strategy=StrategySettings(kind="fragmentation")).run_once()
    assert bot_of(bots) == ["four"]
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert decision["score"]["unusable_gpu_milli"] < 0, "four's GPUs were of use to hardly anybody"


def test_the_kinds_of_waiting_jobs_are_counted_by_what_they_take(pool: Pool) -> None:
    pool.submit(3, units=2)
    pool.submit(2, units=2, properties={"os": ["linux"]})
    job(pool, 4, need={"gpus": 1})
    job(pool, 1, need={"gpus": 1, "cpu_milli": 500})
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 hour' WHERE id = 1")
    kinds = {
        (kind.units, str((kind.terms or {}).get("resources"))): kind.jobs
        for kind in pool.database.run(queues.waiting_kinds)
    }
    assert kinds == {(2, "None"): 4, (1, "{'gpus': 1}"): 4, (1, "{'gpus': 1, 'cpu_milli': 500}"): 1}
    (of_default,) = pool.database.run(read_waiting_kinds).values()
    assert of_default.shares[demand_of(1, {"gpus": 1})] == pytest.approx(4 / 9)


def test_what_waits_is_read_only_for_the_strategy_that_goes_by_it(pool: Pool) -> None:
    with statements() as said:
        for kind in ("capacity", "pack", "fragmentation"):
            job(pool, need={"cpu_milli": 100})
            pool.bot(kind, resources={"cpu_milli": 100})
            pool.assigner(strategy=StrategySettings(kind=kind)).run_once()
    assert sum("UNION ALL SELECT queue FROM needy" in each for each in said) == 1
    assert pool.row("SELECT count(*) AS n FROM live").n == 3
