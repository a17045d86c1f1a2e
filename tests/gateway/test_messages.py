"""Messages of bots that are refused: the answer names the field, and nothing is stored."""

from typing import Any

import httpx
import pytest

from schema.postgres.engine import Database
from schema.tenancy.tokens import Kind
from tests.support.http import JOB, submitted
from tests.support.pool import Pool
from tests.support.servers import Bot, Served, counts

SESSIONS: list[tuple[dict[str, Any], str]] = [
    ({"instance": "a", "pool": "b"}, "pool: means nothing together with instance: a bot serves one of them"),
    ({"capacity": True}, "capacity: input should be a valid integer"),
    ({"capacity": "5"}, "capacity: input should be a valid integer"),
    ({"capacity": 5.0}, "capacity: input should be a valid integer"),
    ({"priority": "5"}, "priority: input should be a valid integer"),
    ({"resources": {"cpu_milli": True}}, "resources.cpu_milli: input should be a valid integer"),
]
DONE = {"verdict": "succeeded"}
#: Outcomes that no run has, each a field and its value.
OUTCOMES: list[tuple[str, Any, str]] = [
    ("seconds", 1e300, "should be less than or equal to 1000000000000"),
    ("seconds", -1.0, "should be greater than or equal to 0"),
    ("seconds", "5", "should be a valid number"),
    ("exit_code", 10**299, "should be less than or equal to 4294967295"),
    ("exit_code", -(10**299), "should be greater than or equal to -2147483648"),
    ("exit_code", True, "should be a valid integer"),
    ("output_bytes", 10**299, "should be less than or equal to 9223372036854775807"),
]
#: Reports of one lease that contradict themselves.
CONTRADICTIONS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"state": "active", "outcome": DONE}], "leases.0.outcome: means nothing when the state is 'active'"),
    ([{"state": "pending", "outcome": DONE}], "leases.0.outcome: means nothing when the state is 'pending'"),
    ([{"state": "completed"}], "leases.0.outcome: is required when the state is 'completed'"),
    (
        [{"state": "completed", "outcome": DONE}, {"state": "completed", "outcome": {"verdict": "failed"}}],
        "leases.1.job: is reported twice with the same fence",
    ),
    (
        [{"state": "completed", "outcome": DONE}, {"state": "active"}],
        "leases.1.job: is reported twice with the same fence",
    ),
    ([{"state": "active", "fence": True}], "leases.0.fence: input should be a valid integer"),
]


@pytest.fixture
def working(served: Served, operator: httpx.Client, pool: Pool) -> tuple[Bot, dict[str, Any]]:
    """A bot that runs a job of an instance with an account, and the lease of that job as the bot reports it."""
    assert operator.put("/v1/instances/default/account", json={"unit": "seconds", "budget": 100}).status_code == 200
    bot = Bot(served)
    (job,) = submitted(operator, JOB)
    pool.assigner().run_once()
    (lease,) = bot.sync().json()["leases"]
    held = {"job": job, "fence": lease["fence"]}
    assert bot.sync(leases=[held | {"state": "active"}]).status_code == 200
    return bot, held


def stored(pool: Pool) -> list[Any]:
    return pool.rows("SELECT j.state, j.fence, b.sync_seq FROM jobs j CROSS JOIN bots b")


@pytest.mark.parametrize(("declared", "said"), SESSIONS)
def test_a_session_with_a_declaration_that_means_nothing_is_refused(
    served: Served, database: Database, declared: dict[str, Any], said: str
) -> None:
    before = counts(database)
    with served.client(served.token(Kind.BOT.value, bot="*")) as http:
        answer = http.post("/v1/sessions", json={"bot": "b1"} | declared)
    assert (answer.status_code, answer.json()["detail"]) == (422, said)
    assert answer.json()["field"] == said.split(":")[0]
    assert counts(database) == before


def test_a_field_of_a_newer_bot_is_refused_by_its_name_because_the_bot_may_rely_on_it(
    working: tuple[Bot, dict[str, Any]], served: Served, pool: Pool
) -> None:
    bot, held = working
    before = stored(pool)
    with served.client(served.token(Kind.BOT.value, bot="*")) as http:
        opened = http.post("/v1/sessions", json={"bot": "b2", "only_at_night": True})
    reported = bot.sync(leases=[held | {"state": "active", "mood": "good"}])
    assert [(answer.status_code, answer.json()["field"]) for answer in (opened, reported)] == [
        (422, "only_at_night"),
        (422, "leases.0.mood"),
    ]
    assert stored(pool) == before


def test_an_outcome_that_no_run_has_is_refused(working: tuple[Bot, dict[str, Any]], pool: Pool) -> None:
    bot, held = working
    before = stored(pool)
    for field, value, said in OUTCOMES:
        answer = bot.sync(leases=[held | {"state": "completed", "outcome": DONE | {field: value}}])
        where = f"leases.0.outcome.{field}"
        assert (answer.status_code, answer.json()["field"]) == (422, where)
        assert answer.json()["detail"] == f"{where}: input {said}"
    assert stored(pool) == before


def test_a_report_that_contradicts_itself_is_refused(working: tuple[Bot, dict[str, Any]], pool: Pool) -> None:
    bot, held = working
    before = stored(pool)
    for reports, said in CONTRADICTIONS:
        answer = bot.sync(leases=[held | report for report in reports])
        assert (answer.status_code, answer.json()["detail"]) == (422, said)
        assert answer.json()["field"] == said.split(":")[0]
    assert stored(pool) == before


def test_a_sync_may_name_one_job_with_two_fences(working: tuple[Bot, dict[str, Any]]) -> None:
    bot, held = working
    older = held | {"fence": held["fence"] - 1, "state": "active"}
    answer = bot.sync(leases=[older, held | {"state": "active"}])
    assert [lease["fence"] for lease in answer.json()["leases"]] == [held["fence"]]
