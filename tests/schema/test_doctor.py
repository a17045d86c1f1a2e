"""What `leasehold db doctor` finds, each fault made for real, and what it says to do, done for real."""

import json
import random
import re
from collections.abc import Iterator
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
    "schema", "pooler", "wake-ups", "clocks", "snapshots", "indexes", "autovacuum", "dead rows", "retention",
    "schedules", "stored values", "callers", "durability", "connections", "memory", "fences", "notifications",
    "collation",
]  # fmt: skip
#: What depends on the server that the tests were given, not on the pool's database.
OF_THE_SERVER = {"durability", "memory", "connections"}


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


def test_a_database_without_tables_is_bad_and_what_cannot_be_looked_at_says_so(
    tmp_path: Path, empty_url: str, leasehold: Path
) -> None:
    console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=empty_url)
    done = console.run("db", "doctor")
    assert done.returncode == 1
    assert re.fullmatch(r"error: \d of 18 checks are bad: schema[^\n]*\n", done.stderr)
    told = [line.strip() for line in done.stdout.splitlines()[1:]]
    assert told[0].split()[:2] == ["bad", "schema"]
    assert told[1] == "do: leasehold db upgrade"
    for name in ("indexes", "autovacuum", "dead rows", "callers"):
        assert any(line.startswith(f"unknown  {name}") for line in told)


def test_a_database_that_cannot_be_reached_gives_exit_3(tmp_path: Path, leasehold: Path) -> None:
    environ = {"LEASEHOLD_DATABASE_URL": "postgresql://127.0.0.1:1/x", "LEASEHOLD_DATABASE_OUTAGE_SECONDS": "0"}
    assert "cannot be reached" in Console(tmp_path, leasehold, **environ).refused("db", "doctor", code=3)


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


def test_wake_ups_that_are_listened_for_in_another_database_are_found_lost(database_url: str, empty_url: str) -> None:
    lost = Database(
        database_url, DatabaseSettings(listen_url=SecretStr(empty_url)), role="test", chance=random.Random(0)
    )
    found = checks(lost)["wake-ups"]
    lost.close()
    assert found.verdict is Verdict.BAD
    assert f"work is on database {make_url(database_url).database}" in found.found
    assert f"listening on {make_url(empty_url).database}" in found.found
    assert "database.listen_url" in (found.remedy or "")


def test_a_listen_connection_that_cannot_be_made_is_bad(database_url: str) -> None:
    nowhere = SecretStr("postgresql://me:hunter2@127.0.0.1:1/x")
    lost = Database(database_url, DatabaseSettings(listen_url=nowhere), role="test", chance=random.Random(0))
    found = checks(lost)["wake-ups"]
    lost.close()
    assert found.verdict is Verdict.BAD
    assert "hunter2" not in found.found


def test_wake_ups_that_arrive_tell_their_round_trip(database: Database) -> None:
    found = checks(database)["wake-ups"]
    assert found.verdict is not Verdict.BAD
    assert 0 < float(str(found.figures["round_trip_ms"])) < 2000


@pytest.mark.parametrize(
    "holding",
    [("BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT FROM leasehold.jobs"), ("BEGIN", "SELECT pg_current_xact_id()")],
    ids=["a reader", "a writer"],
)
def test_the_session_with_the_oldest_snapshot_is_named_and_can_be_ended(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, holding: tuple[str, ...]
) -> None:
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 0.0)
    with session(pool.database.url) as other:
        for statement in holding:
            other.execute(statement.encode())
        pid = other.info.backend_pid
        found = checks(pool.database)["snapshots"]
        assert found.verdict is Verdict.WARNING
        assert f"session {pid} (report, user " in found.found
        assert "idle in transaction" in found.found
        assert f"SELECT pg_terminate_backend({pid})" in (found.remedy or "")
        pool.row(f"SELECT pg_terminate_backend({pid})")
        eventually(lambda: checks(pool.database)["snapshots"].verdict is Verdict.OK)


def test_a_writer_in_another_database_of_the_server_holds_the_rows_as_well(
    pool: Pool, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "BAD_SECONDS", 0.0)
    with session(empty_url) as other:
        other.execute("BEGIN")
        other.execute("SELECT pg_current_xact_id()")
        found = checks(pool.database)["snapshots"]
        assert found.verdict is Verdict.BAD
        assert f"session {other.info.backend_pid} " in found.found


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
        assert "jobs has 120 dead rows and 30 live ones" in found.found
        assert f"session {other.info.backend_pid}" in found.found
        assert f"pg_terminate_backend({other.info.backend_pid})" in (found.remedy or "")
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 60.0)
    assert checks(pool.database)["dead rows"].remedy == "VACUUM leasehold.jobs"


