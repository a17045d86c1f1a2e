"""What `leasehold db doctor` finds, each fault made for real, and what it says to do, done for real."""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import make_url

from schema import clock
from schema.diagnostics import checks as doctor_checks
from schema.diagnostics import doctor, server
from schema.diagnostics.checks import (
    AutovacuumSettings,
    Check,
    Connections,
    Idler,
    SnapshotHolder,
    TableStatistics,
    Verdict,
)
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.postgres.statements import Statement
from schema.tables.columns import STORAGE
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.servers import Console, opened

NAMES = [
    "schema", "pooler", "wake-ups", "clocks", "snapshots", "locks", "indexes", "autovacuum", "dead rows",
    "retention", "schedules", "stored values", "callers", "writes", "disk", "durability", "connections", "memory",
    "fences", "notifications", "collation",
]  # fmt: skip
#: What depends on the server that the tests were given, not on the pool's database.
OF_THE_SERVER = {"disk", "durability", "memory", "connections"}


def checks(database: Database) -> dict[str, Check]:
    return {check.name: check for check in doctor.run_checks(database)}


@contextmanager
def session(url: str) -> Iterator["psycopg.Connection[Any]"]:
    """A session of somebody else, in autocommit."""
    connection = psycopg.connect(libpq_url(url), autocommit=True, application_name="report")
    try:
        yield connection
    finally:
        connection.close()


def outside(database: Database, statements: str) -> None:
    """Run each of the statements by itself, as an operator would."""
    with session(database.url) as other:
        for statement in statements.split("; "):
            other.execute(statement.encode())


def test_a_sound_database_has_nothing_to_do_and_exit_code_0(tmp_path: Path, scratch: Path, leasehold: Path) -> None:
    console = Console(tmp_path, leasehold, LEASEHOLD_DATA=str(scratch / "data"))
    with embedded.serve(scratch / "data") as server:
        database = opened(server.url)
        migrate.upgrade(database)
        database.close()
        found = json.loads(console.good("db", "doctor", "--json"))
    assert found["ok"] is True
    assert [(each["name"], each["verdict"], each["remedy"]) for each in found["checks"]] == [
        (name, "ok", None) for name in NAMES
    ]


def test_a_database_without_tables_is_bad_and_the_rest_is_unknown(
    tmp_path: Path, empty_url: str, leasehold: Path
) -> None:
    console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=empty_url)
    done = console.run("db", "doctor")
    assert done.returncode == 1
    assert re.fullmatch(r"error: \d of 21 checks are bad: schema[^\n]*\n", done.stderr)
    told = [line.strip() for line in done.stdout.splitlines()[1:]]
    assert told[0].split()[:2] == ["bad", "schema"]
    assert told[1] == "do: leasehold db upgrade"
    for name in ("indexes", "autovacuum", "dead rows", "callers"):
        assert any(line.startswith(f"unknown  {name}") for line in told)


def test_a_database_that_cannot_be_reached_gives_exit_3(tmp_path: Path, leasehold: Path) -> None:
    environ = {"LEASEHOLD_DATABASE_URL": "postgresql://127.0.0.1:1/x", "LEASEHOLD_DATABASE_OUTAGE_SECONDS": "0"}
    assert "cannot be reached" in Console(tmp_path, leasehold, **environ).refused("db", "doctor", code=3)


def test_a_full_disk_is_told_also_if_the_server_cannot_be_reached(tmp_path: Path, leasehold: Path) -> None:
    assert server.judge_disk("/srv/pg", left_mb=5000).verdict is Verdict.OK
    assert server.judge_disk("/srv/pg", left_mb=900).verdict is Verdict.WARNING
    found = server.judge_disk("/srv/pg", left_mb=7)
    assert (found.verdict, found.found) == (Verdict.BAD, "7 MB are left for the server's directory, /srv/pg")
    assert server.judge_disk(None, left_mb=None).verdict is Verdict.UNKNOWN
    (tmp_path / "data" / "pg").mkdir(parents=True)
    environ = {"LEASEHOLD_DATA": str(tmp_path / "data"), "LEASEHOLD_DATABASE_OUTAGE_SECONDS": "0"}
    told = Console(tmp_path, leasehold, **environ).refused("db", "doctor", code=3)
    assert re.search(r"; [\d,]+ MB are left for its directory, .*/data/pg$", told.strip()), told


