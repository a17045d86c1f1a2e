"""Jobs that wait at gates beside others that do not: neither keep the others from the bots for as long as they come."""

import pytest

from schema import backpressure, quotas
from tests.pool import Pool, completed

TURNS = 100


def order(pool: Pool) -> str:
    """Of what a bot of two units runs, one after the other: G for a job that waited at gates, a point for any other."""
    bot, story = pool.bot(capacity=2), ""
    for _ in range(TURNS):
        pool.assigner().run_once()
        given = bot.take()
        story += "".join("." if pool.job(lease["job"]).constraint_set is None else "G" for lease in given)
        bot.sync(*(completed(lease) for lease in given))
    return story


@pytest.fixture
def staffed(pool: Pool) -> Pool:
    """A pool with an assigner at work, as bots see it."""
    pool.change("INSERT INTO assigners (name) VALUES ('here')")
    return pool


@pytest.mark.parametrize("priority", [-100, 0, 1])
def test_jobs_at_gates_do_not_starve_behind_others(staffed: Pool, priority: int) -> None:
    staffed.submit(2 * TURNS)
    staffed.submit(4, terms={"locks": ["door"]}, priority=priority)
    assert order(staffed).count("G") == 4


def test_others_do_not_starve_behind_jobs_at_gates(staffed: Pool) -> None:
    staffed.submit(2 * TURNS, terms={"owner": "ann"}, priority=-100)
    staffed.submit(5)
    assert order(staffed).count(".") == 5


def test_an_instance_gets_its_minimum_before_jobs_at_gates_come(staffed: Pool) -> None:
    staffed.submit(2 * TURNS, terms={"owner": "ann"}, priority=-100)
    staffed.submit(TURNS, instance="acme")
    staffed.database.run(
        lambda connection: quotas.set_quota(connection, "default", "acme", minimum=1, maximum=2, actor="test")
    )
    story = order(staffed)
    assert story.count(".") == TURNS, "one of its jobs ran in every turn"
    assert "G" in story


def test_closed_gates_keep_no_bot_from_other_jobs(staffed: Pool) -> None:
    staffed.submit(9, terms={"resource_class": "model"}, priority=-100)
    staffed.database.run(lambda c: backpressure.advise(c, "model", allowed=False, delay=0.0, actor="test"))
    staffed.submit(TURNS)
    assert order(staffed) == "." * TURNS


def test_where_no_assigner_is_at_work_a_bot_goes_on_with_what_it_can_fetch(pool: Pool) -> None:
    pool.submit(5, terms={"locks": ["door"]}, priority=-100)
    pool.submit(30)
    bot = pool.bot(capacity=1)
    pool.assigner().run_once()
    given = bot.take()
    for _ in range(30):
        assert len(given) == 1
        given = bot.sync(*(completed(lease) for lease in given))["leases"]
