"""Bots that keep properties for jobs that ask for them."""

import json
from typing import Any

import pytest
from leasehold.errors import BadInput
from pydantic import ValidationError

from bots.agent.agent import AgentSettings
from tests.support.explain import explained, gates_of
from tests.support.pool import Pool, active, completed

GPU: dict[str, Any] = {"properties": {"os": "linux", "gpu": ["a100", "any"]}, "exclusive": ["gpu"]}


def homes(pool: Pool) -> dict[str, str]:
    """Job → bot, for all leases."""
    rows = pool.rows(
        "SELECT j.public_id, b.name FROM leases l JOIN jobs j ON j.id = l.job_id JOIN bots b ON b.id = l.bot_id"
    )
    return {str(row.public_id): row.name for row in rows}


@pytest.mark.parametrize("bot_first", [True, False])
@pytest.mark.parametrize("sampling", [True, False])
def test_only_jobs_that_ask_for_an_exclusive_property_go_to_its_bot(
    pool: Pool, *, bot_first: bool, sampling: bool
) -> None:
    if bot_first:
        pool.bot("gpu-1", capacity=9, **GPU)
    (plain,), (linux,) = pool.submit(), pool.submit(properties={"os": "linux"})
    asking = [*pool.submit(properties={"gpu": "any"}), *pool.submit(properties={"os": "linux", "gpu": "a100"})]
    if not bot_first:
        pool.bot("gpu-1", capacity=9, **GPU)
    assigner = pool.assigner(strategy={"sampling": {"enabled": sampling}})
    assigner.run_once()
    assert homes(pool) == dict.fromkeys(asking, "gpu-1")

    pool.bot("cpu-1", capacity=9, properties={"os": "linux"})
    assigner.run_once()
    assert homes(pool) == {**dict.fromkeys(asking, "gpu-1"), plain: "cpu-1", linux: "cpu-1"}


def test_a_job_has_to_ask_for_each_exclusive_property(pool: Pool) -> None:
    pool.bot(capacity=9, properties={"gpu": "a100", "licence": "x"}, exclusive=["licence", "gpu"])
    pool.submit(properties={"gpu": "a100"})
    (both,) = pool.submit(properties={"gpu": "a100", "licence": "x"})
    pool.assigner().run_once()
    assert list(homes(pool)) == [both]


def test_a_bot_fetches_no_job_that_does_not_ask_for_its_exclusive_property(pool: Pool) -> None:
    pool.submit(properties={"gpu": "any"})
    bot = pool.bot("gpu-1", **GPU)
    (work,) = pool.given(bot)
    pool.submit()
    assert bot.sync(completed(work))["leases"] == []
    (asking,) = pool.submit(properties={"gpu": "any"})
    pool.assigner().run_once()
    (work,) = bot.sync()["leases"]
    assert work["job"] == asking
    bot.sync(active(work))


def test_a_bot_may_give_its_property_free_with_a_new_session(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot("gpu-1", **GPU)
    assert pool.given(bot) == []
    bot = pool.bot("gpu-1", properties=GPU["properties"])
    assert [work["job"] for work in pool.given(bot)] == [job]


def test_many_kinds_of_bots_do_not_hide_that_some_keep_properties(pool: Pool) -> None:
    for number in range(3):
        pool.bot(f"cpu-{number}", properties={"os": "linux", "disk": str(number)})
    pool.bot("gpu-1", **GPU)
    jobs = pool.submit(4, properties={"os": "linux"})
    assigner = pool.assigner()
    assigner._memory.fleet._many_kinds = 1
    assigner.run_once()
    assert sorted(homes(pool).values()) == ["cpu-0", "cpu-1", "cpu-2"]
    assert set(homes(pool)) < set(jobs)


def test_explain_tells_which_property_keeps_a_job_from_its_only_bot(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "linux"})
    pool.bot("gpu-1", **GPU)
    verdict = gates_of(explained(pool, job))["requirements"]
    assert not verdict.open
    assert "1 bot offering it is kept for jobs that ask for gpu" in verdict.sentence
    assert verdict.evidence["exclusive"] == ["gpu"]


def test_an_exclusive_property_that_the_bot_does_not_offer_is_refused(pool: Pool) -> None:
    with pytest.raises(BadInput, match="exclusive: 'gpu' is not one of the bot's properties"):
        pool.bot(properties={"os": "linux"}, exclusive=["gpu"])
    assert pool.rows("SELECT FROM bots") == []
    with pytest.raises(ValidationError, match="'gpu' is not one of the bot's properties"):
        AgentSettings(properties={"os": "linux"}, exclusive=("gpu",))


def test_kinds_with_and_without_exclusive_properties_are_different_ones(pool: Pool) -> None:
    pool.bot("gpu-1", **GPU)
    pool.bot("gpu-2", **GPU)
    pool.bot("gpu-3", properties=GPU["properties"])
    kinds = pool.rows("SELECT exclusive FROM kinds ORDER BY id")
    assert [json.dumps(row.exclusive) for row in kinds] == ['["gpu"]', "[]"]