def test_a_schema_of_another_version_is_bad(pool: Pool) -> None:
    pool.change("UPDATE alembic_version SET version_num = '9999'")
    pool.change("DROP INDEX jobs_parked")
    found = checks(pool.database)
    assert (found["schema"].verdict, found["schema"].remedy) == (Verdict.BAD, "install the newer program")
    assert found["indexes"].verdict is Verdict.BAD
    assert found["indexes"].remedy == "leasehold db upgrade"


def test_functions_of_callers_that_run_with_other_settings_are_bad_until_the_remedy_is_done(pool: Pool) -> None:
    assert checks(pool.database)["callers"].verdict is Verdict.OK
    for setting in ("SET jit = on", "RESET search_path"):
        outside(pool.database, f"ALTER FUNCTION leasehold.submit {setting}")
        found = checks(pool.database)["callers"]
        assert found.verdict is Verdict.BAD
        assert "leasehold.submit(jsonb, text)" in found.found
        outside(pool.database, str(found.remedy))
        assert checks(pool.database)["callers"].verdict is Verdict.OK


def test_a_database_of_another_collation_library_is_bad(database: Database) -> None:
    assert checks(database)["collation"].verdict is Verdict.OK
    outside(database, "UPDATE pg_database SET datcollversion = '153.14' WHERE datname = current_database()")
    found = checks(database)["collation"]
    assert found.verdict is Verdict.BAD
    assert "REFRESH COLLATION VERSION" in str(found.remedy)
    assert server.judge_collation('a"b', made="1", library="2").remedy == (
        'REINDEX DATABASE "a""b"; ALTER DATABASE "a""b" REFRESH COLLATION VERSION'
    )


def test_a_queue_of_notifications_that_is_more_than_half_full_is_bad_and_the_oldest_transaction_is_named() -> None:
    assert server.judge_notifications(0.5, None).verdict is Verdict.OK
    oldest = server.Listener(77, "reports", "psql", 3600.0)
    found = server.judge_notifications(0.51, oldest)
    assert (found.verdict, found.remedy) == (Verdict.BAD, "end it, if it listens: SELECT pg_terminate_backend(77)")
    assert "session 77 (psql, database reports), 3600 s old" in found.found


def test_wake_ups_that_are_lost_are_bad_and_those_that_arrive_tell_their_round_trip(
    database: Database, database_url: str, empty_url: str
) -> None:
    found = checks(database)["wake-ups"]
    assert found.verdict is not Verdict.BAD
    assert 0 < float(str(found.figures["round_trip_ms"])) < 2000
    for listen_url in (empty_url, "postgresql://me:hunter2@127.0.0.1:1/x"):
        settings = DatabaseSettings(listen_url=SecretStr(listen_url))
        lost = Database(database_url, settings, role="test", chance=random.Random(0))
        found = checks(lost)["wake-ups"]
        lost.close()
        assert found.verdict is Verdict.BAD
        assert "hunter2" not in found.found
        if listen_url == empty_url:
            assert f"work is on database {make_url(database_url).database}" in found.found
            assert f"listening on {make_url(empty_url).database}" in found.found
            assert "database.listen_url" in (found.remedy or "")


