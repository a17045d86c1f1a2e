"""The same gates pick and explain: what `explain` finds nothing against is granted, and nothing else is."""

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from schema.accounting import counters, rates
from schema.moves.waiting.overflow import defer
from schema.policy import meters, time_windows
from schema.policy.time_windows import WindowSettings
from schema.postgres.statements import Statement
from schema.tenancy import drains
from tests.support.explain import closed, cohort, explained, keep, park, rest, status
from tests.support.pool import Pool, graph_of, taken
from tests.support.race import cancel
from tests.support.tenancy import Tenancy

EXAMPLES_VARIABLE = "LEASEHOLD_TEST_EXAMPLES"
EXAMPLES = 40
CLEAR = """
TRUNCATE jobs, job_payloads, job_metadata, job_outputs, job_results, job_checkpoints, submit_keys, bots, bot_changes,
    bot_localities, lost_attempts, blames, kinds, kind_platforms, leases, stored_events, queues, platforms, instances,
    ticks, audit, quotas, evictions, assigners, constraint_sets, job_constraints,
    counters, usage, graphs, graph_nodes, graph_edges, windows, usage_meters, meter_hours, rate_buckets, backpressure
    RESTART IDENTITY;
DELETE FROM cohorts WHERE id <> 0"""
SEED = Statement("SELECT setseed(0.25)")

INSTANCES = ("team-a", "team-b")
COUNTED = (
    *("pool:jobs", "pool:cost", "class:critical:jobs", "owner:team-a:ann:cost", "project:team-b:apollo:cost"),
    *(f"instance:{each}:{what}" for each in INSTANCES for what in ("jobs", "cost", "slots")),
)
#: What becomes of a job that is a node of a graph.
NODES = ("blocked", "freed")
PROPERTIES: list[dict[str, Any]] = [{}, {"os": ["linux"]}, {"os": ["linux"], "gpu": ["a", "b"]}]
OFFERS: list[dict[str, Any]] = [{}, {"os": "linux"}, {"os": "linux", "gpu": ["a", "b", "c"]}]


@dataclass(frozen=True)
class Machine:
    """A bot: what it offers and serves, and how it is."""

    offer: dict[str, Any]
    capacity: int
    labels: list[str]
    serves: dict[str, str]
    resources: dict[str, int]
    state: str


@dataclass(frozen=True)
class World:
    """A small pool with work in it, and what happens to the one job that waits."""

    machines: list[Machine]
    work: list[tuple[str, int, str, dict[str, Any]]]
    quotas: dict[str, tuple[int, int | None]]
    evicted: int
    pooled: bool
    drained: list[str]
    managed: list[str]
    limits: dict[str, float]
    window: dict[str, Any]
    empty: list[str]
    advice: list[str]
    request: dict[str, Any]
    fate: str


def machine(chance: random.Random) -> Machine:
    """A bot, most often one that could do anything."""
    return Machine(
        offer=chance.choice([*OFFERS, *[OFFERS[2]] * 4]),
        capacity=chance.randint(1, 4),
        labels=chance.choice([*[[]] * 10, ["gpu"], ["unknown"]]),
        serves=chance.choice([*[{}] * 4, {"instance": "team-a"}, {"instance": "team-b"}, {"pool": "p"}]),
        resources=chance.choice([{}, {}, {"cpu_milli": 500}, {"cpu_milli": 1500, "memory_mib": 64}]),
        state=chance.choice([*["ok"] * 5, "unhealthy", "draining", "closing", "drained", "kept", "kept"]),
    )


def quota(chance: random.Random) -> tuple[int, int | None]:
    """A minimum and a maximum."""
    minimum = chance.randint(0, 2)
    return minimum, chance.choice([None, minimum, minimum + 1, minimum + chance.randint(0, 6)])


