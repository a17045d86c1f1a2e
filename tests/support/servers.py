"""Databases, gateways and processes for tests: real servers, real ports and real tokens."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

import httpx
import psycopg
from psycopg import sql
from sqlalchemy import make_url
from structlog.testing import capture_logs

from assigner.api import backlog, jobs
from assigner.config import loading
from assigner.config.loading import Reloader
from assigner.process.assign import AssignerProcess
from assigner.process.children import PARENT_VARIABLE
from assigner.settings import PoolSettings
from bots.gateway import app as app_gateway
from bots.gateway import server as server_gateway
from bots.gateway.connection_limits import ConnectionLimits
from bots.gateway.identity.bearers import SignedTokens
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.diagnostics import invariants
from schema.postgres import embedded
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.postgres.notify import Wakeups
from schema.postgres.standby import StandbyReads
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.timing import Timing
from tests.support.fork_server.server import ForkedProcess
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool

#: A directory in memory. A database has some 300 files, and making them on a disk takes ten times longer.
MEMORY = Path("/dev/shm")
#: Bytes that must be free in it, for databases that wait to be dropped and for the write-ahead log.
ROOM = 4 * 1024**3
#: Role of the connection that checks and empties the database of a test, in its name among the server's connections.
CHECKS = "checks"
#: Role of the connections of the fixture `database`, which go on to the next test on the same clone.
OF_TESTS = "tests"
#: Databases that are dropped together. A drop waits for a checkpoint; drops that follow at once have little to write.
DROPPED_TOGETHER = 16


def in_memory() -> bool:
    """Whether there is a directory in memory with enough room, in which programs can be run."""
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    return usable and shutil.disk_usage(MEMORY).free >= ROOM


@contextmanager
def serving_in_memory() -> Iterator[str]:
    """Run a private server, with its data in memory if there is room, and give its URL."""
    data = Path(tempfile.mkdtemp(prefix="leasehold-tests-"))
    if os.geteuid() == 0:
        data.chmod(0o711)  # for the account that runs the server
    try:
        with embedded.serve(data, durable=False) as server:
            # It would look at each database in turn all the time, and analyze some of them, which changes their plans.
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET autovacuum_naptime = '1 d'")
                connection.execute("SELECT pg_reload_conf()")
            yield server.url
    finally:
        shutil.rmtree(data)


# What a test may change in the definition of a database. A statement that changes a definition writes new rows with its
# transaction's id into the catalog, later than the one from which this is asked. TRUNCATE writes into pg_class only.
_VERSIONS = " UNION ALL ".join(
    f"SELECT '{catalog}', count(*)::text, count(*) FILTER (WHERE age(xmin) < age(%(since)s::xid))::text FROM {catalog}"
    for catalog in ("pg_attribute", "pg_attrdef", "pg_index", "pg_constraint", "pg_trigger", "pg_proc", "pg_extension")
)
_CATALOG = f"""
SELECT array_agg(described ORDER BY described)::text FROM (
    {_VERSIONS}
    UNION ALL SELECT 'pg_class', relname, concat_ws(' ', relacl, reloptions, relowner)
    FROM pg_class WHERE relkind IN ('r', 'S', 'v') AND oid >= 16384
    UNION ALL SELECT 'pg_namespace', nspname, concat_ws(' ', nspacl, nspowner)
    FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'
    UNION ALL SELECT 'setting', setting, '' FROM pg_db_role_setting, unnest(setconfig) AS setting
    WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
    UNION ALL SELECT 'analyzed', '', '' FROM pg_statistic WHERE starelid >= 16384) AS described"""
# What ANALYZE finds out, and the options of tables: these are set back. PostgreSQL 18 has functions for the former.
_FORGET_COLUMNS = "DELETE FROM pg_statistic WHERE starelid >= 16384"
_RELATIONS = """
SELECT jsonb_agg(jsonb_build_object('oid', oid, 'relpages', relpages, 'reltuples', reltuples,
    'relallvisible', relallvisible, 'reloptions', to_jsonb(reloptions)))::text
FROM pg_class WHERE relkind IN ('r', 'p', 't', 'i') AND oid >= 16384"""
_SET_BACK = """
UPDATE pg_class c SET relpages = t.relpages, reltuples = t.reltuples, relallvisible = t.relallvisible,
    reloptions = t.reloptions