@pytest.mark.parametrize(
    ("holding", "elsewhere"),
    [
        ("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM leasehold.jobs", False),
        ("BEGIN; SELECT pg_current_xact_id()", False),
        ("BEGIN; SELECT pg_current_xact_id()", True),
    ],
    ids=["a reader", "a writer", "a writer in another database"],
)
def test_the_session_with_the_oldest_snapshot_is_named_and_can_be_ended(
    pool: Pool, empty_url: str, monkeypatch: pytest.MonkeyPatch, holding: str, elsewhere: bool
) -> None:
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 0.0)
    with session(empty_url if elsewhere else pool.database.url) as other:
        for statement in holding.split("; "):
            other.execute(statement.encode())
        pid = other.info.backend_pid
        found = checks(pool.database)["snapshots"]
        assert found.verdict is Verdict.WARNING
        assert f"session {pid} (report, user " in found.found
        assert "idle in transaction" in found.found
        assert f"SELECT pg_terminate_backend({pid})" in (found.remedy or "")
        pool.row(f"SELECT pg_terminate_backend({pid})")
        eventually(lambda: checks(pool.database)["snapshots"].verdict is Verdict.OK)


@pytest.mark.parametrize(
    ("holding", "wanting"),
    [
        ("LOCK TABLE leasehold.jobs", "SELECT FROM leasehold.jobs"),
        ("SELECT FROM leasehold.jobs FOR UPDATE", "SELECT FROM leasehold.jobs FOR SHARE"),
    ],
    ids=["a table", "a row"],
)
def test_the_session_for_whose_lock_others_wait_is_named_and_can_be_ended(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, holding: str, wanting: str
) -> None:
    monkeypatch.setattr(server, "HELD_SECONDS", (0.0, 600.0))
    pool.submit(1)
    url = pool.database.url
    with session(url) as other, session(url) as first, session(url) as second, ThreadPoolExecutor() as threads:
        assert checks(pool.database)["locks"].found == "nobody waits for the lock of another session"
        other.execute("BEGIN")
        other.execute(holding.encode())
        waits = [threads.submit(each.execute, wanting.encode()) for each in (first, second)]
        eventually(lambda: checks(pool.database)["locks"].figures["waiting"] == 2)
        found, pid = checks(pool.database)["locks"], other.info.backend_pid
        assert found.verdict is Verdict.WARNING
        assert found.found.startswith(f"2 sessions wait for a lock of session {pid} (report, user ")
        assert "idle in transaction" in found.found
        assert f"SELECT pg_terminate_backend({pid})" in (found.remedy or "")
        monkeypatch.setattr(server, "HELD_SECONDS", (60.0, 600.0))
        assert checks(pool.database)["locks"].verdict is Verdict.OK
        other.execute("ROLLBACK")
        for each in waits:
            each.result()


@pytest.mark.parametrize(
    ("holder", "found"),
    [
        (
            server.LockHolder(7, "psql", "ann", None, None, 2),
            "2 sessions wait for a lock of session 7 (psql, user ann), whose transaction is of unknown age",
        ),
        (
            server.LockHolder(8, "", None, "active", 9.0, 1),
            "1 session waits for a lock of session 8 (unnamed, active), whose transaction is open for 9.0 s",
        ),
    ],
    ids=["of a role that this one may not see", "of a process of the server"],
)
def test_of_who_holds_a_lock_nothing_is_told_that_is_not_known(holder: server.LockHolder, found: str) -> None:
    assert (judged := server.judge_locks([holder])).found == found
    assert judged.verdict is Verdict.WARNING


def test_dead_rows_name_the_snapshot_that_keeps_them(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 0.0)
    monkeypatch.setattr(doctor_checks, "MANY_DEAD", 20)
    pool.change("ALTER TABLE jobs SET (autovacuum_enabled = off)")
    pool.submit(30)
    with session(pool.database.url) as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT FROM leasehold.jobs")
        for _ in range(4):
            pool.row("WITH w AS (UPDATE jobs SET priority = priority + 1, rank = rank + 1 RETURNING 1)"
                     " SELECT count(*), (SELECT pg_stat_force_next_flush()::text) FROM w")  # fmt: skip
        eventually(lambda: checks(pool.database)["dead rows"].verdict is Verdict.WARNING)
        found = checks(pool.database)["dead rows"]
        # The server may have counted late what an earlier test left in this database.
        assert re.search(r"jobs has 120 dead rows and 3\d live ones", found.found)
        assert f"session {other.info.backend_pid}" in found.found
        assert f"pg_terminate_backend({other.info.backend_pid})" in (found.remedy or "")
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 60.0)
    assert checks(pool.database)["dead rows"].remedy == "VACUUM leasehold.jobs"


