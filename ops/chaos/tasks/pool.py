"""The pool of a kill run: PostgreSQL, a gateway, an assigner process, and bots that serve the app of the run."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from leasehold import Pool
from leasehold.errors import LeaseholdError
from leasehold.tasks.task import TaskJob
from sqlalchemy import make_url

from assigner.process.local_pool import reserved_port
from ops.chaos import execution
from ops.chaos.members import Keeper, Member, Role
from ops.chaos.pool import FAST, FAST_MARGIN, MEMORY
from ops.chaos.server import DatabaseServer
from ops.chaos.tasks import app
from ops.chaos.tasks.checker import Call, Stop
from ops.chaos.watch import Invariants
from schema import clock
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.migrate import upgrade
from schema.postgres.urls import libpq_url
from schema.tenancy import tokens

#: How many bots there are, and how many tasks each runs at once. Few, because a job that loses its bot three times is
#: given up: one kill of a bot shall hit few of them.
BOTS, CONCURRENCY = 6, 2
#: Seconds within which the pool must be up, and calls of the client must be answered.
UP_WITHIN, PATIENCE = 180.0, 120.0
#: Calls in one request.
BATCH = 1000


@dataclass
class TaskPool:
    """All parts of one run; `task_pool` makes one. bots: the agents, which are started again whenever they are dead."""

    directory: Path
    server: DatabaseServer
    bots: Sequence[Member]
    keeper: Keeper
    invariants: Invariants
    caller: Pool
    #: What the calls of `submit` have to do, by job.
    calls: dict[str, Call] = field(default_factory=dict)
    #: When all of a bot was stopped.
    stops: list[Stop] = field(default_factory=list)
    #: Whether the directory with all logs is left for somebody to read.
    keep: bool = False

    @property
    def run(self) -> str:
        """The mark of every process of this run."""
        return self.directory.name

    @property
    def execution_log(self) -> Path:
        return self.directory / "execution"

    def database(self) -> Database:
        """Return the pool's database."""
        return Database(self.server.url, DatabaseSettings(), role="chaos", chance=random.Random(0))

    def effects(self) -> psycopg.Connection[Any]:
        """Return a connection to the database of the effects, in autocommit mode."""
        return psycopg.connect(_effects_url(self.server), autocommit=True)

    def submit(self, calls: Sequence[Call]) -> None:
        """Submit these calls, each in one job."""
        for place in range(0, len(calls), BATCH):
            part = calls[place : place + BATCH]
            requests = [
                (app.pay_beside if call.beside else app.pay).request(list(call.cents), call.pause) for call in part
            ]
            for call, taken in zip(part, self.caller.client.submit(requests), strict=True):
                self.calls[taken.id] = call

    def results(self) -> dict[str, Any]:
        """Return what each call has returned, or its TaskFailed. All have ended."""
        jobs = [TaskJob(job, True, task=app.pay) for job in self.calls]
        values = self.caller.gather(jobs, timeout=PATIENCE, return_errors=True)
        return dict(zip(self.calls, values, strict=True))

    def unfinished(self) -> int:
        """Return how many jobs are not final."""
        with self.server.connect() as connection:
            row = connection.execute("SELECT count(*) FROM leasehold.jobs WHERE finished_at IS NULL").fetchone()
        assert row is not None
        return int(row[0])

    def leave(self) -> None:
        """End the bots politely."""
        self.keeper.keep_away(self.bots)
        for bot in self.bots:
            bot.leave()


def _effects_url(server: DatabaseServer) -> str:
    return libpq_url(make_url(server.url).set(database="effects").render_as_string(hide_password=False))


def _prepare(server: DatabaseServer, directory: Path) -> None:
    """Make both databases, and the tokens."""
    database = Database(server.url, DatabaseSettings(), role="chaos", chance=random.Random(0))
    try:
        upgrade(database)
        for kind, bot in ((tokens.Kind.OPERATOR, None), (tokens.Kind.BOT, "*")):
            token = database.run(partial(tokens.create, kind=kind, bot=bot))
            path = directory / f"{kind}.token"
            path.touch(mode=0o600)
            path.write_text(token + "\n")
    finally:
        database.close()
    with server.connect() as connection:
        connection.execute("CREATE DATABASE effects")
    with psycopg.connect(_effects_url(server), autocommit=True) as connection:
        for statement in app.TABLES:
            connection.execute(statement.encode())


