"""Who may make instances: whoever names one in a submit, a schedule or a bot, or operators alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from leasehold.errors import BadInput
from leasehold.transaction import submit_in
from structlog.testing import capture_logs

from assigner.config.loading import load
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema.moves.graphs import submit_graph
from schema.moves.submit import submit, submit_alone, submit_at_once
from schema.policy.schedule_changes import Author, put_schedule
from schema.policy.schedules import ScheduleTerms
from schema.postgres.engine import Database, libpq_url
from schema.tenancy import instances
from tests.support.http import audited
from tests.support.pool import Pool
from tests.support.requests import PLAIN

NEVER = '[tenancy]\ncreate_instances = "never"\n'
CII = PLAIN | {"instance": "cii"}
GRAPH = {"instance": "cii", "name": "g", "nodes": [{"node": 1, "after": [], "payload": {"command": ["true"]}}]}
TERMS = ScheduleTerms("* * * * *", "UTC", "skip", 10, 86400.0, "allow", True, {"command": ["true"]})
#: What names an instance without being an operator's command.
CREATORS: dict[str, Callable[[Database], object]] = {
    "one submit": lambda database: database.run(lambda c: submit(c, [CII], actor="test")),
    "one submit alone": lambda database: database.run_alone(lambda d: submit_alone(d, CII, actor="test")),
    "many submits": lambda database: database.run(lambda c: submit(c, [PLAIN, CII], actor="test")),
    "many submits at once": lambda database: database.run_alone(lambda d: submit_at_once(d, [PLAIN, CII], actor="t")),
    "many alike": lambda database: database.run_alone(lambda d: submit_at_once(d, [CII, CII], actor="test")),
    "deduplicated": lambda database: database.run(lambda c: submit(c, [PLAIN, CII | {"dedup_key": "a"}], actor="test")),
    "graph": lambda database: database.run(lambda c: submit_graph(c, GRAPH, sync=1.0, actor="test")),
    "schedule": lambda database: database.run(lambda c: put_schedule(c, "cii", "s", TERMS, author=Author("test"))),
}


def configured(pool: Pool, tmp_path: Path, written: str) -> None:
    """An assigner process starts with this file."""
    path = tmp_path / "leasehold.toml"
    path.write_text(written)
    declare(pool.database, load(path, PoolSettings, {}))


def names(pool: Pool) -> list[str]:
    return [row.name for row in pool.rows("SELECT name FROM instances ORDER BY name")]


def test_whoever_names_an_instance_makes_it_unless_only_operators_may(pool: Pool, tmp_path: Path) -> None:
    configured(pool, tmp_path, NEVER)
    for create in CREATORS.values():
        with pytest.raises(BadInput, match=r"instance: there is no instance 'cii', and only operators ma") as refused:
            create(pool.database)
        assert refused.value.field.endswith("instance")
    assert names(pool) == []
    assert pool.rows("SELECT FROM jobs") == []
    configured(pool, tmp_path, "")
    for create in CREATORS.values():
        create(pool.database)
    assert "cii" in names(pool)


def test_the_default_instance_and_those_that_are_there_may_always_be_used(pool: Pool, tmp_path: Path) -> None:
    configured(pool, tmp_path, NEVER + '[[instances]]\nname = "ci"\n')
    pool.database.run(lambda c: instances.put_instance(c, "qa", pool=None, actor="test"))
    for name in ("default", "ci", "qa"):
        pool.submit(instance=name)
    assert names(pool) == ["ci", "default", "qa"]


def test_a_bot_of_an_instance_that_is_not_there_is_refused_and_no_other(pool: Pool, tmp_path: Path) -> None:
    requests = [OpenSession(bot="bot-1"), OpenSession(bot="bot-2", instance="cii"), OpenSession(bot="bot-3")]
    configured(pool, tmp_path, NEVER)
    first, bad, last = sessions.open_sessions(pool.database, requests, timing=pool.timing)
    assert isinstance(bad, BadInput)
    assert (bad.field, [type(first), type(last)]) == ("instance", [Session, Session])
    configured(pool, tmp_path, "")
    again = sessions.open_sessions(pool.database, requests, timing=pool.timing)
    assert [type(each) for each in again] == [Session] * 3
    assert names(pool) == ["cii"]


def test_callers_in_sql_in_a_transaction_and_over_http_are_told_and_an_operator_makes_the_instance(
    operator: httpx.Client, pool: Pool, tmp_path: Path
) -> None:
    configured(pool, tmp_path, NEVER)
    job: dict[str, Any] = {"command": ["true"], "instance": "cii"}
    with pytest.raises(psycopg.Error, match="there is no instance 'cii'") as refused:
        pool.rows("SELECT * FROM submit(CAST(:jobs AS jsonb))", jobs=json.dumps([job]))
    assert refused.value.sqlstate == "LH007", "a code of its own"  # type: ignore[union-attr]
    with psycopg.connect(libpq_url(pool.database.url)) as connection:
        with pytest.raises(BadInput, match="instance: there is no instance 'cii'"):
            submit_in(connection, [job], lambda made: made)
    answer = operator.post("/v1/jobs", json={"jobs": [{"command": ["true"]}, job]})
    assert (answer.status_code, answer.json()["field"]) == (400, "jobs.1.instance")
    assert operator.patch("/v1/instances/cii", json={}).status_code == 200
    assert operator.post("/v1/jobs", json={"jobs": [job]}).status_code in (200, 201)


def test_a_schedule_of_the_configuration_that_is_refused_is_logged_and_the_process_goes_on(
    pool: Pool, tmp_path: Path
) -> None:
    schedule = '[[schedules]]\nname = "s"\ninstance = "cii"\ncron = "* * * * *"\njob = { command = ["true"] }\n'
    with capture_logs() as told:
        configured(pool, tmp_path, NEVER + schedule)
    assert "only operators make one" in str([each for each in told if each["log_level"] == "error"])
    assert names(pool) == []


def test_a_change_of_who_may_is_audited_once(pool: Pool, tmp_path: Path) -> None:
    for written, changes in (("", 0), (NEVER, 1), (NEVER, 1), ("", 2), ("", 2)):
        configured(pool, tmp_path, written)
        assert audited(pool.database).count("tenancy.set") == changes