def terms(chance: random.Random) -> dict[str, Any]:
    """What a job asks for beside a place, as often as not nothing."""
    asked: list[dict[str, Any]] = [
        {"terms": {"locks": ["tree"]}},
        {"terms": {"locks": ["cache", "tree"]}, "estimated_cost": 2},
        {"terms": {}, "estimated_cost": 3},
        {"terms": {"resources": {"cpu_milli": 600}}},
        {"terms": {"resources": {"cpu_milli": 400, "memory_mib": 40}, "batch_key": "x"}},
        {"terms": {"job_class": "critical"}},
        {"terms": {"resource_class": "llm"}},
        {"terms": {"resource_class": "llm", "model": "large"}},
        {"terms": {"owner": "ann", "project": "apollo"}, "estimated_cost": 2},
    ]
    return chance.choice([*[{}] * 6, *asked])


def sized(request: dict[str, Any]) -> dict[str, Any]:
    """As a caller's request is: what takes of resources says with its terms how many units it takes."""
    wanted = request.get("terms", {})
    if "resources" not in wanted or request["units"] == 1:
        return request
    return {**request, "terms": {**wanted, "units": request["units"]}}


def at_random(chance: random.Random) -> World:
    """A world in which about every third time nothing stands in the job's way."""
    return World(
        machines=[machine(chance) for _ in range(chance.randint(2, 4))],
        work=[
            (chance.choice(INSTANCES), chance.randint(1, 3), chance.choice(["", "", "gpu"]), terms(chance))
            for _ in range(chance.randint(0, 4))
        ],
        quotas={instance: quota(chance) for instance in INSTANCES if chance.random() < 0.5},
        evicted=chance.choice([0, 0, 1, 2]),
        pooled=chance.random() < 0.5,
        drained=[instance for instance in INSTANCES if chance.random() < 0.08],
        managed=[instance for instance in INSTANCES if chance.random() < 0.3],
        limits={name: float(chance.randint(0, 4)) for name in COUNTED if chance.random() < 0.15},
        window=chance.choice([{}, {"types": ["critical"]}, {"types": ["random"]}, {"used": 10}, {"used": 90}]),
        empty=[used for used in ("llm", "llm/large") if chance.random() < 0.2],
        advice=[used for used in (rates.ALL_CLASSES, "llm", "other") if chance.random() < 0.1],
        request={
            **terms(chance),
            "instance": chance.choice(INSTANCES),
            "properties": chance.choice(PROPERTIES),
            "units": chance.choice([1, 1, 1, 2, 3]),
            "label": chance.choice([*[""] * 7, "gpu", "other"]),
        },
        fate=chance.choice(
            [*NODES, *["ready"] * 16, *("rested", "rested", "resting", "parked", "deferred"), "blocked"]
        ),
    )


def node_of_graph(pool: Pool, world: World) -> str:
    """The job as a node that comes after another one, which is held aside, or was cancelled and may be."""
    fields = {name: value for name, value in sized(world.request).items() if name != "instance"}
    request = graph_of({1: [], 2: [{"node": 1, "on_failure": "run"}]}, instance=world.request["instance"])
    request["nodes"][1] |= fields
    graph = taken(pool, request)
    park(pool, graph.jobs[1])
    if world.fate == "freed":
        cancel(pool, graph.jobs[1])
    return graph.jobs[2]


def window(pool: Pool, *, types: Sequence[str] = ("all",), used: float | None = None) -> None:
    """One that is open all day, to some classes or below some usage."""
    metered = {} if used is None else {"meter": "plan", "usage_threshold": 50.0}
    opened = WindowSettings.model_validate({"name": "all-day", "start": 0, "end": 24, "types": types, **metered})
    pool.database.run(lambda c: time_windows.declare(c, [opened], actor="test"))
    if used is not None:
        pool.database.run(lambda c: meters.put(c, "plan", used=used, most=100))