def test_an_index_that_failed_while_it_was_built_is_found_and_built_again(pool: Pool) -> None:
    definition = pool.row("SELECT pg_get_indexdef('jobs_dedup'::regclass) AS statement").statement
    pool.change("DROP INDEX jobs_dedup")
    pool.submit(2)
    pool.change("UPDATE jobs SET dedup_key = 'same'")
    with session(pool.database.url) as other, pytest.raises(psycopg.errors.UniqueViolation):
        other.execute(definition.replace(" INDEX ", " INDEX CONCURRENTLY ").encode())
    found = checks(pool.database)["indexes"]
    assert (found.verdict, found.found) == (Verdict.BAD, "invalid: jobs_dedup")
    assert found.remedy == "REINDEX INDEX CONCURRENTLY leasehold.jobs_dedup"
    pool.change("UPDATE jobs SET dedup_key = NULL")
    outside(pool.database, found.remedy)
    assert checks(pool.database)["indexes"].verdict is Verdict.OK


def test_an_invalid_index_that_is_not_ours_is_a_warning_and_can_be_dropped(pool: Pool) -> None:
    pool.submit(2)
    with session(pool.database.url) as other, pytest.raises(psycopg.errors.UniqueViolation):
        other.execute("CREATE UNIQUE INDEX CONCURRENTLY one_state ON leasehold.jobs (state)")
    found = checks(pool.database)["indexes"]
    assert (found.verdict, found.found) == (Verdict.WARNING, "invalid and not ours: one_state")
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


def test_the_doctor_works_where_nothing_may_be_written(database: Database) -> None:
    name = make_url(database.url).database
    outside(database, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    reader = opened(database.url)
    found = checks(reader)
    reader.close()
    assert {name for name, check in found.items() if check.verdict is not Verdict.OK} <= OF_THE_SERVER


def test_a_role_that_may_see_little_is_told_what_it_cannot_look_at(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "WARNING_SECONDS", 0.0)
    role = f"leasehold_test_{uuid4().hex[:12]}"
    may = "SELECT rolsuper OR rolcreaterole AS make_roles FROM pg_roles WHERE rolname = current_user"
    if not pool.row(may).make_roles:
        pytest.skip("the role of the tests may not make roles")
    pool.change(f"CREATE ROLE {role} LOGIN")
    stranger = opened(make_url(pool.database.url).set(username=role).render_as_string(hide_password=False))
    try:
        with session(pool.database.url) as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT FROM leasehold.jobs")
            found = checks(stranger)
    finally:
        stranger.close()
        pool.change(f"DROP ROLE {role}")
    assert list(found) == NAMES
    assert found["schema"].verdict is Verdict.UNKNOWN
    assert "permission denied for schema leasehold" in found["schema"].found
    assert found["snapshots"].verdict is Verdict.UNKNOWN
    assert "pg_monitor" in (found["snapshots"].remedy or "")
    assert found["wake-ups"].verdict is not Verdict.BAD


def test_a_role_that_may_not_read_the_timeline_is_told_that_no_job_can_start(pool: Pool) -> None:
    functions = "pg_walfile_name(pg_lsn), pg_current_wal_insert_lsn()"
    role = f"leasehold_test_{uuid4().hex[:12]}"
    if not pool.row("SELECT rolsuper AS may FROM pg_roles WHERE rolname = current_user").may:
        pytest.skip("only a superuser may change the rights of the server's functions")
    pool.change(f"CREATE ROLE {role} LOGIN")
    pool.change(f"REVOKE EXECUTE ON FUNCTION {functions} FROM PUBLIC")
    stranger = opened(make_url(pool.database.url).set(username=role).render_as_string(hide_password=False))
    try:
        refused = checks(stranger)["fences"]
        assert (refused.verdict, "no job can start" in refused.found) == (Verdict.BAD, True)
        pool.change((refused.remedy or "").removeprefix("as a superuser: "))
        assert checks(stranger)["fences"].figures == {"timeline": 1}
    finally:
        stranger.close()
        pool.change(f"DROP OWNED BY {role}")
        pool.change(f"DROP ROLE {role}")
        pool.change(f"GRANT EXECUTE ON FUNCTION {functions} TO PUBLIC")


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
def test_whoever_holds_an_old_snapshot_is_named_with_the_way_to_end_it(
    holder: SnapshotHolder, verdict: Verdict, remedy: str | None
) -> None:
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


def test_a_name_from_the_server_cannot_write_to_the_terminal() -> None:
    found = doctor_checks.judge_snapshots([replace(SESSION, name="\x1b[2J", owner="a\nb", seconds=100.0)])
    assert found.found.isprintable()


@pytest.mark.parametrize(
    ("offset", "uncertainty", "verdict"),
    [
        (0.2, 0.001, Verdict.OK),
        (-1.2, 0.001, Verdict.WARNING),
        (3600.0, 0.001, Verdict.WARNING),
        (2.0, 1.5, Verdict.OK),
    ],
)
def test_clocks_that_differ_by_more_than_a_second_are_a_warning(
    offset: float, uncertainty: float, verdict: Verdict
) -> None:
    found = doctor_checks.judge_clocks(offset, uncertainty)
    assert found.verdict is verdict
    assert found.figures["offset_ms"] == offset * 1000


def test_a_slow_wake_up_is_a_warning() -> None:
    assert doctor_checks.judge_wakeup(0.002).verdict is Verdict.OK
    assert doctor_checks.judge_wakeup(0.8).verdict is Verdict.WARNING


@pytest.mark.parametrize("name", ["fsync", "full_page_writes", "synchronous_commit"])
def test_every_setting_without_which_an_acknowledged_submit_can_be_lost_is_bad_when_off(name: str) -> None:
    sound = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "remote_apply"}
    assert doctor_checks.judge_durability(sound).verdict is Verdict.OK
    found = doctor_checks.judge_durability(sound | {name: "off"})
    assert found.verdict is Verdict.BAD
    assert found.found == f"{name} is off: {doctor_checks.LOSSES[name]}"
    assert name in (found.remedy or "")


