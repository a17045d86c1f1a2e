"""The pool on the replicated database: a gateway, assigners, bots and callers, which stay alive through every fault."""

import itertools
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from leasehold.client import Client

from ops.chaos import checker, execution, journal
from ops.chaos.checker import Kind, Violation
from ops.chaos.journal import Journal
from ops.chaos.load import PATIENCE, TIMEOUT, Caller, Room, Work
from ops.chaos.members import ROOT, Keeper, Role
from ops.chaos.members import Member as Process
from ops.chaos.versions import search_path
from ops.chaos.watch import Progress
from ops.ha.cluster import Cluster, Member, wait_for
from ops.ha.machines import SWITCH
from schema import clock
from schema.diagnostics import invariants
from schema.postgres import migrate
from schema.postgres.engine import Database, DatabaseSettings
from schema.tenancy import tokens
from schema.timing import Timing

#: Ports of the gateway at the switch, and of one on the machine of a member.
PORT, INSIDE_PORT = 7411, 7412
#: The caller that never waits for the pool to have fewer jobs.
STEADY = "steady"
#: Seconds within which all jobs must have ended after the last fault.
DONE_WITHIN = 600.0


@dataclass(frozen=True)
class Shape:
    """How much works on the database. `backlog`: how many unfinished jobs callers keep in the pool."""

    assigners: int = 2
    bots: int = 3
    capacity: int = 4
    callers: int = 3
    backlog: int = 200