def build(pool: Pool, world: World) -> str:
    """Everything of the world, through the real functions where there are some; returns the job that waits."""
    pool.change(CLEAR)
    tenancy = Tenancy(pool)
    cohort(pool, "accelerated", "gpu")
    for instance in INSTANCES:
        pool.change(
            "INSERT INTO instances (name, pool, managed) VALUES (:name, :pool, :managed)",
            name=instance,
            managed=instance in world.managed,
            pool="p" if world.pooled else None,
        )
    for nth, machine in enumerate(world.machines):
        fields: dict[str, Any] = {"labels": machine.labels, "resources": machine.resources, **machine.serves}
        pool.bot(f"bot-{nth}", properties=machine.offer, capacity=machine.capacity, **fields)
    busy = [
        job
        for instance, units, label, asked in world.work
        for job in pool.submit(**sized({"instance": instance, "units": units, "label": label, **asked}))
    ]
    if busy:
        pool.assigner().run_once()
        # What found no place must not be there: the job is the only one that waits.
        cancel(pool, *busy)
    for instance, (minimum, maximum) in world.quotas.items():
        tenancy.quota(instance, minimum=minimum, maximum=maximum)
        for _ in range(world.evicted):
            tenancy.evicted(instance)
    for name, most in world.limits.items():
        pool.database.run(lambda c, name=name, most=most: counters.limit_all(c, {name: most}))
    if world.window:
        window(pool, **world.window)
    for used in world.empty:
        pool.database.run(lambda c, used=used: rates.set_rates(c, {used: rates.RateTerms(0.001, 1)}, actor="test"))
        pool.change("UPDATE rate_buckets SET tokens = 0.5")
    for used in world.advice:
        pool.database.run(lambda c, used=used: rates.advise(c, used or None, allowed=False, actor="test"))
    job = node_of_graph(pool, world) if world.fate in NODES else pool.submit(**sized(world.request))[0]
    for nth, machine in enumerate(world.machines):
        match machine.state:
            case "unhealthy" | "draining":
                status(pool, f"bot-{nth}", status=machine.state)
            case "closing":
                status(pool, f"bot-{nth}", closing=True)
            case "drained":
                status(pool, f"bot-{nth}", draining=True)
            case "kept":
                keep(pool, f"bot-{nth}", INSTANCES[nth % 2])
    for instance in world.drained:
        pool.database.run(lambda c, name=instance: drains.drain_instance(c, name, draining=True, actor="test"))
    match world.fate:
        case "rested":
            rest(pool, job, -1)
        case "resting":
            rest(pool, job, 60)
        case "parked":
            park(pool, job)
        case "deferred":
            assert pool.database.run(lambda c: defer(c, 1, normal=-100, most=0, actor="test")) == [job]
    return job


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_job_is_granted_if_and_only_if_no_gate_is_closed(pool: Pool) -> None:
    """Small pools at random, with one job that waits; `LEASEHOLD_TEST_EXAMPLES=2000` tries so many."""
    asked = bool(os.environ.get(EXAMPLES_VARIABLE))
    seen: Counter[str] = Counter()

    @settings(
        max_examples=int(os.environ.get(EXAMPLES_VARIABLE) or EXAMPLES),
        derandomize=not asked,
        phases=tuple(Phase) if asked else (Phase.explicit, Phase.generate),
    )
    @given(seed=st.integers(0, 2**32))
    def agree(seed: int) -> None:
        world = at_random(random.Random(seed))
        note(str(world))
        job = build(Pool(pool.database, pool.timing, random.Random(0)), world)
        found = explained(pool, job)
        pool.database.run(lambda connection: connection.execute(SEED))
        pool.assigner(batch=1000).run_once()
        granted = pool.job(job).state == "leased"
        assert granted == all(one.open for one in found.gates), f"granted: {granted}, but {found.sentence}"
        assert bool(found.change) != granted
        seen.update(closed(found) or ["none"])

    agree()
    assert seen["none"] >= EXAMPLES / 10, f"too few that nothing stood in the way of: {seen}"
    assert seen["dependencies"], f"no job waited for another: {seen}"
    assert len(seen) >= 15, f"too few gates were ever closed: {seen}"