def _members(directory: Path, server: DatabaseServer, *, port: int, bots: int, fenced: bool) -> list[Member]:
    times = "".join(f"{name} = {value!r}\n" for name, value in FAST.model_dump().items())
    allowed = ["PATH", *app.VARIABLES]
    (config := directory / "leasehold.toml").write_text(
        f"[timing]\n{times}\n[gateway]\nhost = '127.0.0.1'\nport = {port}\n\n"
        "[fetch]\nretry_base = 0.1\nretry_cap = 1.0\n\n"
        f"[bot]\nkill_grace = 0.5\nmargin = {FAST_MARGIN}\nenv_allow = {allowed!r}\n\n"
        "[[assigners]]\nthreads = 2\ninterval = 0.2\njitter = 0.1\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD_")}
    common = {
        **kept,
        "LEASEHOLD_BOT_WORK_DIR": str(directory / "work"),
        "LEASEHOLD_PARENT": "stdin",
        "LEASEHOLD_DATABASE_URL": server.url,
    }
    of_bots = {
        execution.RUN_VARIABLE: directory.name,
        execution.LOG_VARIABLE: str(directory / "execution"),
        app.URL_VARIABLE: _effects_url(server),
        **({} if fenced else {app.UNFENCED_VARIABLE: "1"}),
    }

    def member(name: str, role: Role, *arguments: str) -> Member:
        (data := directory / name).mkdir()
        started = ["--data", str(data), "--config", str(config), *arguments]
        own = {**of_bots, app.BOT_VARIABLE: name} if role is Role.BOT else {}
        return Member(name, role, started, {**common, **own}, directory / f"{name}.log")

    place = f"{app.__name__}:pool"
    serve = ["--url", f"http://127.0.0.1:{port}", "--token-file", str(directory / "bot.token")]
    serve += ["--app", place, "--concurrency", str(CONCURRENCY)]
    names = [f"bot-{number}" for number in range(1, bots + 1)]
    return [
        member("gateway", Role.GATEWAY, "gateway"),
        member("assigner", Role.ASSIGNER, "assign", "--name", "assigner"),
        *(member(name, Role.BOT, "bot", "--name", name, *serve) for name in names),
    ]


def _wait_until_up(server: DatabaseServer, bots: int, directory: Path) -> None:
    """Wait until all bots have a session. Raises LeaseholdError."""
    deadline = clock.monotonic() + UP_WITHIN
    with server.connect() as connection:
        while connection.execute("SELECT count(*) FROM leasehold.bots WHERE status = 'ok'").fetchone() != (bots,):
            if clock.monotonic() > deadline:
                raise LeaseholdError(f"the pool does not come up; see {directory}")
            clock.sleep(0.05)


@contextmanager
def task_pool(*, bots: int = BOTS, fenced: bool = True) -> Iterator[TaskPool]:
    """Run a pool inside the block. Afterwards no process of it is left.

    fenced: False lets the tasks write their effects without a check of the fence, which shows what the check is worth.
    The directory with all logs is deleted unless somebody sets `keep`, or an error ends the block.
    """
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    directory = Path(tempfile.mkdtemp(prefix="leasehold-chaos-tasks-", dir=MEMORY if roomy else None))
    directory.chmod(0o711)
    with ExitStack() as stack:
        server = DatabaseServer(directory / "server")
        stack.callback(server.close)
        _prepare(server, directory)
        execution.make_log(directory / "execution")
        port = stack.enter_context(reserved_port(0, "port"))
        members = _members(directory, server, port=port, bots=bots, fenced=fenced)
        stack.callback(execution.kill_all, directory.name)
        keeper = Keeper(members)
        stack.callback(keeper.close)
        keeper.start()
        _wait_until_up(server, bots, directory)
        token = (directory / "operator.token").read_text().strip()
        caller = Pool(f"http://127.0.0.1:{port}", token, patience=PATIENCE, chance=random.Random(0))
        invariants = stack.enter_context(Invariants(server))
        pool = TaskPool(directory, server, members[2:], keeper, invariants, caller)
        yield pool
    if not pool.keep:
        shutil.rmtree(directory, ignore_errors=True)
