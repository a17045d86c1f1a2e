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
from typing import Any
from uuid import uuid4

import httpx
import psycopg
from sqlalchemy import make_url, text
from structlog.testing import capture_logs

from assigner.api import backlog, jobs
from assigner.config import loading
from assigner.config.loading import Reloader
from assigner.process.assign import AssignerProcess
from assigner.process.children import PARENT_VARIABLE
from assigner.settings import PoolSettings
from bots.gateway import app as app_gateway
from bots.gateway import server as server_gateway
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.postgres import embedded
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.postgres.notify import Wakeups
from schema.tenancy import tokens
from schema.timing import Timing
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool

#: A directory in memory. A database has some 300 files, and making them on a disk takes ten times longer.
MEMORY = Path("/dev/shm")
#: Bytes that must be free in it, for databases that wait to be dropped and for the write-ahead log.
ROOM = 4 * 1024**3
#: Databases that are dropped together. A drop waits for a checkpoint; drops that follow at once have little to write.
DROPPED_TOGETHER = 16


@contextmanager
def serving_in_memory() -> Iterator[str]:
    """Run a private server, with its data in memory if there is room, and give its URL."""
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM
    data = Path(tempfile.mkdtemp(prefix="leasehold-tests-", dir=MEMORY if roomy else None))
    if os.geteuid() == 0:
        data.chmod(0o711)  # for the account that runs the server
    try:
        with embedded.serve(data, durable=False) as server:
            yield server.url
    finally:
        shutil.rmtree(data)


class Databases:
    """Makes databases named `leasehold_test_…` and drops them. Leaving it drops all that are left."""

    def __init__(self, server_url: str) -> None:
        self._server = make_url(server_url)
        self._over: list[str] = []

    def __enter__(self) -> "Databases":
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def make(self, *, template: str | None = None) -> str:
        """Make a database and return its URL. `template`: URL of a database to clone, without connections to it."""
        name = f"leasehold_test_{uuid4().hex}"
        source = f'TEMPLATE "{make_url(template).database}"' if template else "TEMPLATE template0 ENCODING 'UTF8'"
        with self._connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}" {source}')
        return self._server.set(database=name).render_as_string(hide_password=False)

    def give_back(self, url: str) -> None:
        """Drop the database soon, even if it has connections."""
        self._over.append(make_url(url).database or "")
        if len(self._over) >= DROPPED_TOGETHER:
            self._drop()

    def _drop(self) -> None:
        with self._connect() as connection:
            while self._over:
                connection.execute(f'DROP DATABASE "{self._over.pop()}" WITH (FORCE)')

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(libpq_url(self._server.render_as_string(hide_password=False)), autocommit=True)


def opened(url: str) -> Database:
    """A `Database` for a test."""
    return Database(url, DatabaseSettings(), role="test", chance=random.Random(0))


# A real gateway on a real port, in a thread of the test's process


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

    def waits(self, topic: str) -> float:
        """Number of calls that wait for news of `topic`."""
        return float(self.app.state.metrics.waits.labels(topic)._value.get())


class Bot:
    """A bot that consists of HTTP calls, without an agent."""

    def __init__(self, served: Served, name: str = "b1", **scope: Any) -> None:
        self.http = served.client(served.token("bot", bot="*"))
        answer = self.http.post("/v1/sessions", json={"bot": name, "capacity": 2, **scope})
        assert answer.status_code == 200, answer.text
        session = answer.json()
        self.identity = {"bot": name, "epoch": session["epoch"], "secret": session["secret"]}
        self.seq = 0

    def sync(self, **report: Any) -> httpx.Response:
        self.seq += 1
        return self.http.post("/v1/sync", json={**self.identity, "seq": self.seq, **report})


def counts(database: Database) -> dict[str, int]:
    """Table → number of rows, for the tables of jobs and bots."""
    names = (
        "jobs",
        "job_payloads",
        "job_outputs",
        "submit_keys",
        "bots",
        "bot_answers",
        "leases",
        "job_events",
        "graphs",
    )
    rows = database.run(
        lambda c: {name: c.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}
    )
    return rows


@contextmanager
def serving(
    database: Database, timing: Timing, *, wakeups: bool = True, settings: server_gateway.GatewaySettings | None = None
) -> Iterator[Served]:
    """Run a gateway inside the block."""
    source = Wakeups(database, enabled=wakeups)
    source.start()
    chosen = settings or server_gateway.GatewaySettings(port=0)
    sync_service = SyncService(database, timing=timing, fetch=FetchSettings(), now=clock.monotonic)
    routers = [*jobs.ROUTERS, backlog.router]
    app = app_gateway.build(database, sync_service, chosen, timing=timing, wakeups=source, routers=routers)
    ready = threading.Event()
    found: list[str] = []

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = server_gateway.Server(app, chosen, on_ready=on_ready)
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
    popen: subprocess.Popen[bytes]
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
        command = [
            sys.executable,
            "-m",
            "assigner.cli.main",
            "--data",
            str(self.directory),
            "--config",
            str(self.config),
        ]
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**self._environ, **(environment or {})},
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

    @property
    def bot_token(self) -> str:
        """A token for bots of any name."""
        return (self.directory / "bot.token").read_text().strip()

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
        options = "-c search_path=leasehold,public"
        with psycopg.connect(libpq_url(self.database_url), autocommit=True, options=options) as connection:
            row = connection.execute(query, parameters).fetchone()
            return int(row[0]) if row else 0


LEASEHOLD = Path(sys.executable).parent / "leasehold"


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
def assigner_process(pool: Pool, file: Path) -> Iterator[tuple[AssignerProcess, list[Any]]]:
    """Run an assigner process with this configuration file inside the block; gives it and its log entries."""
    reloader = Reloader(file, PoolSettings, {}, current=loading.load(file, PoolSettings, {}), poll=0.1)
    made = AssignerProcess(pool.database, reloader, name="host", chance=random.Random(1))
    with capture_logs() as logs:
        try:
            made.start()
            yield made, logs
        finally:
            made.stop()