@pytest.mark.parametrize(("in_use", "verdict"), [(77, Verdict.OK), (78, Verdict.WARNING), (93, Verdict.BAD)])
def test_few_connections_that_are_left_are_a_danger(in_use: int, verdict: Verdict) -> None:
    counted = Connections(most=100, reserved=3, in_use=in_use, ours=10)
    assert doctor_checks.judge_connections(counted, []).verdict is verdict


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


def test_only_a_session_that_idles_for_long_is_a_warning_and_it_hides_nothing_worse() -> None:
    counted = Connections(most=100, reserved=3, in_use=10, ours=10)
    assert doctor_checks.judge_connections(counted, [Idler(5, "x", 9.0)]).verdict is Verdict.OK
    found = doctor_checks.judge_connections(counted, [Idler(5, "x", 11.0)])
    assert (found.verdict, found.figures["idle_in_transaction"]) == (Verdict.WARNING, [5])
    full = doctor_checks.judge_connections(replace(counted, in_use=97), [Idler(5, "x", 11.0)])
    assert full.verdict is Verdict.BAD


def test_small_buffers_matter_once_the_tables_are_larger() -> None:
    size = 128 * 1024**2
    assert doctor_checks.judge_memory(buffers=size, work=4 * 1024**2, size=size).verdict is Verdict.OK
    assert doctor_checks.judge_memory(buffers=size, work=4 * 1024**2, size=size + 1).verdict is Verdict.WARNING
    assert doctor_checks.judge_memory(buffers=4 * size, work=64 * 1024, size=size + 1).verdict is Verdict.WARNING


@pytest.mark.parametrize("name", ["autovacuum", "track_counts"])
def test_a_server_that_does_not_vacuum_is_bad(name: str) -> None:
    off = {"autovacuum": AutovacuumSettings(autovacuum=False), "track_counts": AutovacuumSettings(track_counts=False)}
    found = doctor_checks.judge_autovacuum(off[name], [])
    assert (found.verdict, found.found) == (Verdict.BAD, f"{name} is off")


@pytest.mark.parametrize(
    ("dead", "vacuumed", "verdict"),
    [
        (6_000, None, Verdict.WARNING),
        (6_000, 700.0, Verdict.WARNING),
        (6_000, 500.0, Verdict.OK),
        (4_000, None, Verdict.OK),
    ],
)
def test_a_table_that_needs_a_vacuum_and_had_none_for_long_is_a_warning(
    dead: int, vacuumed: float | None, verdict: Verdict
) -> None:
    table = TableStatistics(
        "jobs", {name: str(value) for name, value in STORAGE["jobs"].items()}, 100_000, dead, vacuumed
    )
    assert doctor_checks.judge_autovacuum(AutovacuumSettings(), [table]).verdict is verdict
    if dead > doctor_checks.MANY_DEAD:
        lazy = replace(table, live=10_000_000)
        assert doctor_checks.judge_autovacuum(AutovacuumSettings(), [lazy]).verdict is Verdict.OK


def test_the_same_parameter_written_otherwise_is_the_same() -> None:
    options = {
        "fillfactor": "45.0",
        "autovacuum_vacuum_scale_factor": "1e-2",
        "autovacuum_vacuum_cost_delay": "4.0",
        "autovacuum_vacuum_cost_limit": "900",
    }
    assert (
        doctor_checks.judge_autovacuum(AutovacuumSettings(), [TableStatistics("leases", options, 0, 0, None)]).verdict
        is Verdict.OK
    )


def test_dead_rows_are_a_warning_only_where_they_are_thousands_more_than_the_live_ones() -> None:
    table = TableStatistics("leases", {}, 1_000, 6_000, None)
    assert doctor_checks.judge_dead_rows([table], oldest=FINE).verdict is Verdict.OK
    found = doctor_checks.judge_dead_rows([replace(table, dead=6_001)], oldest=FINE)
    assert (found.verdict, found.remedy) == (Verdict.WARNING, "VACUUM leasehold.leases")


def test_an_index_that_is_being_built_is_not_to_be_touched() -> None:
    wanted = {"a": "CREATE INDEX CONCURRENTLY a"}
    found = doctor_checks.judge_indexes(
        wanted, [doctor_checks.Index("a", usable=False, building=True)], is_current=True
    )
    assert (found.verdict, found.remedy) == (Verdict.WARNING, "run the check again when they are built")