def test_an_index_that_failed_while_it_was_built_is_found_and_built_again_or_dropped_if_it_is_not_ours(
    pool: Pool,
) -> None:
    definition = pool.row("SELECT pg_get_indexdef('jobs_dedup'::regclass) AS statement").statement
    pool.change("DROP INDEX jobs_dedup")
    pool.submit(2)
    pool.change("UPDATE jobs SET dedup_key = 'same'")
    for made in (definition, "CREATE UNIQUE INDEX one_state ON leasehold.jobs (state)"):
        with session(pool.database.url) as other, pytest.raises(psycopg.errors.UniqueViolation):
            other.execute(made.replace(" INDEX ", " INDEX CONCURRENTLY ").encode())
    found = checks(pool.database)["indexes"]
    assert (found.verdict, found.found) == (Verdict.BAD, "invalid: jobs_dedup; invalid and not ours: one_state")
    assert "REINDEX INDEX CONCURRENTLY leasehold.jobs_dedup" in (found.remedy or "")
    pool.change("UPDATE jobs SET dedup_key = NULL")
    outside(pool.database, found.remedy or "")
    assert checks(pool.database)["indexes"].verdict is Verdict.OK


def test_missing_indexes_are_named_and_what_is_to_be_done_makes_them_as_they_were(pool: Pool) -> None:
    every = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'leasehold' ORDER BY 1"
    before = pool.rows(every)
    pool.change("DROP INDEX jobs_front; DROP INDEX jobs_dedup; DROP INDEX leases_stopping")
    pool.change("ALTER TABLE bots DROP CONSTRAINT bots_name_key; ALTER TABLE leases DROP CONSTRAINT leases_pkey")
    found = checks(pool.database)["indexes"]
    assert found.verdict is Verdict.BAD
    assert found.found == "missing: bots_name_key, jobs_dedup, jobs_front, leases_pkey, leases_stopping"
    outside(pool.database, found.remedy or "")
    assert pool.rows(every) == before
    assert checks(pool.database)["indexes"].verdict is Verdict.OK


def test_a_table_that_lost_its_vacuum_parameters_is_found_and_put_right(pool: Pool) -> None:
    pool.change("ALTER TABLE jobs RESET (autovacuum_vacuum_scale_factor); ALTER TABLE bots SET (fillfactor = 100)")
    found = checks(pool.database)["autovacuum"]
    assert found.verdict is Verdict.WARNING
    assert "autovacuum_vacuum_scale_factor of jobs is not set, not 0.01" in found.found
    assert "fillfactor of bots is 100, not 20" in found.found
    pool.change("ALTER TABLE stored_events SET (autovacuum_enabled = off)")
    worse = checks(pool.database)["autovacuum"]
    assert worse.verdict is Verdict.BAD
    assert "autovacuum is off for stored_events" in worse.found
    outside(pool.database, worse.remedy or "")
    assert checks(pool.database)["autovacuum"].verdict is Verdict.OK


