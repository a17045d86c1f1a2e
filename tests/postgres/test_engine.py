"""Values on their way to PostgreSQL and back: whatever a list or a document holds arrives as it is."""

import json
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import IntEnum
from typing import Any

import psycopg
import pytest
from leasehold.errors import NotReady

from schema.postgres import engine, fragments, session
from schema.postgres.connection import Connection
from schema.postgres.connection_pool import LONGEST_IDLE, ConnectionPool
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from tests.support.patience import MINUTE
from tests.support.pool import Pool, completed

QUOTED = [
    "",
    " ",
    "it's",
    'say "so"',
    "back\\slash",
    "a,b",
    "{}",
    "{a}",
    "NULL",
    "null",
    "\n\t",
    "\x1e",
    "é中\U0001f600",
]
BIG = 2**63 - 1
DOCUMENTS: list[dict[str, Any]] = [
    {},
    {"reason": 'it\'s "so", \\ and {more}'},
    {"reason": "\x01\x1e\x1f\n\t\x7f"},
    {"\x1e": ["\x1e", "\\u001e", "\\\x1e"]},
    {"é": "中\U0001f600", "rtl": "\u202e"},
    {"deep": {"er": [{"still": [None, True, False, -1, 2**53, 0.5, 1e-9]}]}, "none": None},
    {"NULL": "NULL", "": ""},
]


class Size(IntEnum):
    SMALL = 1


def there_and_back(database: Database, values: Any, kind: str) -> Any:
    """What PostgreSQL makes of the values as an array of that kind."""
    query = Statement(f"SELECT CAST(:values AS {kind}[]) AS found")
    return database.run(lambda connection: connection.execute(query, {"values": values}).scalar_one())


#: Lists, by the type to which the statement casts their values.
LISTS: list[tuple[str, list[Any]]] = [
    ("bigint", [1, 2, 3]),
    ("bigint", [0, -1, -BIG - 1, BIG, 2**31, 2**31 - 1, -(2**31) - 1]),
    ("integer", [2**31 - 1, -(2**31)]),
    ("bigint", list(range(10_000))),
    *(("bigint", values) for values in ([], [None], [1, None, 2**40], [None, -5], [[1, 2], [3, BIG]])),
    ("numeric", [10**30, -(10**30)]),
    *(("boolean", values) for values in ([True, False], [None, True])),
    *(("double precision", values) for values in ([0.5, -1.5, 1e300], [1.0, None])),
    *(("text", values) for values in (QUOTED, [None, *QUOTED], ["x", None], [], [["a,b", '"'], ["\\", ""]])),
    *(("bytea", values) for values in ([b"", b"\x00\xff\\\"',{}", None], [None, None], [bytes(range(256))] * 2)),
]
#: Integers that become what the statement says.
INTEGERS: list[tuple[str, list[Any], list[Any]]] = [
    ("boolean", [1, 0], [True, False]),
    ("double precision", [1, -(2**40)], [1.0, -(2.0**40)]),
    ("text", [1, -2], ["1", "-2"]),
    ("integer", [Size.SMALL, Size.SMALL], [1, 1]),
]


def test_a_list_comes_back_as_it_went_or_as_the_statement_says(database: Database) -> None:
    for kind, values, found in [*((kind, values, values) for kind, values in LISTS), *INTEGERS]:
        assert (kind, there_and_back(database, values, kind)) == (kind, found)


def test_what_a_list_cannot_hold_is_refused_and_not_cut(database: Database) -> None:
    with pytest.raises(Exception, match="out of range"):
        there_and_back(database, [BIG + 1], "bigint")
    for values in (["a\0b"], ["a", "\0"], ["", "a\0", "b"], [None, "a\0b"]):
        with pytest.raises(Exception, match="NUL"):
            there_and_back(database, values, "text")


def test_one_statement_takes_lists_of_all_kinds_one_after_the_other(database: Database) -> None:
    """A connection remembers how it sent a list before."""
    query = Statement("SELECT CAST(:values AS text[]) AS found")
    with database.connect() as connection:
        for values in ([1, 2], ["a"], [], [None], [3, None], [2**40], [b"x".decode()], [1]):
            found = connection.execute(query, {"values": values}).scalar_one()
            assert found == [None if value is None else str(value) for value in values]


def test_ids_come_as_the_text_that_they_are_shown_as(database: Database) -> None:
    ids = [uuid.UUID(int=5), uuid.uuid4()]
    query = Statement("SELECT CAST(:one AS uuid) AS one, CAST(:many AS uuid[]) AS many, CAST(NULL AS uuid) AS none")
    for values in (ids, [str(each).upper() for each in ids]):
        row = database.run(lambda c, v=values: c.execute(query, {"one": v[0], "many": v}).one())  # type: ignore[misc]
        assert (row.one, row.many, row.none) == (str(ids[0]), [str(each) for each in ids], None)


