"""Measure how fast a pool serves agents that all come at the same moment.

One gateway and one assigner run beside processes with many real agents, whose commands are simulated. A few residents
work all the time. Then the others start together; the gateway is killed and started again at once; and it is killed
and stays away until every session has expired. Each time all agents shall have a session again, and finish a job that
they were given after that moment. All share the cores of this machine.

    python -m ops.bench.gateway.herd [--agents 300] [--residents 30] [--json]
"""

import json
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import click
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from assigner.process.children import Child, Children, Role
from ops.bench.fixtures import Shape, opened, properties, submit
from ops.bench.gateway.latency import ready
from ops.bench.gateway.simulated_agents import OPEN, SYNC, AgentGroup, AgentProcesses, Noted, agent_processes
from ops.bench.gateway.throughput import scratch
from ops.bench.measure import blank_table, checked, cpu_seconds, cpu_seconds_of_tree, percentiles
from schema import clock
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.tenancy import tokens

#: Seconds after which agents without a session or a finished job fail the benchmark.
GIVE_UP = 180.0
#: Seconds between two looks at the notes of the agents.
LOOK = 0.5
#: Seconds of work as usual before each return.
AS_USUAL = 5.0
#: Seconds for which the gateway is away beyond the life of a session.
LONGER = 5.0
#: Jobs for each agent: enough for the whole run, as no job takes less than a second.
JOBS = 300


@dataclass(frozen=True)
class Return:
    """How a pool served agents that came at one moment. Times are seconds after it.

    sessions: until half of them and all of them had a session. finished: until all had finished a job that they were
    given after it. refused: calls answered 503. alive, slowest_ms: agents that kept their session, and the longest
    that one of their syncs took with all its repetitions. lost: sessions that ended though their agents called in time.
    """

    what: str
    agents: int
    half_have_sessions: float
    all_have_sessions: float
    all_have_finished: float
    opens: int
    refused_opens: int
    refused_syncs: int
    alive: int
    slowest_ms: float
    lost: int
    gateway_cpu: float
    postgres_cpu: float
    agents_cpu: float
    load: float