def test_commits_that_do_not_wait_for_the_disk_are_bad(database: Database) -> None:
    name = make_url(database.url).database
    outside(database, f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    fast = opened(database.url)
    found = checks(fast)["durability"]
    fast.close()
    assert found.verdict is Verdict.BAD
    assert "synchronous_commit is off: a submit that was acknowledged may be lost" in found.found


def test_a_session_of_ours_that_idles_in_a_transaction_is_named(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "IDLE", 0.0)
    with session(pool.database.url) as other:
        other.execute("BEGIN")
        found = checks(pool.database)["connections"]
        assert found.verdict is Verdict.WARNING
        assert f"session {other.info.backend_pid} (report) idles in a transaction" in found.found
        assert f"SELECT pg_terminate_backend({other.info.backend_pid})" in (found.remedy or "")


def test_a_table_that_somebody_locks_does_not_hold_the_doctor_up(pool: Pool) -> None:
    with session(pool.database.url) as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE leasehold.jobs IN ACCESS EXCLUSIVE MODE")
        began = clock.monotonic()
        found = checks(pool.database)
        assert clock.monotonic() - began < MINUTE
    assert list(found) == NAMES
    assert found["memory"].verdict is Verdict.UNKNOWN
    assert "lock timeout" in found["memory"].found


def test_the_doctor_works_where_nothing_may_be_written_and_says_so(database: Database) -> None:
    name = make_url(database.url).database
    outside(database, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    reader = opened(database.url)
    found = checks(reader)
    reader.close()
    assert {name for name, check in found.items() if check.verdict is not Verdict.OK} - OF_THE_SERVER == {"writes"}
    assert found["writes"].figures == {"standby": False, "read_only": True}
    assert "promote" in str(server.judge_writes(standby=True, read_only=True).remedy)


@contextmanager
def stranger(pool: Pool) -> Iterator[Database]:
    """The database as a new role sees it, which owns nothing."""
    if not pool.row("SELECT rolsuper AS may FROM pg_roles WHERE rolname = current_user").may:
        pytest.skip("only a superuser may make roles and change the rights of the server's functions")
    role = f"leasehold_test_{uuid4().hex[:12]}"
    pool.change(f"CREATE ROLE {role} LOGIN")
    seen = opened(make_url(pool.database.url).set(username=role).render_as_string(hide_password=False))
    try:
        yield seen
    finally:
        seen.close()
        pool.change(f"DROP OWNED BY {role}")
        pool.change(f"DROP ROLE {role}")


def test_a_role_that_may_see_little_is_told_what_it_cannot_look_at(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 0.0)
    with stranger(pool) as limited, session(pool.database.url) as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT FROM leasehold.jobs")
        found = checks(limited)
    assert list(found) == NAMES
    assert found["schema"].verdict is Verdict.UNKNOWN
    assert "permission denied for schema leasehold" in found["schema"].found
    assert found["snapshots"].verdict is Verdict.UNKNOWN
    assert "pg_monitor" in (found["snapshots"].remedy or "")
    assert found["wake-ups"].verdict is not Verdict.BAD


def test_a_role_that_may_not_read_the_timeline_is_told_that_no_job_can_start(pool: Pool) -> None:
    functions = "pg_walfile_name(pg_lsn), pg_current_wal_insert_lsn()"
    with stranger(pool) as limited:
        pool.change(f"REVOKE EXECUTE ON FUNCTION {functions} FROM PUBLIC")
        try:
            refused = checks(limited)["fences"]
            assert (refused.verdict, "no job can start" in refused.found) == (Verdict.BAD, True)
            pool.change((refused.remedy or "").removeprefix("as a superuser: "))
            assert checks(limited)["fences"].figures == {"timeline": 1}
        finally:
            pool.change(f"GRANT EXECUTE ON FUNCTION {functions} TO PUBLIC")


def test_a_role_that_may_not_read_the_system_identifier_is_told_what_is_not_noticed_and_goes_on(pool: Pool) -> None:
    with stranger(pool) as limited:
        pool.change("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        try:
            warned = checks(limited)["fences"]
            assert (warned.verdict, "restored dump may not be noticed" in warned.found) == (Verdict.WARNING, True)
            pool.change(f"GRANT USAGE ON SCHEMA leasehold TO {(warned.remedy or '').rpartition(' ')[2]}")
            identifier = Statement("SELECT leasehold.server_identifier()")
            assert limited.run(lambda c: c.execute(identifier).scalar_one()) is None
            pool.change((warned.remedy or "").removeprefix("as a superuser: "))
            assert checks(limited)["fences"].verdict is Verdict.OK
            assert limited.run(lambda c: c.execute(identifier).scalar_one()) > 0
        finally:
            pool.change("GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC")


# How the doctor judges what it reads, also what no test can make of a server.


SESSION = SnapshotHolder("session", 7, "psql", "ann", "idle in transaction", "pool", 30.0, 10)
SLOT = SnapshotHolder("slot", None, "it's old", None, "inactive", None, None, 10)
PREPARED = SnapshotHolder("prepared", None, "gid'1", "ann", None, "pool", 30.0, 10)
STANDBY = SnapshotHolder("standby", 9, "replica", "rep", "streaming", None, None, 10)
FINE = Check("snapshots", Verdict.OK, "no session, slot or standby holds a snapshot")


@pytest.mark.parametrize(
    ("holder", "verdict", "remedy"),
    [
        (replace(SESSION, seconds=59.9), Verdict.OK, None),
        (replace(SESSION, seconds=60.0), Verdict.WARNING, "end session 7: SELECT pg_terminate_backend(7)"),
        (replace(SESSION, seconds=600.0), Verdict.BAD, "end session 7: SELECT pg_terminate_backend(7)"),
        (replace(PREPARED, seconds=61.0), Verdict.WARNING,
         "in database pool: COMMIT PREPARED or ROLLBACK PREPARED 'gid''1'"),
        (replace(SLOT, transactions=9_999), Verdict.OK, None),
        (replace(SLOT, transactions=10_000), Verdict.WARNING,
         "if the slot is not needed: SELECT pg_drop_replication_slot('it''s old')"),
        (replace(SLOT, transactions=1_000_000, state="active", pid=5), Verdict.BAD,
         "end the long query of the client that uses slot 'it''s old' (pid 5)"),
        (replace(STANDBY, transactions=20_000), Verdict.WARNING,
         "end the long query on standby replica, or set hot_standby_feedback = off there"),
    ],
)  # fmt: skip
def test_whoever_holds_an_old_snapshot_is_named(holder: SnapshotHolder, verdict: Verdict, remedy: str | None) -> None:
    found = doctor_checks.judge_snapshots([holder])
    assert (found.verdict, found.remedy) == (verdict, remedy)
    assert doctor_checks.describe_holder(holder) in found.found


def test_the_gravest_holder_is_named_first_and_the_young_ones_are_not_to_be_ended() -> None:
    old = replace(SESSION, pid=8, seconds=700.0)
    found = doctor_checks.judge_snapshots([SESSION, replace(SLOT, transactions=50_000), old])
    assert found.verdict is Verdict.BAD
    assert found.found.index("session 8") < found.found.index("slot")
    assert "session 7" not in found.found + str(found.remedy)
    assert found.figures["oldest_transactions"] == 50_000


def test_a_session_of_unknown_age_is_not_to_be_ended_beside_one_that_is_old() -> None:
    hidden = replace(SESSION, pid=8, state=None, seconds=None, transactions=10**6)
    assert doctor_checks.judge_snapshots([hidden, SESSION]).verdict is Verdict.UNKNOWN
    found = doctor_checks.judge_snapshots([hidden, replace(SESSION, seconds=90.0)])
    assert (found.verdict, found.remedy) == (Verdict.WARNING, "end session 7: SELECT pg_terminate_backend(7)")


def test_the_connections_of_a_role_are_counted_once_and_not_with_background_processes(database: Database) -> None:
    beside = psycopg.connect(libpq_url(database.url))
    found = database.run(doctor_checks.check_connections).figures
    ours = database.run(
        lambda c: c.execute(
            Statement("SELECT count(*) FROM pg_stat_activity WHERE usename = current_user AND client_port IS NOT NULL")
        ).scalar_one()
    )
    beside.close()
    assert found["of_this_role"] == ours
    assert found["of_this_role"] <= found["in_use"]


OK, WARNING, BAD = Verdict.OK, Verdict.WARNING, Verdict.BAD
MIB = 1024**2
COUNTED = Connections(most=100, reserved=3, in_use=10, ours=10)
DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "remote_apply"}
TABLE = TableStatistics("jobs", {name: str(value) for name, value in STORAGE["jobs"].items()}, 100_000, 6_000, None)
#: Parameters of a table, written in another way than ours.
OTHERWISE = dict.fromkeys(["fillfactor"], "45.0") | {
    "autovacuum_vacuum_scale_factor": "1e-2",
    "autovacuum_vacuum_cost_delay": "4.0",
    "autovacuum_vacuum_cost_limit": "900",
}
RESTING = TableStatistics("leases", {}, 1_000, 6_000, None)
BUILDING = doctor_checks.Index("a", usable=False, building=True)


def vacuums(table: TableStatistics) -> Check:
    return doctor_checks.judge_autovacuum(AutovacuumSettings(), [table])


def memory(*, buffers: int, size: int, work: int = 4 * MIB) -> Check:
    return doctor_checks.judge_memory(buffers=buffers, work=work, size=size)


@pytest.mark.parametrize(
    ("check", "verdict", "told"),
    [
        (doctor_checks.judge_clocks(0.2, 0.001), OK, ""),
        (doctor_checks.judge_clocks(-1.2, 0.001), WARNING, ""),
        (doctor_checks.judge_clocks(3600.0, 0.001), WARNING, ""),
        (doctor_checks.judge_clocks(2.0, 1.5), OK, ""),
        (doctor_checks.judge_wakeup(0.002), OK, ""),
        (doctor_checks.judge_wakeup(0.8), WARNING, ""),
        (doctor_checks.judge_connections(replace(COUNTED, in_use=77), []), OK, ""),
        (doctor_checks.judge_connections(replace(COUNTED, in_use=78), []), WARNING, ""),
        (doctor_checks.judge_connections(replace(COUNTED, in_use=93), []), BAD, ""),
        (doctor_checks.judge_connections(COUNTED, [Idler(5, "x", 9.0)]), OK, ""),
        (doctor_checks.judge_connections(COUNTED, [Idler(5, "x", 11.0)]), WARNING, "session 5 "),
        (doctor_checks.judge_connections(replace(COUNTED, in_use=97), [Idler(5, "x", 11.0)]), BAD, ""),
        (memory(buffers=128 * MIB, size=128 * MIB), OK, ""),
        (memory(buffers=128 * MIB, size=128 * MIB + 1), WARNING, ""),
        (memory(buffers=512 * MIB, size=128 * MIB + 1, work=65_536), WARNING, ""),
        (doctor_checks.judge_durability(DURABLE), OK, ""),
        *(
            (doctor_checks.judge_durability(DURABLE | {name: "off"}), BAD, f"{name} is off: {loss}")
            for name, loss in doctor_checks.LOSSES.items()
        ),
        (doctor_checks.judge_autovacuum(AutovacuumSettings(autovacuum=False), []), BAD, "autovacuum is off"),
        (doctor_checks.judge_autovacuum(AutovacuumSettings(track_counts=False), []), BAD, "track_counts is off"),
        (vacuums(TABLE), WARNING, ""),
        (vacuums(replace(TABLE, vacuumed=700.0)), WARNING, ""),
        (vacuums(replace(TABLE, vacuumed=500.0)), OK, ""),
        (vacuums(replace(TABLE, dead=4_000)), OK, ""),
        (vacuums(replace(TABLE, live=10_000_000)), OK, ""),
        (vacuums(TableStatistics("leases", OTHERWISE, 0, 0, None)), OK, ""),
        (doctor_checks.judge_dead_rows([RESTING], oldest=FINE), OK, ""),
        (
            doctor_checks.judge_dead_rows([replace(RESTING, dead=6_001)], oldest=FINE),
            WARNING,
            "VACUUM leasehold.leases",
        ),
        (
            doctor_checks.judge_indexes({"a": "CREATE INDEX a"}, [BUILDING], is_current=True),
            WARNING,
            "run the check again",
        ),
        (
            doctor_checks.judge_snapshots([replace(SESSION, name="\x1b[2J", owner="a\nb", seconds=99.0)]),
            WARNING,
            "session 7 ",
        ),
    ],
)
def test_what_was_read_is_judged_by_its_bounds(check: Check, verdict: Verdict, told: str) -> None:
    assert check.verdict is verdict
    assert told in f"{check.found} {check.remedy}"
    assert check.found.isprintable(), "a name from the server cannot write to the terminal"