def test_documents_arrive_one_by_one_as_they_were(database: Database) -> None:
    query = Statement(
        f"SELECT d FROM unnest({fragments.json_array('some')}) WITH ORDINALITY AS t (d, nth) ORDER BY nth"
    )
    for some in (DOCUMENTS[:1], DOCUMENTS * 200):
        values = {"some": fragments.json_documents(iter(some))}
        assert database.run(lambda c, v=values: c.execute(query, v).scalars().all()) == some  # type: ignore[misc]


def test_no_document_can_pass_for_two(database: Database) -> None:
    query = Statement(f"SELECT cardinality({fragments.json_array('some')})")
    hostile = [{"a": fragments.SEPARATOR}, {fragments.SEPARATOR: 1}, {"a": f'"}}{fragments.SEPARATOR}{{"'}]
    sent = fragments.json_documents(hostile)
    assert sent.count(fragments.SEPARATOR) == len(hostile) - 1
    assert sorted(json.loads(one)["a"] for one in sent.split(fragments.SEPARATOR) if '"a"' in one) == sorted(
        document["a"] for document in hostile if "a" in document
    )
    assert database.run(lambda c: c.execute(query, {"some": sent}).scalar_one()) == len(hostile)


# A statement that is a transaction of its own, and what becomes of it when the connection or a lock is not there.


DOUBLED = b"SELECT 2 * CAST($1 AS integer), CAST(NULL AS text), $2"
BACKEND = b"SELECT pg_backend_pid()"
PLANS = Statement("SELECT current_setting('plan_cache_mode'), current_setting('transaction_isolation')")
PID = Statement("SELECT pg_backend_pid()")
WRITTEN = b"INSERT INTO queue_limits (label, max_queued) VALUES ($1, 1 / CAST($2 AS integer)) RETURNING label"


def limits(pool: Pool) -> int:
    found: int = pool.row("SELECT count(*) AS n FROM queue_limits").n
    return found


def test_a_statement_commits_by_itself_and_leaves_nothing_when_it_fails(pool: Pool) -> None:
    def written(label: bytes, divisor: bytes) -> list[bytes | None]:
        return pool.database.run_alone(lambda driver: engine.single_row(driver, WRITTEN, label, divisor))

    assert written(b"a", b"1") == [b"a"]
    with pytest.raises(psycopg.Error) as failed:
        written(b"b", b"0")
    assert isinstance(failed.value, psycopg.errors.DivisionByZero)
    assert limits(pool) == 1


def test_a_statement_that_the_session_has_forgotten_is_prepared_again(database: Database) -> None:
    def doubled(driver: "psycopg.Connection[object]") -> list[bytes | None]:
        return engine.single_row(driver, DOUBLED, b"21", "é".encode())

    row = [b"42", None, "é".encode()]
    for forgetting in (b"DEALLOCATE ALL", b"DISCARD ALL; SET search_path TO leasehold"):
        assert [database.run_alone(doubled) for _ in range(2)] == [row] * 2
        for _ in range(2):
            found = database.run(lambda connection: connection.execute(PLANS).one(), kept_plans=True)
            assert tuple(found) == ("force_generic_plan", "read committed")
        database.run_alone(lambda driver, forgetting=forgetting: driver.pgconn.exec_(forgetting))
    with pytest.raises(psycopg.Error):
        database.run(lambda connection: connection.execute(Statement("SELECT 1 / 0")))
    assert database.run_alone(doubled) == row


def test_a_connection_that_comes_back_within_a_transaction_is_not_lent_again(database: Database) -> None:
    def backend(driver: "psycopg.Connection[object]") -> bytes | None:
        return engine.single_row(driver, BACKEND)[0]

    first = database.run_alone(backend)
    assert database.run_alone(backend) == first
    database.run_alone(lambda driver: driver.pgconn.exec_(b"BEGIN"))
    assert database.run_alone(backend) != first


def test_statements_alone_and_transactions_share_one_pool(empty_url: str) -> None:
    narrow = Database(empty_url, DatabaseSettings(pool=1), role="test", chance=random.Random(0))
    backends = set()
    for _ in range(3):
        backends.add(narrow.run_alone(lambda driver: engine.single_row(driver, BACKEND)[0]))
        found = narrow.run(lambda connection: connection.execute(Statement(BACKEND.decode())).scalar_one())
        backends.add(str(found).encode())
    narrow.close()
    assert len(backends) == 1