FROM jsonb_to_recordset(%s) AS t (oid oid, relpages integer, reltuples real, relallvisible integer, reloptions text[])
WHERE c.oid = t.oid AND (c.relpages, c.reltuples, c.relallvisible, c.reloptions)
    IS DISTINCT FROM (t.relpages, t.reltuples, t.relallvisible, t.reloptions)"""
_OTHERS = f"""
SELECT count(pg_terminate_backend(pid, 1000)) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    AND (application_name NOT LIKE '{OF_TESTS}%' OR state <> 'idle')"""
_TABLES = "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND oid >= 16384"
#: Bytes of a table from which on it is truncated. Rows of smaller ones are deleted: a table that is truncated lets the
#: server plan every statement anew that reads it. The planner takes a table for larger than this until it is analyzed.
LARGE = 8 * 8192
_LARGE = f"{_TABLES} AND pg_relation_size(oid) + coalesce(pg_relation_size(nullif(reltoastrelid, 0)), 0) >= {LARGE}"
_USED_SEQUENCES = """
SELECT setval(format('%I.%I', schemaname, sequencename), start_value, false) FROM pg_sequences
WHERE last_value IS NOT NULL"""


@dataclass(frozen=True)
class _Template:
    """A database to clone, as its first clone shows it.

    since: the id of a transaction after its last change; catalog and relations: what `_CATALOG` and `_RELATIONS` say.
    rows: the rows of its tables as COPY writes them. differing: a query of the tables that have other rows.
    """

    since: str
    catalog: str
    relations: str
    rows: Mapping[str, bytes]
    differing: str


class Databases:
    """Makes databases named `leasehold_test_…` and drops them. Leaving it drops all that are left.

    A clone that is given back is emptied and used again, which takes a tenth of the time of making one, and its
    connections keep their plans. It is dropped instead if its definition differs from the template's, other than by
    what ANALYZE finds out and options of tables, or if the role is no superuser.
    """

    def __init__(self, server_url: str) -> None:
        self._server = make_url(server_url)
        self._over: list[str] = []
        self._templates: dict[str, _Template] = {}
        self._clones: dict[str, str] = {}
        self._emptied: dict[str, list[str]] = {}
        self._opened: dict[str, Database] = {}
        self._of_tests: dict[str, Database] = {}

    def __enter__(self) -> "Databases":
        return self

    def __exit__(self, *_: object) -> None:
        for lent in self._of_tests.values():
            lent.close()
        self._over += [name for names in self._emptied.values() for name in names]
        self._drop()

    def make(self, *, template: str | None = None, warm: bool = False) -> str:
        """Make a database and return its URL.

        template: URL of a database to clone, without connections to it. warm: it may have connections of tests before.
        """
        original = None if template is None else make_url(template).database
        if original is not None and self._emptied.get(original):
            url = self._url(self._emptied[original].pop())
            if not warm:
                self.disconnect(url)
            return url
        name = f"leasehold_test_{uuid4().hex}"
        source = f'TEMPLATE "{original}"' if original else "TEMPLATE template0 ENCODING 'UTF8'"
        # By files: through the write-ahead log it takes ten times as long.
        with self._connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}" {source} STRATEGY FILE_COPY')
        if original is not None:
            self._clones[name] = original
            if original not in self._templates:
                self._templates[original] = self._described(name)
        return self._url(name)

    def findings(self, url: str) -> list[invariants.Finding]:
        """Return the invariants that the database breaks. Checks of one clone share a connection."""
        return [finding for finding in invariants.verify(self._kept(make_url(url).database or "")) if finding.rows]

    @contextmanager
    def connected(self, url: str) -> Iterator[Database]:
        """A `Database` for one test at a time. Its connections are those of the test before on this clone, if they are
        sound: a new one plans every statement anew."""
        name = make_url(url).database or ""
        if name not in self._of_tests:
            self._of_tests[name] = opened(url, role=OF_TESTS)
        lent = self._of_tests[name]
        before = dict(vars(lent))
        try:
            yield lent
        finally:
            vars(lent).update(before)

    def disconnect(self, url: str) -> None:
        """Close the connections that tests have left, for one that has only its own."""
        if (lent := self._of_tests.pop(make_url(url).database or "", None)) is not None:
            lent.close()

    def give_back(self, url: str) -> None:
        """Empty the database for another test, or drop it soon, even if it has connections."""
        name = make_url(url).database or ""
        if name in self._clones and self._empty(name):
            self._emptied.setdefault(self._clones[name], []).append(name)
            return
        self.disconnect(url)
        self._over.append(name)
        if len(self._over) >= DROPPED_TOGETHER:
            self._drop()

    def _described(self, clone: str) -> _Template:
        with self._connect(clone) as connection:
            rows, differing = {}, []
            for (table,) in connection.execute(_TABLES).fetchall():
                with connection.cursor().copy(f"COPY {table} TO STDOUT") as copied:
                    if written := b"".join(map(bytes, copied)):
                        rows[table] = written
                found = f"SELECT string_agg(t::text, ' ' ORDER BY t::text) FROM {table} t"
                kept = sql.Literal(_one(connection, found)).as_string(connection)
                differs = f"({found}) IS DISTINCT FROM {kept}" if table in rows else f"EXISTS (SELECT FROM {table})"
                differing.append(f"SELECT '{table}' WHERE {differs}")
            since = _one(connection, "SELECT pg_current_xact_id()::xid")
            catalog, relations = _one(connection, _CATALOG, since=since), _one(connection, _RELATIONS)
            return _Template(since, catalog, relations, rows, " UNION ALL ".join(differing))

    def _empty(self, name: str) -> bool:
        """Give the clone the rows of its template and nothing else; False if it may differ in anything else."""
        template = self._templates[self._clones[name]]

        def work(connection: Connection) -> bool:
            driver: Any = connection.session
            if driver.info.parameter_status("is_superuser") != "on":
                return False
            if _one(driver, _CATALOG, since=template.since) != template.catalog:
                driver.execute(_FORGET_COLUMNS)
                driver.execute(_SET_BACK, [template.relations])
                if _one(driver, _CATALOG, since=template.since) != template.catalog:
                    return False
            driver.execute(_OTHERS)
            # No trigger notes what is deleted, and autovacuum does not hear of it.
            driver.execute("SET session_replication_role = replica; SET track_counts = off")
            if large := [table for (table,) in driver.execute(_LARGE)]:
                driver.execute(f"TRUNCATE {', '.join(large)} CASCADE")
            changed = [table for (table,) in driver.execute(template.differing, prepare=True)]
            driver.execute("; ".join(f"DELETE FROM {table}" for table in changed))
            for table in changed:
                if table in template.rows:
                    with driver.cursor().copy(f"COPY {table} FROM STDIN") as copied:
                        copied.write(template.rows[table])
            driver.execute(_USED_SEQUENCES)
            driver.execute("SELECT pg_stat_reset()")
            return True

        return self._kept(name).run(work, urgent=True)

    def _kept(self, name: str) -> Database:
        if name not in self._opened:
            self._opened[name] = opened(self._url(name), role=CHECKS)
        return self._opened[name]

    def _drop(self) -> None:
        with self._connect() as connection:
            while self._over:
                name = self._over.pop()
                if name in self._opened:
                    self._opened.pop(name).close()
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def _url(self, name: str) -> str:
        return self._server.set(database=name).render_as_string(hide_password=False)

    def _connect(self, name: str | None = None) -> psycopg.Connection:
        url = self._server if name is None else self._server.set(database=name)
        return psycopg.connect(libpq_url(url.render_as_string(hide_password=False)), autocommit=True)


def _one(connection: psycopg.Connection, query: LiteralString, **values: str) -> str:
    row = connection.execute(query, values, prepare=True).fetchone()
    assert row is not None
    return str(row[0])


def opened(url: str, *, role: str = "test", direct: str | None = None) -> Database:
    """A `Database` for a test. `direct`: the URL of the server itself if `url` leads through a transaction pooler."""
    pooled = {} if direct is None else {"pooler": "transaction", "listen_url": direct}
    return Database(url, DatabaseSettings.model_validate(pooled), role=role, chance=random.Random(0))


# A real gateway on a real port, in a thread of the test's process


_described: list[Any] = []


@dataclass(frozen=True)
class Served:
    """A running gateway."""

    url: str
    app: Any
    server: server_gateway.Server
    database: Database

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False, verify=False)

    def token(self, kind: str, **scope: Any) -> str:
        return self.database.run(lambda connection: tokens.create(connection, kind, **scope))

    def described(self) -> Any:
        """The OpenAPI document. A gateway takes a second to make it, and those of all tests have the same."""
        if not _described:
            _described.append(self.client().get("/openapi.json").json())
        return _described[0]

    def waits(self, topic: str) -> float:
        """Number of calls that wait for news of `topic`."""
        return float(self.app.state.metrics.waits.labels(topic)._value.get())


class Bot:
    """A bot that consists of HTTP calls, without an agent. It has made its first sync, so that it can get leases."""

    def __init__(self, served: Served, name: str = "b1", **scope: Any) -> None:
        self.http = served.client(served.token("bot", bot="*"))
        answer = self.http.post("/v1/sessions", json={"bot": name, "capacity": 2, **scope})
        assert answer.status_code == 200, answer.text
        session = answer.json()
        self.identity = {"bot": name, "epoch": session["epoch"], "secret": session["secret"]}
        self.seq = 0
        answer = self.sync()
        assert answer.status_code == 200, answer.text

    def sync(self, **report: Any) -> httpx.Response:
        self.seq += 1
        return self.http.post("/v1/sync", json={**self.identity, "seq": self.seq, **report})


COUNTED = "jobs job_payloads job_metadata job_outputs submit_keys bots leases stored_events graphs"


def counts(database: Database) -> dict[str, int]:
    """Table → number of rows, for the tables of jobs and bots."""
    return database.run(
        lambda c: {name: c.execute(Statement(f"SELECT count(*) FROM {name}")).scalar_one() for name in COUNTED.split()}
    )


def application(
    database: Database,
    timing: Timing,
    *,
    wakeups: Wakeups | None = None,
    settings: server_gateway.GatewaySettings | None = None,
    standby: StandbyReads | None = None,
    signed: SignedTokens | None = None,
) -> Any:
    """A gateway's application with all routes, for a server or for calls by ASGI."""
    sync_service = SyncService(database, timing=timing, fetch=FetchSettings(), now=clock.monotonic)
    chosen = settings or server_gateway.GatewaySettings(port=0)
    routers = [*jobs.ROUTERS, backlog.router]
    return app_gateway.build(
        database, sync_service, chosen, timing=timing, wakeups=wakeups, routers=routers, standby=standby, signed=signed
    )


