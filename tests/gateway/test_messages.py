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
ENDED, TWICE = {"state": "completed", "outcome": DONE}, "leases.1.job: is reported twice with the same fence"
CONTRADICTIONS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"state": "active", "outcome": DONE}], "leases.0.outcome: means nothing when the state is 'active'"),
    ([{"state": "pending", "outcome": DONE}], "leases.0.outcome: means nothing when the state is 'pending'"),
    ([{"state": "completed"}], "leases.0.outcome: is required when the state is 'completed'"),
    ([ENDED, {"state": "completed", "outcome": {"verdict": "failed"}}], TWICE),
    ([ENDED, {"state": "active"}], TWICE),
    ([{"state": "active", "fence": True}], "leases.0.fence: input should be a valid integer"),
    *(
        ([ENDED | {"outcome": DONE | {field: value}}], f"leases.0.outcome.{field}: input {said}")
        for field, value, said in OUTCOMES
    ),
]
LEASE = {"job": "0" * 32, "fence": 1, "state": "active"}
#: Calls that no agent sends.
SYNCS: list[dict[str, Any]] = [
    *({"seq": seq} for seq in (0, 2**63, 10**30)),
    *({"epoch": epoch} for epoch in (2**63, "1")),
    *({"bot": bot} for bot in ("Bad Name", "b1\n")),
    *({"capacity": capacity} for capacity in (-1, 2**31)),
    *({"wait": wait} for wait in (-1, 61)),
    *({"status": "asleep"}, {"secret": "x" * 1000}),
    *(
        {"leases": [LEASE | change]}
        for change in (
            *({"job": "no-uuid", "fence": 0}, {"fence": 2**63}, {"fence": -1}, {"state": "completed"}),
            *({"output": [{"start": 2**63, "data": "eA=="}]}, {"output": [{"start": 0, "data": "***"}]}),
            {"state": "completed", "outcome": {"verdict": "x"}},
        )
    ),
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


def test_a_session_with_a_declaration_that_means_nothing_is_refused(served: Served, database: Database) -> None:
    before = counts(database)
    with served.client(served.token(Kind.BOT.value, bot="*")) as http:
        for declared, said in SESSIONS:
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


def test_reports_and_calls_that_no_agent_sends_are_refused(working: tuple[Bot, dict[str, Any]], pool: Pool) -> None:
    bot, held = working
    before = stored(pool)
    for reports, said in CONTRADICTIONS:
        answer = bot.sync(leases=[held | report for report in reports])
        assert (answer.status_code, answer.json()["detail"]) == (422, said)
        assert answer.json()["field"] == said.split(":")[0]
    assert stored(pool) == before
    for change in SYNCS:
        answer = bot.sync(leases=[], **change) if "leases" not in change else bot.sync(**change)
        assert 200 <= answer.status_code < 500, (change, answer.text)
        assert answer.status_code != 200 or answer.json()["leases"] == []


def test_a_sync_may_name_one_job_with_two_fences(working: tuple[Bot, dict[str, Any]]) -> None:
    bot, held = working
    older = held | {"fence": held["fence"] - 1, "state": "active"}
    answer = bot.sync(leases=[older, held | {"state": "active"}])
    assert [lease["fence"] for lease in answer.json()["leases"]] == [held["fence"]]