class Herd:
    """A pool, its agents, and a gateway that can be killed."""

    def __init__(self, data: Path, *, ttl: float, stack: ExitStack) -> None:
        server = stack.enter_context(embedded.serve(data))
        self.database: Database = stack.enter_context(opened(server.url))
        self._data, self._server, self._stack = data, server.pid, stack
        self.processes: list[AgentProcesses] = []
        migrate.upgrade(self.database)
        self.token = self.database.run(lambda connection: tokens.create(connection, tokens.Kind.BOT, bot="*"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": server.url, "LEASEHOLD_TIMING_TTL": str(ttl)}
        self._environ = environ
        defaults = data / "leasehold.toml"
        defaults.touch()
        self._program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data), "--config", str(defaults))
        assigner = self._children(Child(name="assigner", role=Role.ASSIGNER, command=(*self._program, "assign")))
        stack.callback(assigner.kill)
        self._gateway = self._started(0)
        stack.callback(lambda: self._gateway.kill())
        self.url = ready(self._gateway, data / "gateway.url", self.database)

    def _children(self, child: Child) -> Children:
        children = Children(
            self._data / "log", self._environ, report=lambda _: None, chance=random.Random(1), restart=False
        )
        children.start(child)
        return children

    def _started(self, port: int) -> Children:
        environment = {"LEASEHOLD_GATEWAY_PORT": str(port)}
        command = (*self._program, "gateway")
        return self._children(Child(name="gateway", role=Role.GATEWAY, command=command, environment=environment))

    def kill_gateway(self) -> None:
        """Kill the gateway at once."""
        self._gateway.kill()

    def start_gateway(self) -> None:
        """Start a gateway at the same address, and wait until it answers."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or 0
        self._gateway = self._started(port)
        give_up = clock.monotonic() + GIVE_UP
        while clock.monotonic() < give_up:
            self._gateway.check()
            with suppress(OSError), socket.create_connection((host, port), timeout=GIVE_UP) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n")
                if connection.recv(100).startswith(b"HTTP/1.1 200"):
                    return
            clock.sleep(0.02)
        raise LeaseholdError("the gateway does not answer")

    def cpu(self) -> tuple[float, float, float]:
        """Return the processor time, in seconds, of the gateway, of PostgreSQL and of the agents."""
        gateway = sum(cpu_seconds(pid) for pid in self._gateway.processes().values())
        agents = sum(cpu_seconds(pid) for each in self.processes for pid in each.pids)
        return gateway, cpu_seconds_of_tree(self._server), agents

    def notes(self) -> list[Noted]:
        """Return what all agents have noted since the last time."""
        return [note for each in self.processes for note in each.notes()]


def first(notes: Sequence[Noted], moment: float, *, which: Callable[[Noted], bool]) -> dict[str, float]:
    """Return, by bot, the seconds from the moment until its first answered request that is such."""
    found: dict[str, float] = {}
    for note in notes:
        if note.outcome == "ok" and note.ended >= moment and which(note):
            found[note.bot] = min(found.get(note.bot, note.ended - moment), note.ended - moment)
    return found


def slowest(notes: Sequence[Noted], moment: float, alive: set[str]) -> float:
    """Return the longest that a sync of such a bot took, in seconds, from its first request after the moment."""
    began: dict[tuple[str, tuple[int, int]], float] = {}
    worst = 0.0
    for note in sorted(notes, key=lambda each: each.began):
        if note.path == SYNC and not note.held and note.bot in alive and note.ended >= moment:
            since = began.setdefault((note.bot, note.call), max(note.began, moment))
            if note.outcome == "ok":
                worst = max(worst, note.ended - since)
    return worst


def measure(herd: Herd, what: str, come: Callable[[], None], *, bots: set[str], keep: set[str]) -> Return:
    """Let agents come, and measure until all of `bots` have finished a job. `keep`: those that had a session."""
    clock.sleep(AS_USUAL)
    notes: list[Noted] = []
    herd.notes()
    come()
    moment, before = clock.monotonic(), herd.cpu()
    sessions: dict[str, float] = {}
    finished: dict[str, float] = {}
    while not bots <= finished.keys():
        if clock.monotonic() > moment + GIVE_UP:
            raise LeaseholdError(
                f"{what}: after {GIVE_UP:g} s {len(bots - sessions.keys())} agents have no session, and "
                f"{len(bots - finished.keys())} have finished no job; {dict(_outcomes(notes))}"
            )
        clock.sleep(LOOK)
        notes += herd.notes()
        sessions = first(notes, moment, which=lambda _: True)
        finished = first(notes, moment, which=lambda note: note.done is not None and note.done >= moment)
    after, load = herd.cpu(), os.getloadavg()[0]
    reopened = {note.bot for note in notes if note.path == OPEN and note.outcome == "ok"}
    alive = sessions.keys() - reopened
    refused = [note for note in notes if note.outcome == "refused"]
    gateway, postgres, agents = (round(there - here, 1) for here, there in zip(before, after, strict=True))
    return Return(
        what=what,
        agents=len(bots),
        half_have_sessions=round(percentiles([sessions[bot] for bot in bots], (50,))["p50"] / 1000, 2),
        all_have_sessions=round(max(sessions[bot] for bot in bots), 2),
        all_have_finished=round(max(finished[bot] for bot in bots), 2),
        opens=sum(note.path == OPEN and note.outcome == "ok" for note in notes),
        refused_opens=sum(note.path == OPEN for note in refused),
        refused_syncs=sum(note.path == SYNC for note in refused),
        alive=len(alive),
        slowest_ms=round(slowest(notes, moment, alive) * 1000, 1),
        lost=len(reopened & keep),
        gateway_cpu=gateway,
        postgres_cpu=postgres,
        agents_cpu=agents,
        load=round(load, 1),
    )


def _outcomes(notes: Sequence[Noted]) -> Iterator[tuple[str, int]]:
    for outcome in sorted({note.outcome for note in notes}):
        yield outcome, sum(note.outcome == outcome for note in notes)


@contextmanager
def herd(data: Path, agents: int, residents: int, *, seconds: float, ttl: float, processes: int) -> Iterator[Herd]:
    """Start a pool with residents at work, and agents that have not started."""
    with ExitStack() as stack:
        pool = Herd(data, ttl=ttl, stack=stack)
        submit(pool.database, Shape(), JOBS * (agents + residents))
        make = partial(_groups, pool, data / "work", seconds)
        pool.processes.append(stack.enter_context(agent_processes(make("resident", residents, 1))))
        pool.processes.append(stack.enter_context(agent_processes(make("agent", agents, processes))))
        yield pool


def _groups(pool: Herd, work: Path, seconds: float, prefix: str, agents: int, processes: int) -> list[AgentGroup]:
    names = [f"{prefix}-{number}" for number in range(agents)]
    return [
        AgentGroup(pool.url, pool.token, names[part::processes], dict(properties(0)), seconds, work, seed=part)
        for part in range(min(processes, agents))
    ]


def run(agents: int, residents: int, *, seconds: float, ttl: float, processes: int) -> list[Return]:
    """Measure the three returns on a fresh pool."""
    new = {f"agent-{number}" for number in range(agents)}
    old = {f"resident-{number}" for number in range(residents)}
    with scratch() as data, herd(data, agents, residents, seconds=seconds, ttl=ttl, processes=processes) as pool:
        residents_, agents_ = pool.processes
        residents_.start()

        def away(longer: float) -> None:
            pool.kill_gateway()
            clock.sleep(longer)
            pool.start_gateway()

        found = [
            measure(pool, "all start", agents_.start, bots=new, keep=old),
            measure(pool, "gateway killed", partial(away, 0.0), bots=new | old, keep=new | old),
            measure(pool, "gateway away", partial(away, ttl + LONGER), bots=new | old, keep=set()),
        ]
        clock.sleep(AS_USUAL)
        pool.kill_gateway()
        checked(pool.database)
        return found


def table(found: Sequence[Return]) -> Table:
    """Show the returns, one in each column."""
    rows = [asdict(each) for each in found]
    shown = blank_table("Agents that come at once", "", *(row.pop("what") for row in rows))
    for name in rows[0]:
        shown.add_row(name.replace("_", " "), *(f"{row[name]:g}" for row in rows))
    return shown


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--agents", type=click.IntRange(1, 2000), default=300, show_default=True, help="Agents that come.")
@click.option(
    "--residents", type=click.IntRange(1, 500), default=30, show_default=True, help="Agents that are there before."
)
@click.option(
    "--job-seconds",
    type=click.FloatRange(1, 600),
    default=5.0,
    show_default=True,
    help="Average run time of a job.",
)
@click.option("--ttl", type=click.FloatRange(15, 600), default=30.0, show_default=True, help="Life of a session.")
@click.option("--processes", type=click.IntRange(1, 16), default=2, show_default=True, help="Processes of the agents.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(agents: int, residents: int, job_seconds: float, ttl: float, processes: int, *, as_json: bool) -> None:
    try:
        found = run(agents, residents, seconds=job_seconds, ttl=ttl, processes=processes)
    except LeaseholdError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
    else:
        Console().print(table(found))


if __name__ == "__main__":
    main()
