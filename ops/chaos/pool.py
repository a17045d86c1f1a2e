"""The pool under test: PostgreSQL, gateways, assigners, bots and callers, with a proxy between any two of them."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from leasehold.client import Client
from leasehold.errors import LeaseholdError
from sqlalchemy import URL

from assigner.process.local_pool import reserved_port
from ops.chaos import execution, versions
from ops.chaos.journal import Journal
from ops.chaos.load import PATIENCE, TIMEOUT, Caller, Room, Work
from ops.chaos.members import ROOT, Birth, Keeper, Member, Role
from ops.chaos.proxy import Link, Proxy, Target
from ops.chaos.server import DatabaseServer
from ops.chaos.versions import NoVersionBefore, Version
from ops.chaos.watch import Invariants, Progress, Survivors
from schema import clock
from schema.postgres.engine import Database, DatabaseSettings
from schema.tenancy import tokens
from schema.timing import Timing

#: Times that let thousands of faults fit into an hour: between a sixth and a tenth of the production's.
FAST = Timing(sync=0.5, ttl=5.0, reap=0.2, ack=2.0, poll=0.1)
#: Seconds before the end of a session at which a bot kills its commands. A machine that is busy with faults may let a
#: process wait for half a second, which the default, a tenth of so short a session, would not cover.
FAST_MARGIN = 1.5
#: Where data go that need no disk.
MEMORY = Path("/dev/shm")
#: Seconds within which the pool must be up.
UP_WITHIN = 300.0


@dataclass(frozen=True)
class Shape:
    """How many of each process there are. `backlog`: how many unfinished jobs callers keep in the pool."""

    gateways: int = 2
    assigners: int = 2
    bots: int = 4
    capacity: int = 4
    callers: int = 3
    backlog: int = 60


class ChaosPool:
    """All parts of one run. `chaos_pool` makes one.

    links: every proxy by name: `bot-1`, … in front of the gateways, `callers`, and `database-gateway-1`, …
    """

    def __init__(self, directory: Path, server: DatabaseServer, chance: random.Random, *, timing: Timing) -> None:
        self.directory, self.server, self.chance, self.timing = directory, server, chance, timing
        self.run = directory.name
        self.proxy = Proxy(chance)
        self.links: dict[str, Link] = {}
        self.members: list[Member] = []
        self.callers: list[Caller] = []
        self.room = Room(0)
        self.journal = Journal(directory / "journal")
        self.execution_log = directory / "execution"
        execution.make_log(self.execution_log)
        #: Whether the directory is left for somebody to read, and whether the run came to its end.
        self.keep = self.done = False
        #: The version before this one, or why there is none.
        self.before: Version | None = None
        self.why_no_version = "no version before this one was asked for"
        self.keeper = Keeper(self.members)
        self._config = directory / "leasehold.toml"
        self.progress = Progress(server.connect, self.room)
        self.invariants = Invariants(server)
        self.survivors = Survivors(server, self.run, patience=timing.ttl + 10.0)

    def of(self, role: Role) -> list[Member]:
        """Return the members with this role."""
        return [member for member in self.members if member.role is role]

    def database(self) -> Database:
        """Return the pool's database past every proxy."""
        return Database(self.server.url, DatabaseSettings(), role="chaos", chance=random.Random(0))

    def upgrade(self, tree: Path) -> None:
        """Run `leasehold db upgrade` of a tree. Raises CalledProcessError."""
        environment = {
            **os.environ,
            "PYTHONPATH": versions.search_path(tree),
            "LEASEHOLD_DATABASE_URL": self.server.url,
        }
        command = [sys.executable, "-m", "assigner.cli.main", "--config", os.devnull, "db", "upgrade"]
        subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)

    def find_version_before(self) -> None:
        """Extract the version before this one, if there is one."""
        try:
            name = versions.name_before(ROOT)
            self.before = versions.extract(ROOT, name, self.directory / f"version-{name}")
        except NoVersionBefore as error:
            self.why_no_version = str(error)

    def build(self, shape: Shape, *, ports: Sequence[Target], tree: Path) -> None:
        """Migrate the database and describe every process; nothing runs yet.

        ports: where the gateways listen. tree: the version that all start in.
        """
        self._tree = tree
        self._write_config()
        self.upgrade(tree)
        database = self.database()
        for kind, bot in ((tokens.Kind.OPERATOR, None), (tokens.Kind.BOT, "*")):
            token = database.run(partial(tokens.create, kind=kind, bot=bot))
            path = self.directory / f"{kind}.token"
            path.touch(mode=0o600)
            path.write_text(token + "\n")
        database.close()
        for number, port in enumerate(ports, 1):
            self._member(f"gateway-{number}", Role.GATEWAY, "gateway", LEASEHOLD_GATEWAY_PORT=str(port))
        for number in range(1, shape.assigners + 1):
            self._member(f"assigner-{number}", Role.ASSIGNER, "assign", "--name", f"assigner-{number}")
        for number in range(1, shape.bots + 1):
            name = f"bot-{number}"
            link = self._link(name, ports)
            arguments = ["--url", f"http://127.0.0.1:{link.port}", "--token-file", str(self.directory / "bot.token")]
            self._member(name, Role.BOT, "bot", "--name", name, "--capacity", str(shape.capacity), *arguments)
        self._build_callers(shape, ports)

    def wait_until_up(self) -> None:
        """Wait until jobs are submitted and finished. Raises LeaseholdError."""
        deadline = clock.monotonic() + UP_WITHIN
        while not (self.progress.finished_at and all(caller.answered_at for caller in self.callers)):
            if clock.monotonic() > deadline:
                raise LeaseholdError(f"the pool does not come up; see {self.directory}")
            clock.sleep(0.05)

    def put(self, name: str, *, older: bool) -> None:
        """Restart a member politely in the version before this one, or in this one."""
        (member,) = [member for member in self.members if member.name == name]
        assert self.before is not None or not older
        member.restart(Birth(self.before.tree if self.before is not None and older else ROOT))

    def in_service(self, bot: str) -> bool:
        """Return whether a bot has an open session and takes work."""
        with self.server.connect() as connection:
            row = connection.execute("SELECT FROM bots WHERE name = %s AND status = 'ok'", [bot]).fetchone()
        return row is not None

    def forget(self) -> None:
        """Delete the directory, unless it is needed to find out what has happened."""
        if self.done and not self.keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def answered_at(self) -> float:
        """When a caller was last answered, on the monotonic clock."""
        return max(caller.answered_at for caller in self.callers)

    def _write_config(self) -> None:
        times = "".join(f"{name} = {value!r}\n" for name, value in self.timing.model_dump().items())
        bot = f"[bot]\nkill_grace = 0.5\nmargin = {FAST_MARGIN}\n" if self.timing.ttl < 2 * FAST.ttl else ""
        assigners = "[[assigners]]\nthreads = 2\ninterval = 0.2\njitter = 0.1\n"
        self._config.write_text(f"[timing]\n{times}\n[gateway]\nhost = '127.0.0.1'\n\n{bot}\n{assigners}")

    def _build_callers(self, shape: Shape, ports: Sequence[Target]) -> None:
        link = self._link("callers", ports)
        work = Work(self.execution_log, self.run)
        self.room = self.progress.room = Room(shape.backlog)
        token = (self.directory / "operator.token").read_text().strip()
        for number in range(1, shape.callers + 1):
            chance = random.Random(self.chance.getrandbits(64))
            client = Client(f"http://127.0.0.1:{link.port}", token, chance=chance, timeout=TIMEOUT, patience=PATIENCE)
            self.callers.append(Caller(f"caller-{number}", client, self.journal, work, chance, room=self.room))

    def _link(self, name: str, targets: Sequence[Target]) -> Link:
        self.links[name] = self.proxy.link(name, lambda: targets)
        return self.links[name]

    def _member(self, name: str, role: Role, *arguments: str, **environment: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD_")}
        data = self.directory / name
        data.mkdir()
        common = {"LEASEHOLD_BOT_WORK_DIR": str(self.directory / "work"), "LEASEHOLD_PARENT": "stdin"}
        if role is not Role.BOT:
            link = self._link(f"database-{name}", [self.server.socket])
            url = URL.create("postgresql", "leasehold", host="127.0.0.1", port=link.port, database="leasehold")
            common["LEASEHOLD_DATABASE_URL"] = url.render_as_string()
        started = ["--data", str(data), "--config", str(self._config), *arguments]
        log = self.directory / f"{name}.log"
        member = Member(name, role, started, {**kept, **common, **environment}, log)
        member.birth = Birth(self._tree)
        self.members.append(member)


@contextmanager
def chaos_pool(
    chance: random.Random, *, shape: Shape, timing: Timing = FAST, start_in_version_before: bool = False
) -> Iterator[ChaosPool]:
    """Run a pool inside the block, under load and watched. Afterwards no process of it is left.

    start_in_version_before: migrate with the version before this one, and start every process in it. Raises
        NoVersionBefore.
    The directory with its logs is deleted unless somebody sets `keep`, or an error ends the block.
    """
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    directory = Path(tempfile.mkdtemp(prefix="leasehold-chaos-", dir=MEMORY if roomy else None))
    directory.chmod(0o711)
    with ExitStack() as stack:
        server = DatabaseServer(directory / "server")
        pool = ChaosPool(directory, server, chance, timing=timing)
        stack.callback(pool.forget)
        stack.callback(server.close)
        stack.callback(pool.proxy.close)
        stack.callback(pool.journal.close)
        pool.find_version_before()
        if start_in_version_before and pool.before is None:
            raise NoVersionBefore(pool.why_no_version)
        ports = [stack.enter_context(reserved_port(0, "port")) for _ in range(shape.gateways)]
        pool.build(shape, ports=ports, tree=pool.before.tree if pool.before and start_in_version_before else ROOT)
        stack.callback(execution.kill_all, pool.run)
        stack.callback(pool.keeper.close)
        pool.keeper.start()
        for watcher in (pool.progress, pool.invariants, pool.survivors):
            stack.enter_context(watcher)
        for caller in pool.callers:
            stack.callback(caller.abandon)
            caller.start()
        pool.wait_until_up()
        yield pool
        pool.done = True