def test_whoever_waits_for_a_connection_gets_the_one_that_comes_back(empty_url: str) -> None:
    narrow = Database(empty_url, DatabaseSettings(pool=1), role="test", chance=random.Random(0))
    asked = threading.Event()

    def waiting() -> bytes | None:
        asked.set()
        return narrow.run_alone(lambda driver: engine.single_row(driver, BACKEND)[0])

    with ThreadPoolExecutor(1) as threads:
        with narrow.connect() as held:
            backend = held.execute(Statement(BACKEND.decode())).scalar_one()
            waits = threads.submit(waiting)
            assert asked.wait(MINUTE)
            assert not waits.done()
        assert waits.result(MINUTE) == str(backend).encode()
    narrow.close()


def test_connections_that_only_a_burst_has_needed_are_closed_after_a_while(database: Database) -> None:
    """A server that is full has room for other processes then."""
    times = [0.0]
    lender = ConnectionPool(database.work._connect, size=3, now=lambda: times[0])
    with ExitStack() as burst:
        made = [burst.enter_context(lender.lend()) for _ in range(3)]
    times[0] = LONGEST_IDLE + 1
    for _ in range(3):
        with lender.lend() as last:
            assert not last.closed
    assert [each for each in made if not each.closed] == [last]
    lender.close()


@pytest.mark.parametrize("alone", [True, False], ids=["a statement", "a transaction with kept plans"])
def test_connections_that_were_lost_are_replaced(database: Database, alone: bool) -> None:
    with database.connect() as one, database.connect() as other:
        backends = [each.execute(PID).scalar_one() for each in (one, other)]
    ended = Statement("SELECT pg_terminate_backend(pid, 5000) FROM unnest(CAST(:pids AS integer[])) AS t (pid)")
    database.run(lambda connection: connection.execute(ended, {"pids": backends}).all(), urgent=True)
    failed: list[int] = []

    def counted(driver: "psycopg.Connection[object]") -> bytes | None:
        failed.append(1)
        return engine.single_row(driver, BACKEND)[0]

    if alone:
        assert int(database.run_alone(counted) or 0) not in backends
        assert len(failed) <= 3
    else:
        mine = database.run(lambda c: c.execute(PID).scalar_one(), kept_plans=True, undone=lambda: failed.append(1))
        assert mine not in backends
        assert len(failed) == 1, "the first error replaces all connections"
    with ExitStack() as held:
        for _ in range(database.work.size):
            held.enter_context(database.connect())


TOO_MANY_CONNECTIONS = Statement("DO $$ BEGIN RAISE EXCEPTION 'too many' USING ERRCODE = '53300'; END $$")


def test_an_outage_that_cuts_no_connection_leaves_all_as_they_are(database: Database) -> None:
    def sessions() -> list[int]:
        return [database.run(lambda c: c.execute(PID).scalar_one(), urgent=urgent) for urgent in (False, True)]

    before, tries = sessions(), []

    def work(connection: Connection) -> None:
        tries.append(1)
        if len(tries) == 1:
            connection.execute(TOO_MANY_CONNECTIONS)

    database.run(work)
    assert (sessions(), len(tries)) == (before, 2)


def test_a_transaction_with_kept_plans_uses_them_and_the_next_one_does_not(pool: Pool) -> None:
    def look(connection: Connection) -> tuple[str, ...]:
        connection.execute(Statement("INSERT INTO queue_limits (label, max_queued) VALUES ('a', 1)"))
        return tuple(connection.execute(PLANS).one())

    def failing(connection: Connection) -> None:
        look(connection)
        connection.execute(Statement("SELECT 1 / 0"))

    with pytest.raises(psycopg.Error, match="division by zero"):
        pool.database.run(failing, kept_plans=True)
    assert limits(pool) == 0
    assert pool.database.run(look, kept_plans=True) == ("force_generic_plan", "read committed")
    assert limits(pool) == 1
    assert tuple(pool.database.run(lambda connection: connection.execute(PLANS).one())) == ("auto", "read committed")


def test_the_server_plans_no_statement_of_a_sync_anew(pool: Pool) -> None:
    bot = pool.bot()
    pool.submit(20)
    pool.assigner().run_once()
    held = bot.sync()["leases"]
    kept = Statement("SELECT statement, custom_plans FROM pg_prepared_statements WHERE generic_plans > 0")
    for _ in range(12):
        held = bot.sync(*map(completed, held))["leases"]
    plans = pool.database.run(lambda connection: connection.execute(kept).all(), urgent=True)
    assert len(plans) >= 6, "the statements of a call that ends one job and fetches another"
    assert [row.statement for row in plans if row.custom_plans] == []


