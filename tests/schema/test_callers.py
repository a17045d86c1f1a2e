"""What callers call works whatever is in their sessions: tables, and settings of the server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.rows import scalar_row

from schema import sql
from schema.postgres.engine import SEARCH_PATH, Database, libpq_url
from schema.postgres.statements import Statement
from tests.support.pool import Pool

RELATIONS = """
SELECT relname, relkind FROM pg_class
WHERE relnamespace = 'leasehold'::regnamespace AND relkind IN ('r', 'v', 'S') ORDER BY relname"""
FUNCTIONS = "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'leasehold'::regnamespace"
#: Tells which settings are in force where a job is inserted.
TELL = """
CREATE FUNCTION leasehold.tell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE '% %', current_setting('jit'), current_setting('search_path');
    RETURN NEW;
END $$;
CREATE TRIGGER tell BEFORE INSERT ON leasehold.jobs FOR EACH STATEMENT EXECUTE FUNCTION leasehold.tell()"""
UNTELL = "DROP TRIGGER tell ON leasehold.jobs; DROP FUNCTION leasehold.tell()"
COMMAND = {"command": ["true"]}
#: Submits that between them ask everything that a submit may ask.
SUBMITS: list[list[dict[str, Any]]] = [
    [COMMAND],
    [COMMAND, COMMAND],
    [{**COMMAND, "key": "a"}, {**COMMAND, "dedup_key": "d", "key": "b"}, {**COMMAND, "dedup_key": "d"}],
    [{**COMMAND, "dedup_key": "d"}],
    [{**COMMAND, "key": "a"}],
    [{**COMMAND, "label": "nightly", "priority": 3, "metadata": {"build": "1"}, "instance": "ci"}],
    [{**COMMAND, "properties": {"os": "linux"}, "preferred_properties": {"disk": "ssd"}, "prefer_seconds": 9}],
    [{**COMMAND, "locks": ["tree"], "job_class": "serious", "owner": "alice", "deadline_seconds": 60}] * 2,
]
GRAPH = {"name": "g", "nodes": [{"node": 1, **COMMAND}, {"node": 2, "after": [1], **COMMAND}]}
LIMITS = "INSERT INTO queue_limits (label, max_queued) VALUES ('nightly', 100), (NULL, 1000)"


@contextmanager
def caller(database: Database) -> Iterator["psycopg.Connection[Any]"]:
    """A session as a program has it: with no settings of ours."""
    with psycopg.connect(libpq_url(database.url), autocommit=True, row_factory=scalar_row) as connection:
        yield connection


def submit_all_kinds(connection: "psycopg.Connection[Any]") -> None:
    for requests in SUBMITS:
        connection.execute("SELECT count(*) FROM leasehold.submit(%s)", (json.dumps(requests),))
    connection.execute("SELECT count(*) FROM leasehold.submit_graph(%s)", (json.dumps(GRAPH),))


def test_no_table_of_the_caller_is_taken_for_one_of_ours(pool: Pool) -> None:
    pool.change(LIMITS)
    relations = [(row.relname, row.relkind) for row in pool.rows(RELATIONS)]
    tables = [name for name, kind in relations if kind in ("r", "v")]
    with caller(pool.database) as connection:
        for name, kind in relations:
            if kind == "S":
                connection.execute(f"CREATE TEMP SEQUENCE {name}".encode())
            else:
                connection.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM leasehold.{name} LIMIT 0".encode())
        submit_all_kinds(connection)
        for name in tables:
            swallowed = connection.execute(f"SELECT count(*) FROM pg_temp.{name}".encode()).fetchone()
            assert swallowed == 0, f"{swallowed} rows of {name} are the caller's"
    states = [row.state for row in pool.rows("SELECT state FROM jobs ORDER BY id")]
    assert states == ["queued"] * 10 + ["blocked"]
    assert len(tables) > 60


def test_callers_functions_fix_the_path_and_forbid_compilation_and_no_other_function_does(database: Database) -> None:
    found = {row.proname: row.proconfig or [] for row in database.run(lambda c: c.execute(Statement(FUNCTIONS)).all())}
    path = f"search_path={SEARCH_PATH}"
    assert {name for name, settings in found.items() if {path, "jit=off"} <= {*settings}} == {*sql.OF_CALLERS}
    others = [name for name, settings in found.items() if name not in sql.OF_CALLERS and "jit=off" in settings]
    assert others == []
    fixed = {name for name, settings in found.items() if "search_path" in str(settings)}
    assert fixed == {*sql.OF_CALLERS, "keep_journal_days"}, "it has the rights of the owner as well"


def test_the_server_compiles_nothing_for_a_submit_of_a_caller(pool: Pool) -> None:
    pool.change(TELL)
    told: list[str | None] = []
    with caller(pool.database) as connection:
        connection.execute("SET jit = on")
        connection.add_notice_handler(lambda diagnostic: told.append(diagnostic.message_primary))
        submit_all_kinds(connection)
        assert connection.execute("SHOW jit").fetchone() == "on"
    pool.change(UNTELL)
    assert {*told} == {f"off {SEARCH_PATH}"}
    assert len(told) > 8


def test_who_submits_has_a_name_and_not_that_of_another(pool: Pool) -> None:
    calls = [
        ("submit", [COMMAND]), ("submit", [COMMAND, COMMAND]), ("submit_graph", GRAPH),
    ]  # fmt: skip
    wrong = [
        (None, "actor: is 0 bytes long, and a name has 1 to 200"),
        ("", "actor: is 0 bytes long, and a name has 1 to 200"),
        ("ä" * 101, "actor: is 202 bytes long, and a name has 1 to 200"),
        ("operator:1", "actor: 'operator:1' is the name of a token's holder or of a schedule"),
        *[(f"{kind}:x", f"actor: '{kind}:x' is the name of") for kind in ("submitter", "bot", "schedule")],
    ]
    with caller(pool.database) as connection:
        for function, request in calls:
            for actor, said in wrong:
                query = f"SELECT count(*) FROM leasehold.{function}(%s, %s)".encode()
                with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
                    connection.execute(query, (json.dumps(request), actor))
                assert str(refused.value).startswith(said)
            connection.execute(query, (json.dumps(request), "shop:checkout"))
    assert {row.actor for row in pool.rows("SELECT actor FROM job_events")} == {"shop:checkout"}