class Steady(Room):
    """Always has room, and no more often than twice a second: by its caller an outage of submits is measured."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize)
        self._next = 0.0

    def free(self) -> bool:
        if clock.monotonic() < self._next:
            return False
        self._next = clock.monotonic() + 0.5
        return True


class Pool:
    """The pool of one run, with the journal and the execution log, which lie outside of it."""

    def __init__(self, cluster: Cluster, directory: Path, chance: random.Random, *, timing: Timing) -> None:
        self.cluster, self.directory, self.chance, self.timing = cluster, directory, chance, timing
        self.run = directory.name
        self.journal = Journal(directory / "journal")
        self.execution_log = directory / "execution"
        execution.make_log(self.execution_log)
        self.processes: list[Process] = []
        self.callers: list[Caller] = []
        self._config = directory / "leasehold.toml"
        self._token = directory / "operator.token"
        self._settings = DatabaseSettings(pool=2, reserve=1, outage_seconds=120.0, lock_timeout=30.0)

    def build(self, shape: Shape) -> Room:
        """Migrate the database and describe every process; nothing runs yet."""
        times = "".join(f"{name} = {value!r}\n" for name, value in self.timing.model_dump().items())
        self._config.write_text(f"[timing]\n{times}\n[gateway]\nhost = '{SWITCH}'\nport = {PORT}\ninsecure = true\n")
        with self._database() as database:
            migrate.upgrade(database)
            for kind, bot in ((tokens.Kind.OPERATOR, None), (tokens.Kind.BOT, "*")):
                token = database.run(partial(tokens.create, kind=kind, bot=bot))
                path = self.directory / f"{kind}.token"
                path.touch(mode=0o600)
                path.write_text(token + "\n")
        self._process("gateway", Role.GATEWAY, "gateway")
        for number in range(1, shape.assigners + 1):
            self._process(f"assigner-{number}", Role.ASSIGNER, "assign", "--name", f"assigner-{number}")
        address = ["--url", self.url, "--token-file", str(self.directory / "bot.token"), "--insecure"]
        for number in range(1, shape.bots + 1):
            name = f"bot-{number}"
            self._process(name, Role.BOT, "bot", "--name", name, "--capacity", str(shape.capacity), *address)
        room, work = Room(shape.backlog), Work(self.execution_log, self.run)
        for number in range(1, shape.callers + 1):
            chance = random.Random(self.chance.getrandbits(64))
            client = Client(
                self.url, self._token.read_text().strip(), chance=chance, timeout=TIMEOUT, patience=PATIENCE
            )
            self.callers.append(Caller(f"caller-{number}", client, self.journal, work, chance, room=room))
        self.callers.append(Caller(STEADY, client, self.journal, work, chance, room=Steady()))
        return room

    @property
    def url(self) -> str:
        """The address of the gateway."""
        return f"http://{SWITCH}:{PORT}"

    def wait_acknowledged(self, after: float) -> None:
        """Wait until the steady caller was answered after this moment."""
        wait_for(lambda: self.callers[-1].answered_at > after, "an answer to a caller")

    def acknowledged_by(self, caller: str) -> int:
        """Return how many submits of one caller were acknowledged."""
        found = journal.read(self.journal.path).acknowledged
        return sum(each.key.startswith(f"{caller}-") for each in found)

    def counts(self) -> dict[str, int]:
        """Return how much was done."""
        submits, log = journal.read(self.journal.path), execution.read(self.execution_log)
        return {
            "keys sent": len(submits.asked),
            "submits acknowledged": len({each.key for each in submits.acknowledged}),
            "attempts": sum(line.what == "start" for line in log),
            "attempts that came to their end": sum(line.what == "end" for line in log),
        }

    def broken_invariants(self) -> list[Violation]:
        """Run `leasehold db verify` on the primary."""
        with self._database() as database:
            return [
                Violation(Kind.INVARIANT, f"{each.id} {each.title}: {each.rows}", clock.monotonic())
                for each in invariants.verify(database)
                if each.rows
            ]

    @contextmanager
    def inside(self, member: Member) -> Iterator[str]:
        """Run a gateway and a caller on the machine of a member, on its own server; gives the caller's name."""
        name = f"inside-{member.name}"
        environment = self._environment(name) | {
            "LEASEHOLD_DATABASE_URL": self.cluster.url_of(member),
            "LEASEHOLD_GATEWAY_HOST": member.machine.address,
            "LEASEHOLD_GATEWAY_PORT": str(INSIDE_PORT),
            "PYTHONPATH": search_path(ROOT),
        }
        serve = [sys.executable, "-m", "assigner.cli.main", "--data", str(self.directory / name)]
        url = f"http://{member.machine.address}:{INSIDE_PORT}"
        call = [sys.executable, "-m", "ops.ha.pool", name, url, str(self.directory)]
        with (self.directory / f"{name}.log").open("ab") as log, ExitStack() as stack:
            for command in ([*serve, "--config", str(self._config), "gateway"], call):
                child = member.machine.run(
                    ["env", "-C", str(ROOT), *command], environment=environment, output=log, account=None
                )
                stack.callback(member.machine.end, child)
            wait_for(lambda: self.acknowledged_by(name), f"an answer to {name}")
            yield name

    def finish(self) -> list[Violation]:
        """Stop the callers, wait for the end of all jobs, and check everything."""
        for caller in self.callers:
            caller.stop()
        stuck = [
            Violation(Kind.STUCK, f"caller {n} has no answer") for n, c in enumerate(self.callers) if not c.join(120.0)
        ]
        with self._database() as database:
            give_up = clock.monotonic() + DONE_WITHIN
            while (left := checker.unfinished(checker.stored(database))) and clock.monotonic() < give_up:
                clock.sleep(1.0)
            stuck += [Violation(Kind.STUCK, f"job {row.job} is still {row.state}") for row in left]
            log = execution.read(self.execution_log)
            found = checker.check(journal.read(self.journal.path), log, checker.stored(database))
        return [*stuck, *found, *self.broken_invariants()]

    @contextmanager
    def _database(self) -> Iterator[Database]:
        database = Database(self.cluster.url, self._settings, role="ha", chance=random.Random(0))
        try:
            yield database
        finally:
            database.close()

    def _environment(self, name: str) -> dict[str, str]:
        (self.directory / name).mkdir(exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD_")}
        return {**kept, "LEASEHOLD_BOT_WORK_DIR": str(self.directory / "work")}

    def _process(self, name: str, role: Role, *arguments: str) -> None:
        environment = self._environment(name) | {"LEASEHOLD_PARENT": "stdin"}
        if role is not Role.BOT:
            environment["LEASEHOLD_DATABASE_URL"] = self.cluster.url
        started = ["--data", str(self.directory / name), "--config", str(self._config), *arguments]
        self.processes.append(Process(name, role, started, environment, self.directory / f"{name}.log"))


@contextmanager
def running(cluster: Cluster, chance: random.Random, *, shape: Shape, timing: Timing) -> Iterator[Pool]:
    """Run a pool under load on the cluster inside the block."""
    directory = cluster.directory / "pool"
    directory.mkdir(mode=0o711)
    with ExitStack() as stack:
        pool = Pool(cluster, directory, chance, timing=timing)
        stack.callback(pool.journal.close)
        room = pool.build(shape)
        keeper = Keeper(pool.processes)
        keeper.start()
        stack.callback(keeper.close)
        stack.enter_context(Progress(cluster.connect, room))
        for caller in pool.callers:
            stack.callback(caller.abandon)
            caller.start()
        pool.wait_acknowledged(0.0)
        yield pool


def longest_wait(path: Path, began: float, ended: float) -> float:
    """Return the longest time in this span, in seconds, in which no submit of the steady caller was acknowledged.

    path: the journal. The other callers stop by themselves while too many jobs wait.
    """
    found = journal.read(path).acknowledged
    at = [each.at for each in found if began <= each.at <= ended and each.key.startswith(f"{STEADY}-")]
    return max(later - earlier for earlier, later in itertools.pairwise([began, *sorted(at), ended]))


@click.command()
@click.argument("name")
@click.argument("url")
@click.argument("directory", type=click.Path(path_type=Path))
def call(name: str, url: str, directory: Path) -> None:
    """Submit jobs under NAME to the gateway URL until killed; DIRECTORY holds journal and token."""
    chance = random.Random(name)
    client = Client(
        url, (directory / "operator.token").read_text().strip(), chance=chance, timeout=TIMEOUT, patience=PATIENCE
    )
    work = Work(directory / "execution", directory.name)
    caller = Caller(name, client, Journal(directory / "journal"), work, chance, room=Room(sys.maxsize))
    caller.start()
    caller.join(float(sys.maxsize // 10**10))


if __name__ == "__main__":
    call()