def test_a_transaction_with_kept_plans_begins_in_one_round_trip(database: Database) -> None:
    """The driver sends no BEGIN of its own, for which the server would have a warning."""
    told: list[object] = []

    def work(connection: Connection) -> None:
        connection.session.add_notice_handler(told.append)
        connection.execute(PLANS)

    for _ in range(3):
        database.run(work, kept_plans=True)
    assert told == []


def test_a_statement_that_waits_is_executed_before_the_next_one_or_with_the_commit(pool: Pool) -> None:
    added = Statement("INSERT INTO queue_limits (label, max_queued) VALUES (:label, 1 / CAST(:divisor AS integer))")
    counted = Statement("SELECT count(*) FROM queue_limits")

    def work(connection: Connection) -> int:
        connection.execute_later(added, {"label": "a", "divisor": 1})
        found: int = connection.execute(counted).scalar_one()
        connection.execute_later(added, {"label": "b", "divisor": 1})
        return found

    for kept_plans in (True, False):
        assert pool.database.run(work, kept_plans=kept_plans) == 1
        assert limits(pool) == 2
        pool.change("DELETE FROM queue_limits")
    with pytest.raises(psycopg.Error, match="division by zero"):
        pool.database.run(lambda c: c.execute_later(added, {"label": "c", "divisor": 0}), kept_plans=True)

    def failing(connection: Connection) -> None:
        connection.execute_later(added, {"label": "d", "divisor": 1})
        connection.execute_later(added, {"label": "e", "divisor": 0})
        connection.execute_later(counted, {}).result()

    with pytest.raises(psycopg.Error, match="division by zero"):
        pool.database.run(failing, kept_plans=True)
    assert limits(pool) == 0


def test_other_threads_run_while_a_transaction_with_kept_plans_waits_for_the_server(database: Database) -> None:
    """Of two threads one waits for the other, which libpq must not keep from running."""
    lock, free = Statement("SELECT pg_advisory_xact_lock(5)"), threading.Event()

    def second(connection: Connection) -> None:
        free.set()
        connection.execute(lock)

    with ThreadPoolExecutor(1) as threads, database.connect() as held:
        held.execute(lock)
        waits = threads.submit(lambda: database.run(second, kept_plans=True))
        assert free.wait(MINUTE)
        held.rollback()
        waits.result(MINUTE)


