"""Measure how much of a fleet's GPUs each strategy allocates before what is free fits no job any more.

Nodes and tasks are generated in the shape of a public trace of a GPU cluster (Alibaba's cluster-trace-gpu-v2023, on
which the paper behind `fragmentation` measures): 1,523 nodes with 6,212 GPUs, of kinds that exist there, with their
cores and memory; tasks of which 13 % take no GPU, 38 % a part of one, 48 % one and the others 2 to 8, drawn at random
by the weights of `TASKS`, until they ask for 1.3 times all GPUs. A task never leaves, and one that fits nowhere is
dropped.

The simulation calls the strategies of the pool, as an assigner does, on candidates that it samples itself. Four others
are here for comparison. With `--pool`, the nodes and tasks of the first seed also go through a real pool: bots, jobs
and the cycles of an assigner.

    python -m ops.bench.packing [--seeds 1] [--sample 10] [--strategy pack] [--nodes 200] [--pool] [--json]
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import mean

import click
from rich.console import Console
from rich.table import Table

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.placement.fleet import shuffled
from assigner.placement.registry import StrategySettings, load
from assigner.placement.resources import ResourceSnapshot
from assigner.placement.room import Declared, Demand, Need, Room, RoomCopy, WaitingDemand, after, demand_of, fits
from assigner.placement.strategies.pack import Judge, Score, choose_least
from assigner.placement.strategy import NOTHING_ELSE, Group, Policy, SamplingSettings, Snapshot, Strategy
from bots.protocol import OpenSession
from ops.bench.fixtures import TIMING, empty, opened, server, working
from schema import clock
from schema.diagnostics import invariants
from schema.fleet.candidates import FreeBot
from schema.moves import submit as submit_moves
from schema.moves.grant import Placement
from schema.picking.pick import ReadyJob
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.validation import WHOLE_GPU

#: How many nodes there are of each kind: cores in thousandths, MiB of memory, GPUs.
NODES = (
    (310, 64_000, 262_144, 0),
    (549, 96_000, 393_216, 8),
    (403, 104_000, 524_288, 2),
    (9, 96_000, 393_216, 4),
    (22, 64_000, 262_144, 2),
    (109, 16_000, 122_880, 2),
    (3, 8_000, 61_440, 1),
    (39, 32_000, 131_072, 4),
    (4, 64_000, 262_144, 8),
    (7, 8_000, 32_768, 1),
    (24, 96_000, 786_432, 8),
    (3, 48_000, 376_832, 4),
    (39, 128_000, 786_432, 8),
    (2, 32_000, 131_072, 1),
)
#: The weight of each kind of task: cores in thousandths, MiB of memory, whole GPUs, thousandths of one GPU.
TASKS = (
    (85, 8_000, 30_517, 0, 0), (25, 12_500, 57_344, 0, 0), (15, 20_000, 65_536, 0, 0), (8, 32_000, 49_152, 0, 0),
    (60, 6_000, 12_288, 0, 460), (70, 8_000, 30_517, 0, 470), (50, 11_908, 47_104, 0, 470),
    (30, 4_000, 15_258, 0, 220), (45, 8_000, 30_517, 0, 320), (55, 3_152, 5_600, 0, 810),
    (10, 4_152, 10_600, 0, 590), (10, 4_152, 10_600, 0, 550), (25, 11_908, 47_104, 0, 650),
    (8, 4_000, 15_258, 0, 110), (8, 4_152, 10_600, 0, 270), (7, 4_000, 15_258, 0, 50),
    (70, 12_000, 16_384, 1, 0), (60, 12_000, 24_576, 1, 0), (50, 16_000, 32_768, 1, 0), (110, 3_152, 5_600, 1, 0),
    (20, 18_708, 64_512, 1, 0), (35, 8_000, 16_384, 1, 0), (55, 9_810, 41_560, 1, 0), (45, 11_300, 49_152, 1, 0),
    (35, 4_000, 24_576, 1, 0),
    (2, 16_000, 65_536, 2, 0), (2, 44_000, 163_840, 4, 0), (5, 88_000, 327_680, 8, 0),
)  # fmt: skip
#: Units of each node, of which each task takes one: more than tasks fit on it.
UNITS = 64
#: The demands, as shares of all GPUs, at which the allocated share is reported.
MARKS = (0.9, 1.0, 1.3)
#: Tasks that are placed by one choice where all nodes are candidates; of samples each task has its own.
TOGETHER = 50
#: Of a sample of this size all nodes are candidates.
ALL = 0
#: Tasks that are submitted to the pool at a time.
WAVE = 100


def generated_nodes(count: int | None, chance: random.Random) -> list[Declared]:
    """Return the nodes in random order: all of them, or `count` random ones."""
    nodes = [node[1:] for node in NODES for _ in range(node[0])]
    chance.shuffle(nodes)
    found = list[Declared]()
    for cores, memory, gpus in nodes[:count]:
        amounts = float(cores), float(memory), None, None
        found.append(Declared(amounts, amounts, (WHOLE_GPU,) * gpus))
    return found


def generated_tasks(gpu_milli: int, chance: random.Random) -> list[Need]:
    """Return tasks in random order that together ask for so many thousandths of GPUs."""
    weights, found, asked = [task[0] for task in TASKS], list[Need](), 0
    while asked < gpu_milli:
        _, cores, memory, gpus, part = chance.choices(TASKS, weights)[0]
        need: dict[str, int] = {"cpu_milli": cores, "memory_mib": memory, "gpus": gpus, "gpu_milli": part}
        found.append({name: amount for name, amount in need.items() if amount})  # type: ignore[misc]
        asked += gpus * WHOLE_GPU + part
    return found


def gpus_of(need: Need) -> int:
    """Return the thousandths of GPUs that a task takes."""
    return need.get("gpus", 0) * WHOLE_GPU + need.get("gpu_milli", 0)


# What the strategies are compared with.


@dataclass(frozen=True)
class Number:
    """A score of one number; the smallest is best."""

    value: float

    @property
    def key(self) -> tuple[float, ...]:
        return (self.value,)

    def as_decision(self) -> dict[str, float]:
        return {"value": self.value}


class Comparison:
    """A choice by what a node would have left of cores, memory and GPUs, each divided by the largest of the candidates.

    sign: 1 takes the least (best fit), -1 the most (spreading), 0 does not look.
    by_number: of equal candidates the one with the lowest number is taken, otherwise a random one.
    """

    inputs = NOTHING_ELSE

    def __init__(self, sign: float, *, by_number: bool = False) -> None:
        self._sign, self._by_number = sign, by_number

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        largest = [max(values) or 1.0 for values in zip(*map(_sums, snapshot.declared.values()), strict=True)]
        if self._by_number:
            snapshot = replace(
                snapshot, candidates=[sorted(bots, key=lambda bot: bot.id) for bots in snapshot.candidates]
            )

        def judge(room: Room, demand: Demand) -> Score:
            rest = after(room, demand)
            left = _sums(Declared(rest.amounts, rest.amounts, rest.gpus))
            return Number(self._sign * sum(amount / most for amount, most in zip(left, largest, strict=True)))

        def judge_of(_: Group) -> Judge:
            return judge

        return choose_least(snapshot, judge_of, how=how)


def _sums(node: Declared) -> tuple[float, float, float]:
    """Return the cores, the memory and the GPUs that a node has left, the GPUs together."""
    return node.left[0] or 0.0, node.left[1] or 0.0, float(sum(node.gpus or ()))


#: In the order of the table.
STRATEGIES: Mapping[str, Strategy] = {
    "random": Comparison(0.0),
    "spreading": Comparison(-1.0),
    "best fit": Comparison(1.0),
    "first fit": Comparison(0.0, by_number=True),
    "capacity": load("capacity"),
    "pack": load("pack"),
    "fragmentation": load("fragmentation"),
}


# The simulation


class Simulation:
    """A fleet on which tasks are placed in their order, and which none of them leaves."""

    def __init__(
        self, strategy: Strategy, nodes: Sequence[Declared], tasks: Sequence[Need], sample: int, *, seed: int
    ) -> None:
        self._strategy, self._sample, self._tasks, self._chance = strategy, sample, tasks, random.Random(seed)
        self._bots = {number: FreeBot(number, str(number), 0, UNITS, UNITS) for number in range(1, len(nodes) + 1)}
        self._nodes = dict(enumerate(nodes, start=1))
        self._rooms = RoomCopy(self._bots.values(), self._nodes)
        self._all = sum(sum(node.gpus or ()) for node in nodes)
        self._waiting = {0: WaitingDemand(Counter(demand_of(1, need) for need in tasks))}
        self.allocated = 0

    def run(self) -> dict[float, float]:
        """Place all tasks; return the allocated share of all GPUs by demand."""
        found, asked, together = dict[float, float](), 0, 1 if self._sample else TOGETHER
        for start in range(0, len(self._tasks), together):
            some = range(start, min(start + together, len(self._tasks)))
            self._place({number + 1: self._tasks[number] for number in some})
            asked += sum(gpus_of(self._tasks[number]) for number in some)
            for mark in MARKS:
                if asked >= mark * self._all:
                    found.setdefault(mark, self.allocated / self._all)
        return found

    def _place(self, needs: dict[int, Need]) -> None:
        """Choose for these tasks until none of those that are left is placed."""
        while needs:
            seen = self._snapshot(needs)
            placed = seen.chosen_by(self._strategy, Policy(), how={}) if seen.jobs else []
            if not placed:
                return
            for each in placed:
                need = needs.pop(each.job_id)
                self._rooms.take(each.bot_id, demand_of(1, need))
                self.allocated += gpus_of(need)

    def _snapshot(self, needs: Mapping[int, Need]) -> Snapshot:
        alike: dict[Demand, list[int]] = defaultdict(list)
        for number, need in needs.items():
            alike[demand_of(1, need)].append(number)
        groups: list[Group] = []
        found: list[list[FreeBot]] = []
        for nth, (demand, numbers) in enumerate(alike.items()):
            bots = list(self._candidates(demand))
            if bots:
                jobs = tuple(ReadyJob(number, str(number), nth, 0, 1, 1, 0, 1, None, False) for number in numbers)
                groups.append(Group(0, 1, 1, 1, jobs))
                found.append(bots)
        seen = {bot.id for bots in found for bot in bots}
        rooms = {number: self._rooms.of(number) for number in seen}
        return ResourceSnapshot(
            sorted(job for group in groups for job in group.jobs),
            groups,
            found,
            frozenset(),
            needs=needs,
            declared={
                number: self._nodes[number]._replace(left=room.amounts, gpus=room.gpus)
                for number, room in rooms.items()
            },
            waiting=self._waiting,
        )

    def _candidates(self, demand: Demand) -> Iterator[FreeBot]:
        """Yield random nodes that the task fits, as many as the sample has."""
        left = self._sample or len(self._bots)
        for number in shuffled(list(self._bots), self._chance):
            if fits(self._rooms.of(number), demand):
                yield self._rooms.left(self._bots[number])
                left -= 1
                if not left:
                    return


def simulated(strategy: str, sample: int, *, seeds: int, nodes: int | None = None) -> dict[float, float]:
    """Return the allocated share of all GPUs by demand, the mean of several seeds."""
    runs = []
    for seed in range(seeds):
        chance = random.Random(seed)
        fleet = generated_nodes(nodes, chance)
        tasks = generated_tasks(int(MARKS[-1] * sum(sum(node.gpus or ()) for node in fleet)), chance)
        runs.append(Simulation(STRATEGIES[strategy], fleet, tasks, sample, seed=seed).run())
    return {mark: round(mean(run[mark] for run in runs), 4) for mark in MARKS}


# The same through a pool


def pooled(url: str, strategy: str, sample: int, *, nodes: int | None) -> dict[float, float]:
    """Submit the tasks of the first seed in waves, and run cycles of an assigner until they place nothing more."""
    chance = random.Random(0)
    fleet = generated_nodes(nodes, chance)
    total = sum(sum(node.gpus or ()) for node in fleet)
    tasks = generated_tasks(int(MARKS[-1] * total), chance)
    found, asked = dict[float, float](), 0
    with empty(url, "leasehold_packing") as database_url, opened(database_url) as database:
        for number, node in enumerate(fleet):
            cores, memory = (int(amount or 0) for amount in node.most[:2])
            supply = {"cpu_milli": cores, "memory_mib": memory, "gpus": len(node.gpus or ())}
            opening = OpenSession.model_validate({"bot": f"node-{number}", "capacity": UNITS, "resources": supply})
            working(database, [opening])
        sampling = SamplingSettings(sample_size=sample or 1000)
        settings = AssignerSettings(strategy=StrategySettings(kind=strategy, sampling=sampling), failure_backoff=0.0)
        assigner = PriorityAgeAssigner(
            database, settings, timing=TIMING, chance=chance, name="bench", now=clock.monotonic
        )
        for start in range(0, len(tasks), WAVE):
            some = tasks[start : start + WAVE]
            wave = [{"payload": {"command": ["true"]}, "terms": {"resources": dict(need)}} for need in some]
            database.run(lambda connection, wave=wave: submit_moves.submit(connection, wave, actor="bench"))
            asked += sum(map(gpus_of, some))
            allocated = _placed(database, assigner)
            for mark in MARKS:
                if asked >= mark * total:
                    found.setdefault(mark, round(allocated / total, 4))
        broken = [finding for finding in invariants.verify(database) if finding.rows]
        if broken:
            raise SystemExit(f"invariants are broken: {broken}")
    return found


_ALLOCATED = Statement(
    "SELECT (SELECT count(*) FROM leases) AS leases,"
    r" (SELECT coalesce(sum(used), 0)::integer FROM counters WHERE name LIKE 'bot\:%\:gpu\:%') AS gpu_milli"
)


def _placed(database: Database, assigner: PriorityAgeAssigner) -> int:
    """Run cycles until two of them place nothing; return the thousandths of GPUs that are allocated then."""
    leases, idle = -1, 0
    while True:
        assigner.run_once()
        row = database.run(lambda connection: connection.execute(_ALLOCATED).one())
        leases, idle = row.leases, idle + 1 if row.leases == leases else 0
        if idle == 2:
            return int(row.gpu_milli)


@click.command(help=__doc__)
@click.option("--seeds", default=1, show_default=True, help="Fleets and workloads of which the mean is shown.")
@click.option(
    "--sample", "samples", multiple=True, type=int, default=(10, 50, ALL), help="Candidates; 0 for all nodes."
)
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(list(STRATEGIES)), default=list(STRATEGIES))
@click.option("--nodes", type=click.IntRange(min=1), help="Random nodes of the fleet; unset for all of them.")
@click.option("--pool", "with_pool", is_flag=True, help="Also run the strategies of the pool through a real pool.")
@click.option("--json", "as_json", is_flag=True)
def main(
    seeds: int, samples: Sequence[int], strategies: Sequence[str], nodes: int | None, *, with_pool: bool, as_json: bool
) -> None:
    """Print the allocated shares of all GPUs."""
    rows: list[dict[str, object]] = []
    with server() if with_pool else nullcontext("") as url:
        for sample in samples:
            for strategy in strategies:
                shares = simulated(strategy, sample, seeds=seeds, nodes=nodes)
                rows.append({"sample": sample or "all", "strategy": strategy, **_named(shares)})
                if with_pool and not isinstance(STRATEGIES[strategy], Comparison):
                    shares = pooled(url, strategy, sample, nodes=nodes)
                    rows.append({"sample": sample or "all", "strategy": f"{strategy}, in a pool", **_named(shares)})
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(*rows[0], title="allocated share of all GPUs, by demand")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def _named(shares: Mapping[float, float]) -> dict[str, float]:
    return {f"{mark:g}": share for mark, share in shares.items()}


if __name__ == "__main__":
    main()