@contextmanager
def serving(
    database: Database,
    timing: Timing,
    *,
    wakeups: bool = True,
    settings: server_gateway.GatewaySettings | None = None,
    limits: ConnectionLimits | None = None,
    standby: StandbyReads | None = None,
    signed: SignedTokens | None = None,
) -> Iterator[Served]:
    """Run a gateway inside the block."""
    source = Wakeups(database, enabled=wakeups)
    source.start()
    chosen = settings or server_gateway.GatewaySettings(port=0)
    app = application(database, timing, wakeups=source, settings=chosen, standby=standby, signed=signed)
    ready = threading.Event()
    found: list[str] = []

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = server_gateway.Server(app, chosen, on_ready=on_ready, limits=limits)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert ready.wait(MINUTE), "the gateway did not come up"
    try:
        yield Served(found[0], app, server, database)
    finally:
        server.stop()
        thread.join(MINUTE)
        source.stop()
    assert not thread.is_alive(), "the gateway did not stop"


# Real processes of a pool, for tests that kill them


#: Seconds that a process may take to start while other tests run.
READY_WITHIN = 2 * MINUTE
#: Seconds between two tests whether it has started. Each opens a connection, which slows the start.
LOOK = 0.1
LISTENERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'leasehold-listen'
"""


@dataclass
class Process:
    """A running command; its output goes to the file `log`."""

    name: str
    popen: ForkedProcess | subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to this process only, as in a crash; its children are not killed."""
        self.popen.kill()
        self.popen.wait()

    def end(self, within: float = MINUTE) -> int:
        """Send SIGTERM, and return the exit status."""
        self.popen.terminate()
        return self.popen.wait(within)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Processes:
    """Starts processes on the test's database. Leaving it kills all that are left.

    directory: for configuration, tokens and logs. Other accounts may have to enter it, so use the fixture `scratch` and
        not pytest's directory.
    config: TOML for the file that all processes read, in addition to `[timing]` and a free port for the gateway.
    """

    def __init__(self, directory: Path, database_url: str, timing: Timing, *, config: str = "") -> None:
        self.directory, self.database_url = directory, database_url
        self.running: list[Process] = []
        self.config = directory / "leasehold.toml"
        lines = [f"{name} = {value!r}" for name, value in timing.model_dump().items()]
        self.config.write_text("[timing]\n" + "\n".join(lines) + "\n\n" + config)
        self._keep_tokens()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self._environ = {
            **kept,
            "LEASEHOLD_DATABASE_URL": database_url,
            "LEASEHOLD_GATEWAY_PORT": "0",
            # The default is the same directory for all tests, where bots of equal names would conflict.
            "LEASEHOLD_BOT_WORK_DIR": str(directory / "work"),
            PARENT_VARIABLE: "stdin",
        }

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        """Start `leasehold ARGUMENTS…` without waiting for it."""
        log = self.directory / f"{name}.log"
        where = ["--data", str(self.directory), "--config", str(self.config)]
        with log.open("ab") as output:
            popen = ForkedProcess(
                [*where, *arguments], output=output.fileno(), environment={**self._environ, **(environment or {})}
            )
        process = Process(name, popen, log)
        self.running.append(process)
        return process

    def assigner(self, name: str = "assigner-1") -> Process:
        """Start an assigner process, and wait until it listens for work."""
        before = self._listeners()
        process = self.start(name, "assign", "--name", name)
        self._await(process, lambda: self._listeners() > before)
        return process

    def gateway(self, name: str = "gateway", *, port: int = 0) -> Process:
        """Start a gateway, and wait until it answers; `url` is then its address."""
        address = self.directory / "gateway.url"
        address.unlink(missing_ok=True)
        process = self.start(name, "gateway", environment={"LEASEHOLD_GATEWAY_PORT": str(port)})
        self._await(process, lambda: address.exists() and self._is_ready())
        return process

    def bot(self, name: str = "bot-1", *arguments: str) -> Process:
        """Start a bot, and wait until its session is open."""
        token = str(self.directory / "bot.token")
        process = self.start(name, "bot", "--name", name, "--url", self.url, "--token-file", token, *arguments)
        self._await(process, lambda: self._value("SELECT count(*) FROM bots WHERE name = %s AND status = 'ok'", name))
        return process

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return (self.directory / "gateway.url").read_text().strip()

    @property
    def operator_token(self) -> str:
        """An operator's token."""
        return (self.directory / "operator.token").read_text().strip()

    def stop(self) -> None:
        """Kill the process groups of all processes that are left. Idempotent."""
        for process in self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
            if process.popen.stdin:
                process.popen.stdin.close()
        self.running.clear()

    def _keep_tokens(self) -> None:
        database = Database(self.database_url, DatabaseSettings(), role="test", chance=random.Random(0))
        try:
            for kind, bot in ((tokens.Kind.OPERATOR, None), (tokens.Kind.BOT, "*")):
                token = database.run(lambda connection, kind=kind, bot=bot: tokens.create(connection, kind, bot=bot))
                path = self.directory / f"{kind}.token"
                path.touch(mode=0o600)
                path.write_text(token + "\n")
        finally:
            database.close()

    def _await(self, process: Process, ready) -> None:
        def read() -> bool:
            if not process.alive:
                raise RuntimeError(f"{process.name} ended with {process.popen.returncode}: {process.said()[-2000:]}")
            return bool(ready())

        eventually(read, READY_WITHIN, what=f"{process.name} is ready", every=LOOK)

    def _is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", timeout=30.0, trust_env=False).status_code == 200
        return False

    def _listeners(self) -> int:
        return self._value(LISTENERS)

    def _value(self, query: str, *parameters: object) -> int:
        options = "-c search_path=leasehold,pg_temp"
        with psycopg.connect(libpq_url(self.database_url), autocommit=True, options=options) as connection:
            row = connection.execute(query, parameters).fetchone()
            return int(row[0]) if row else 0


