"""A submit reads the rows of its own queues and of no others, in any state of the planner's statistics; a grant too.

The pool has a queue for each of many keys: locks, requirement sets, instances and more. Watched are the statements
inside of the functions too, with plans that a session has kept since the tables were nearly empty, and with new ones.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from schema.moves.grant import Placement, grant
from schema.moves.submit import submit
from schema.picking import for_bot
from schema.picking.for_bot import FetchingBot
from schema.policy import queue_limits, submit_rules
from schema.policy.submit_rules import SubmitRuleTerms
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import Watch, filled, watched, watching
from tests.support.servers import Databases

BATCH, QUEUES = 10, 600
#: Rows that a submit of a batch may read: the few that each of its requests needs.
BOUND = 30 * BATCH
#: Executions after which a session keeps a plan for all values.
SETTLED = 7
TABLES = (
    *("constraint_sets", "instances", "job_metadata", "job_payloads", "jobs", "kind_platforms", "kinds", "platforms"),
    *("queues", "submit_keys", "unique_keys"),
)
#: A new requirement set is compared with each kind of bots; the others have a row for each thing that an operator sets.
READ_WHOLE = {"ceilings", "cohorts", "kinds", "submit_rules", "tenancy_policy"}

Request = dict[str, Any]


def job(**fields: Any) -> Request:
    return {"payload": {"command": ["true"]}, **fields}


#: The requests whose queues differ in one thing each. The queues of all others are alike in that thing.
KEYED: dict[str, Callable[[int], Request]] = {
    "lock": lambda key: job(terms={"locks": [f"lock-{key}"]}),
    "properties": lambda key: job(properties={"kind": [f"{key}"]}),
    "instance": lambda key: job(instance=f"i-{key}"),
    "units": lambda key: job(units=2 + key, terms={"locks": ["one"]}),
    "preferred": lambda key: job(preferred_properties={"kind": [f"{key}"]}),
    "insisting": lambda key: job(preferred_properties={"kind": [f"{key}"]}, prefer_seconds=10),
    "lock of preferring": lambda key: job(terms={"locks": [f"lock-{key}"]}, preferred_properties={"kind": ["one"]}),
    "lock of insisting": lambda key: KEYED["lock of preferring"](key) | {"prefer_seconds": 10},
    "lock of instances": lambda key: job(terms={"locks": ["one"]}, instance=f"i-{key}"),
}
#: Others, which are submitted to instances of their own.
OTHERS: dict[str, Callable[[int], Request]] = {
    "plain": lambda _: job(),
    "key": lambda key: job(instance=f"i-{key}", key=f"{key}"),
    "deduplication key": lambda key: job(instance=f"i-{key}", dedup_key=f"{key}", key=f"one-{key}"),
    "refusing": lambda key: job(instance=f"i-{key}", dedup_key=f"refused-{key}", on_conflict="refuse"),
    "metadata": lambda key: job(instance=f"i-{key}", metadata={"build": f"{key}"}),
}
GRAPH = Statement("SELECT * FROM submit_normal_graph(CAST(:request AS jsonb), 'test')")
ALONE = Statement("SELECT * FROM submit_alone(CAST(:request AS jsonb), 'test')")

#: Submits something whose keys are counted from a number.
Act = Callable[[Connection, int], object]


def batch(request: Callable[[int], Request]) -> Act:
    return lambda c, first: submit(c, [request(first + nth) for nth in range(BATCH)], actor="test")


def alone(request: Callable[[int], Request]) -> Act:
    return lambda c, first: c.execute(ALONE, {"request": json.dumps(request(first))}).all()


def again(connection: Connection, first: int) -> None:
    """Submit the same twice: the second one finds the keys of the first."""
    for _ in range(2):
        batch(OTHERS["key"])(connection, first)
        batch(OTHERS["deduplication key"])(connection, first)


def graph(connection: Connection, first: int) -> None:
    nodes = [KEYED["lock"](first + nth) | {"node": nth} for nth in range(BATCH)]
    request = {"name": "graph", "instance": f"i-{first}", "nodes": nodes}
    connection.execute(GRAPH, {"request": json.dumps(request)}).all()


def limited(connection: Connection, first: int) -> None:
    """Submit where operators have set limits."""
    queue_limits.set_queue_limits(connection, {"limited": 100}, actor="test")
    submit_rules.set_submit_rules(connection, {None: SubmitRuleTerms(commands=["true"])}, actor="test")
    batch(lambda key: job(instance=f"i-{key}", key=f"{key}", label="limited"))(connection, first)


ACTS: dict[str, Act] = {
    **{f"{name}, batch": batch(request) for name, request in (KEYED | OTHERS).items()},
    **{f"{name}, alone": alone(request) for name, request in (KEYED | OTHERS).items()},
    "known keys": again,
    "graph": graph,
    "limited": limited,
}


def analyze(database: Database) -> None:
    database.run(lambda connection: connection.execute(Statement("ANALYZE")))


def fill(database: Database) -> None:
    for request in KEYED.values():
        wanted = [request(key) for key in range(QUEUES)]
        database.run(lambda connection, wanted=wanted: submit(connection, wanted, actor="test"))


def submit_few(database: Database) -> None:
    for request in KEYED.values():
        database.run(lambda connection, request=request: batch(request)(connection, 0))


def acts(connection: Connection, first: int) -> Iterator[tuple[str, Watch]]:
    """Watch each act with keys from `first`, and undo it."""
    for name, act in ACTS.items():
        with connection.savepoint() as undone:
            with watching(connection, nested=True) as watch:
                act(connection, first)
            undone.rollback()
        yield name, watch
    connection.rollback()


def settle(connection: Connection) -> None:
    """Run each act so often, unwatched, that the session keeps its plans."""
    for act in ACTS.values():
        for _ in range(SETTLED):
            with connection.savepoint() as undone:
                act(connection, QUEUES)
                undone.rollback()
    connection.rollback()


STATES: dict[str, list[Callable[[Database], None]]] = {
    "never analysed": [],
    "analysed while empty": [analyze],
    "analysed with few rows": [submit_few, analyze],
}


@contextmanager
def new_session(database: Database) -> Iterator[Connection]:
    other = Database(database.url, DatabaseSettings(), role="test", chance=random.Random(0))
    with other.connect() as connection:
        yield connection
    other.close()


def findings(connection: Connection, plans: str) -> Iterator[str]:
    """What reads too much: its name, how much, and the plan that reads most."""
    for keys, first in (("known", QUEUES // 2), ("new", 2 * QUEUES)):
        for name, watch in acts(connection, first):
            assert watch.plans, f"{name} was not executed"
            whole = watch.whole_scans() - READ_WHOLE
            if watch.touched > BOUND or whole:
                worst = max(watch.plans, key=lambda plan: plan.touched)
                yield f"{name}, {keys} keys, {plans} plans: {watch.touched:g} rows, whole: {whole}\n{worst}"


@pytest.mark.parametrize("state", [
    "analysed with few rows",
    *(pytest.param(each, marks=pytest.mark.long) for each in ("never analysed", "analysed while empty", "analysed")),
])  # fmt: skip
def test_a_submit_reads_no_queues_of_others(databases: Databases, template: str, state: str) -> None:
    with filled(databases, template, TABLES) as database, database.connect() as early:
        for prepare in STATES.get(state, []):
            prepare(database)
        settle(early)
        fill(database)
        if state == "analysed":
            analyze(database)
        with new_session(database) as late:
            found = [*findings(early, "kept"), *findings(late, "new")]
    assert not found, "\n".join(found)


# A caller in SQL, whose session has the settings of the server.
OF_CALLERS = [Statement(f"SET {each} = on") for each in ("enable_seqscan", "enable_bitmapscan")]
SUBMIT = Statement("SELECT count(*) FROM submit(CAST(:requests AS jsonb))")
FLAT: dict[str, Callable[[int], Request]] = {
    "lock": lambda key: {"command": ["true"], "locks": [f"lock-{key}"]},
    "instance": lambda key: {"command": ["true"], "instance": f"i-{key}"},
    "properties": lambda key: {"command": ["true"], "properties": {"kind": f"{key}"}},
}


@pytest.mark.parametrize("name", ["lock", *(
    pytest.param(each, marks=pytest.mark.long) for each in FLAT if each != "lock")])  # fmt: skip
def test_a_caller_whose_session_has_small_tables_planned_reads_no_queues_of_others(
    databases: Databases, template: str, name: str
) -> None:
    def call(connection: Connection, first: int) -> None:
        requests = [FLAT[name](first + nth) for nth in range(BATCH)]
        connection.execute(SUBMIT, {"requests": json.dumps(requests)}).all()

    with filled(databases, template, TABLES) as database, new_session(database) as caller:
        for prepare in STATES["analysed with few rows"]:
            prepare(database)
        for setting in OF_CALLERS:
            caller.execute(setting)
        for nth in range(SETTLED):
            call(caller, nth * BATCH)
        caller.commit()
        fill(database)
        with watching(caller, nested=True) as watch:
            call(caller, 2 * QUEUES)
        caller.rollback()
    assert watch.touched <= BOUND, f"{watch}"


# Many requirement sets that bots of one kind offer.

OFFERED = json.dumps({"kind": [f"{number}" for number in range(QUEUES)]})
BOTS = Statement("""
INSERT INTO bots (name, epoch, session, sync_seq, status, capacity, kind, opened_at, expires_at)
SELECT 'bot-' || n, 1, '\\x00', 1, 'ok', 100, intern_kind(CAST(:offered AS jsonb)), now(), now() + interval '1 hour'
FROM generate_series(1, 3) n
""")
A_BOT = Statement("SELECT id, kind FROM bots ORDER BY id LIMIT 1")
READY = Statement("SELECT id FROM jobs WHERE state = 'queued' ORDER BY id LIMIT :limit")


def fill_sets(connection: Connection, sets: int) -> None:
    names = [f"{number}" for number in range(sets)]
    filling.fill_queues(connection, instances=1, kinds=names)
    filling.fill_jobs(connection, sets, instances=1, kinds=names)


def grants(connection: Connection) -> dict[str, Callable[[Connection], object]]:
    """A grant of a batch, and a pick for a bot that reads each queue."""
    bot, kind = connection.execute(A_BOT).one()
    jobs = list(connection.execute(READY, {"limit": BATCH}).scalars())
    fetcher = FetchingBot(bot, "bot-1", kind, 0, None, None, BATCH, BATCH)
    return {
        "grant": lambda c: grant(c, [Placement(each, bot, {}) for each in jobs], assigner="t", strategy="t", ack=1),
        "fetch": lambda c: for_bot.pick_for_bot(c, fetcher, limit=BATCH, any_wait=False, literal=False),
    }


@pytest.mark.parametrize("state", [*STATES, "analysed"])
def test_a_grant_reads_no_requirement_sets_of_others(databases: Databases, template: str, state: str) -> None:
    with filled(databases, template, (*TABLES, "bots", "leases")) as database:
        if state == "analysed while empty":
            analyze(database)
        database.run(lambda connection: fill_sets(connection, 3))
        database.run(lambda connection: connection.execute(BOTS, {"offered": OFFERED}))
        if state == "analysed with few rows":
            analyze(database)
        database.run(lambda connection: fill_sets(connection, QUEUES))
        if state == "analysed":
            analyze(database)
        for kept in (False, True):
            with database.connect() as connection:
                found = watched(connection, grants(connection), kept=kept)
            assert found["grant"].touched <= BOUND, f"{found['grant']}"
            assert found["fetch"].touched <= BOUND + 10 * QUEUES, f"{found['fetch']}"
