"""Kill runs of a graph that fails and goes on: `python -m ops.chaos.tasks.graphs --seed 1`. The README explains it."""

import random
import signal
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import click
from leasehold.graphs import SubmittedGraph

from ops.chaos.tasks import app
from ops.chaos.tasks.killers import KINDS, Killers
from ops.chaos.tasks.pool import BOTS, TaskPool, task_pool
from schema import clock
from schema.diagnostics import invariants

#: The most earlier nodes that a node depends on, and among how many before it these are drawn.
PARENTS, NEAR = 3, 40
#: Every tenth node fails, on average; how often a failing node fails; the seconds that a node works.
FAILING, FAILURES, PAUSE = 10, (1, 4), (0.0, 0.3)
#: Seconds within which the graph must come to a standstill.
STILL_WITHIN = 600.0
#: The jobs of each node, in their order, with the attempts that have begun in each.
JOBS = """
SELECT CAST(m.value AS integer) AS node, j.state::text AS state,
    (SELECT count(*) FROM leasehold.leases l WHERE l.job_id = j.id AND l.granted_at > s.finished_at) AS late
FROM leasehold.jobs j JOIN leasehold.job_metadata m ON m.job_id = j.id AND m.key = 'node'
LEFT JOIN LATERAL (
    SELECT min(o.finished_at) AS finished_at FROM leasehold.jobs o JOIN leasehold.job_metadata n ON n.job_id = o.id
    WHERE n.key = 'node' AND n.value = m.value AND o.state = 'succeeded') s ON true
ORDER BY j.id"""


@dataclass
class Report:
    """What a run has found: how often the graph went on, the nodes that failed, the jobs, and what is wrong."""

    seed: int
    rounds: int = 0
    failed: int = 0
    jobs: int = 0
    hits: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self, nodes: int) -> str:
        """Return the one line that tells of the run."""
        return (
            f"{nodes} nodes, {self.jobs} jobs, gone on {self.rounds} times after {self.failed} failed nodes, "
            f"{self.hits} kills and stops, {len(self.wrong)} wrong; {self.seconds:.0f} s; seed {self.seed}"
        )


def submitted(pool: TaskPool, chance: random.Random, *, nodes: int, rounds: int) -> SubmittedGraph:
    """Submit a graph. One of its nodes fails `rounds` times, and some others fail fewer times."""
    graph = pool.caller.graph("stumbling")
    made: list[Any] = []
    for number in range(nodes):
        failures = rounds if number == nodes // 2 else 0
        if chance.randrange(FAILING) == 0:
            failures = max(failures, min(rounds, chance.randint(*FAILURES)))
        task = app.stumble.using(metadata={"node": str(number)}, max_lost=10)
        near = made[-NEAR:]
        parents = chance.sample(near, min(len(near), chance.randint(0, PARENTS)))
        made.append(graph.add(task, number, failures, chance.uniform(*PAUSE), after=parents))
    return graph.submit()


def run(pool: TaskPool, *, nodes: int, rounds: int, killers: int, seed: int) -> Report:
    """Let a graph fail and go on under kills until all its nodes have succeeded, and check everything."""
    report, chance = Report(seed), random.Random(seed)
    began = clock.monotonic()
    graph = submitted(pool, chance, nodes=nodes, rounds=rounds)
    killing = Killers(pool, clients=killers, seed=seed)
    killing.start()
    try:
        while not (state := graph.wait(STILL_WITHIN)).all_succeeded:
            report.rounds += 1
            report.failed += state.failed + state.dead + state.cancelled
            graph.retry()
    finally:
        killing.leave_off()
        report.seconds = clock.monotonic() - began
    pool.leave()
    report.hits = sum(killing.counts[kind] for kind in KINDS)
    if report.rounds < rounds:
        report.wrong.append(f"the graph went on {report.rounds} times, and one node fails {rounds} times")
    check(pool, report, nodes)
    return report


def check(pool: TaskPool, report: Report, nodes: int) -> None:
    """Find nodes that have not succeeded once, or have run after that, and what violates an invariant."""
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    with pool.server.connect() as connection:
        for node, state, late in connection.execute(JOBS).fetchall():
            found[node].append((state, late))
    report.jobs = sum(map(len, found.values()))
    for node in range(nodes):
        states = [state for state, _ in found[node]]
        if states.count("succeeded") != 1 or states[-1] != "succeeded":
            report.wrong.append(f"the jobs of node {node} are {', '.join(states) or 'absent'}")
        if late := sum(late for _, late in found[node]):
            report.wrong.append(f"node {node} has begun {late} times after it had succeeded")
    database = pool.database()
    try:
        report.wrong += [f"{each.id} {each.title}: {each.rows}" for each in invariants.verify(database) if each.rows]
    finally:
        database.close()
    report.wrong += map(str, pool.invariants.violations)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", type=click.IntRange(1, 10_000), default=500, show_default=True, help="Nodes of the graph.")
@click.option("--rounds", type=click.IntRange(0, 100), default=10, show_default=True, help="How often it goes on.")
@click.option("--killers", type=click.IntRange(0, 100), default=4, show_default=True, help="Killing clients.")
@click.option("--bots", type=click.IntRange(1, 100), default=BOTS, show_default=True, help="Bots.")
@click.option("--seed", type=int, help="Seed of all chance [default: drawn].")
def main(nodes: int, rounds: int, killers: int, bots: int, seed: int | None) -> None:
    """Kill processes at random while a graph fails and goes on, and check that each node has succeeded once.

    Exits with 1 if anything is wrong.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with task_pool(bots=bots) as pool:
        report = run(pool, nodes=nodes, rounds=rounds, killers=killers, seed=seed)
        pool.keep = bool(report.wrong)
    for each in report.wrong[:20]:
        click.echo(each)
    if report.wrong:
        click.echo(f"logs: {pool.directory}", err=True)
    click.echo(report.line(nodes))
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