def test_a_session_keeps_no_more_statements_than_it_should(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST", 4)
    kept = Statement("SELECT count(*) FROM pg_prepared_statements")

    def work(connection: Connection) -> int:
        for n in range(6):
            assert connection.execute(Statement(f"SELECT {n} + :n"), {"n": 1}).scalar_one() == n + 1
        found: int = connection.execute(kept).scalar_one()
        return found

    assert [database.run(work) for _ in range(3)] == [4, 4, 4]


def test_what_waits_for_the_commit_is_called_after_it_and_never_if_the_commit_fails(pool: Pool) -> None:
    """Deferred constraints are checked by COMMIT itself, so the end of the work is no commit yet."""
    called: list[str] = []

    def work(name: str, statement: str) -> None:
        def once(connection: Connection) -> None:
            connection.execute(Statement(statement))
            connection.on_commit(lambda: called.append(name))

        pool.database.run(once)

    pool.change("CREATE TABLE parents (id int PRIMARY KEY)")
    pool.change("CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(psycopg.Error, match="children"):
        work("refused", "INSERT INTO children VALUES (1)")
    assert called == []
    with pytest.raises(psycopg.Error, match="division by zero"):
        pool.database.run(
            lambda connection: (
                connection.on_commit(lambda: called.append("undone")),
                connection.execute(Statement("SELECT 1 / 0")),
            )
        )
    work("committed", "INSERT INTO parents VALUES (1)")
    assert called == ["committed"]
    work("again", "INSERT INTO children VALUES (1)")
    assert called == ["committed", "again"]


def test_what_waits_for_the_commit_is_not_called_if_its_savepoint_was_undone(database: Database) -> None:
    called: list[str] = []

    def work(connection: Connection) -> None:
        connection.on_commit(lambda: called.append("before"))
        with connection.savepoint() as outer:
            connection.on_commit(lambda: called.append("undone"))
            with connection.savepoint():
                connection.on_commit(lambda: called.append("undone with the outer one"))
            outer.rollback()
        with connection.savepoint():
            connection.on_commit(lambda: called.append("kept"))
        connection.on_commit(lambda: called.append("after"))

    database.run(work)
    assert called == ["before", "kept", "after"]


def test_rows_are_tuples_whose_values_have_names_and_errors_are_those_of_the_driver(database: Database) -> None:
    with database.begin() as connection:
        rows = connection.execute(
            Statement("SELECT n, n * 2 AS twice, '%' AS sign FROM generate_series(1, :most) n"), {"most": 3}
        )
        assert rows.rowcount == 3
        first, *others = rows.all()
        assert (first.n, first.twice, first.sign, len(others)) == (1, 2, "%", 2)
        assert len(connection.execute(Statement("SELECT FROM generate_series(1, 2)")).all()) == 2, "without columns"
        made = connection.execute(Statement("CREATE TEMP TABLE four AS SELECT FROM generate_series(1, 4)"))
        assert made.rowcount == 4
        assert connection.execute(Statement("SELECT 1 AS n WHERE false")).one_or_none() is None
    with pytest.raises(psycopg.errors.DivisionByZero), database.begin() as connection:
        connection.execute(Statement("SELECT 1 / :n"), {"n": 0})
    with pytest.raises(KeyError, match="'n'"), database.begin() as connection:
        connection.execute(Statement("SELECT :n"), {})


def test_a_lock_that_cannot_be_had_in_time_is_tried_for_again(pool: Pool) -> None:
    tries: list[int] = []
    with pool.database.connect() as holder:
        holder.execute(Statement("LOCK TABLE queue_limits IN ACCESS EXCLUSIVE MODE"))

        def written(driver: "psycopg.Connection[object]") -> list[bytes | None]:
            tries.append(1)
            if len(tries) == 2:
                holder.rollback()
            return engine.single_row(driver, WRITTEN, b"a", b"1")

        assert pool.database.run_alone(written) == [b"a"]
    assert len(tries) == 2
    assert limits(pool) == 1


def test_a_database_that_is_away_is_an_outage_and_not_an_error_of_the_driver() -> None:
    away = Database(
        "postgresql://nobody@127.0.0.1:1/none", DatabaseSettings(outage_seconds=0), role="test", chance=random.Random(0)
    )
    with pytest.raises(NotReady):
        away.run_alone(lambda driver: engine.single_row(driver, BACKEND))


@pytest.mark.parametrize("kept_plans", [True, False], ids=["kept plans", "ordinary"])
def test_after_any_rollback_the_next_transactions_of_the_session_work(database: Database, kept_plans: bool) -> None:
    """The driver drops all prepared statements then. It prepares a statement when it has executed it five times."""
    one_session = DatabaseSettings(pool=1)
    session = Database(database.url, one_session, role="test", chance=random.Random(0))
    look = Statement("SELECT CAST(:n AS integer)")

    def work(connection: Connection) -> int:
        return int(connection.execute(look, {"n": 7}).scalar_one())

    def failing(connection: Connection) -> None:
        work(connection)
        raise ZeroDivisionError

    def unsent(connection: Connection) -> None:
        raise ZeroDivisionError

    try:
        for fails in (failing, unsent):
            for each in (True, False):
                for _ in range(7):
                    assert session.run(work, kept_plans=each, repeat=False) == 7
            with pytest.raises(ZeroDivisionError):
                session.run(fails, kept_plans=kept_plans)
            for each in (True, False, True):
                assert session.run(work, kept_plans=each, repeat=False) == 7
    finally:
        session.close()


#: Settings of a role or a database by which texts, times and lists mean something else than they say.
ODD = (
    "datestyle = 'German'",
    "standard_conforming_strings = off",
    "array_nulls = off",
    "quote_all_identifiers = on",
    "intervalstyle = 'iso_8601'",
    "bytea_output = 'escape'",
    "extra_float_digits = -15",
    "idle_session_timeout = '1ms'",
)


def test_settings_of_the_database_change_nothing_of_what_is_sent_and_read(pool: Pool) -> None:
    name = pool.row("SELECT current_database() AS name").name
    for each in ODD:
        pool.change(f'ALTER DATABASE "{name}" SET {each}')
    pool.database.work.discard_all()
    pool.database.reserve.discard_all()
    (job,) = pool.submit(label=r"a\b", properties={"NULL": ["NULL"]})
    bot = pool.bot(properties={"NULL": ["NULL"]})
    bot.sync(*(completed(work) for work in pool.given(bot)))
    pool.change("UPDATE jobs SET finished_at = now() - interval '3 days'")
    assert pool.job(job).label == r"a\b"
    pool.retention().run_once()
    assert [row.job_id for row in pool.rows("SELECT job_id FROM journal")] == [1]