LEASEHOLD = Path(sys.executable).parent / "leasehold"


def processes_of(data: Path) -> list[int]:
    """Processes whose command line names the data directory: ours, PostgreSQL and commands of jobs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if os.fsencode(data) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


class Console:
    """Runs commands with a data directory of their own. `program`: the console script, or that of a fork server."""

    def __init__(self, directory: Path, program: Path, **environ: str) -> None:
        self.directory = directory
        self.program = program
        self.data = directory / "data"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self.environ = {**kept, "LEASEHOLD_DATA": str(self.data), **environ}

    def run(self, *arguments: str, environ: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.program, *arguments],
            cwd=self.directory, env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def good(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def refused(self, *arguments: str, code: int = 2, environ: Mapping[str, str] | None = None) -> str:
        """Run a command that must fail with one line on standard error and no other output; return that line."""
        done = self.run(*arguments, environ=environ)
        assert done.returncode == code, done
        assert done.stdout == ""
        assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
        return done.stderr.removeprefix("error: ").rstrip("\n")


@contextmanager
def assigner_process(pool: Pool, file: Path, name: str = "host") -> Iterator[tuple[AssignerProcess, list[Any]]]:
    """Run an assigner process with this configuration file inside the block; gives it and its log entries."""
    reloader = Reloader(file, PoolSettings, {}, current=loading.load(file, PoolSettings, {}), poll=0.1)
    made = AssignerProcess(pool.database, reloader, name=name, chance=random.Random(1))
    with capture_logs() as logs:
        try:
            made.start()
            yield made, logs
        finally:
            made.stop()
