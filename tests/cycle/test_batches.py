"""A large batch places as one job after another would: the same jobs, in the same order, on the same bots."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from assigner.preemption.plan import QuotaSettings
from schema.accounting import quotas
from tests.support.pool import Pool
from tests.support.tenancy import put_cohort

WORLDS = 3
#: The score is the number of free units; the bot's priority only decides between equals.
WEIGHTS = {"priority": -0.01, "capacity": 1.0, "locality": 0.0}
KINDS = "abc"


@dataclass(frozen=True)
class BotSpec:
    priority: int
    capacity: int
    kinds: str


@dataclass(frozen=True)
class JobSpec:
    instance: str
    priority: int
    units: int
    kind: str
    preferred: str | None = None


@dataclass(frozen=True)
class World:
    """Bots, jobs in the order of their submit, and the minimum and maximum of some instances."""

    bots: tuple[BotSpec, ...]
    jobs: tuple[JobSpec, ...]
    limits: dict[str, tuple[int, int | None]]


def drawn_world(chance: random.Random, *, minimums: bool) -> World:
    """A random world in which units are scarce about as often as not.

    With minimums, every job finds a bot. A batch goes by what instances lack when it is picked. A job that then finds
    no bot counts there, and does not where jobs are picked one by one.
    """
    priorities = chance.sample(range(100), 8)
    bots = tuple(
        BotSpec(priority, chance.randint(1, 4), "".join(chance.sample(KINDS, 3 if minimums else chance.randint(1, 3))))
        for priority in priorities[: chance.randint(2, 8)]
    )
    most = min(24, sum(bot.capacity for bot in bots)) if minimums else 24
    jobs = tuple(
        JobSpec(
            f"i{chance.randint(1, 3)}",
            chance.randint(-2, 2),
            1 if minimums else chance.choice((1, 1, 1, 2)),
            chance.choice(KINDS),
            chance.choice((None, None, *KINDS)),
        )
        for _ in range(chance.randint(min(4, most), most))
    )
    limits: dict[str, tuple[int, int | None]] = {}
    for instance in ("i1", "i2"):
        if chance.random() < 0.7:
            least = chance.randint(0, 3) if minimums else 0
            limits[instance] = least, chance.choice((None, least + chance.randint(0, 5)))
    return World(bots, jobs, limits)


def expected(world: World, *, minimums_first: bool) -> list[tuple[int, int]]:
    """What the rules say, one job at a time: (number of the job, number of its bot) in the order of the starts.

    Of the jobs that some bot could take now and that their quotas allow, the first is placed: with `minimums_first`
    those of instances below their minimum first, then by priority, then by age. It goes to the bot with the highest
    score of those that also offer what it prefers, or else of all that offer what it requires.
    """
    free = [bot.capacity for bot in world.bots]
    usage: Counter[str] = Counter()
    waiting, placed = list(range(len(world.jobs))), list[tuple[int, int]]()

    def bots_for(job: JobSpec) -> list[int]:
        return [nth for nth, bot in enumerate(world.bots) if job.kind in bot.kinds and free[nth] >= job.units]

    def allowed(job: JobSpec) -> bool:
        _, most = world.limits.get(job.instance, (0, None))
        return most is None or usage[job.instance] + job.units <= most

    def key(nth: int) -> tuple[bool, int, int]:
        job = world.jobs[nth]
        least = world.limits.get(job.instance, (0, None))[0] if minimums_first else 0
        return usage[job.instance] >= least, job.priority, nth

    while True:
        able = [nth for nth in waiting if allowed(world.jobs[nth]) and bots_for(world.jobs[nth])]
        if not able:
            return placed
        first = min(able, key=key)
        job = world.jobs[first]
        suitable = bots_for(job)
        preferred = [nth for nth in suitable if job.preferred is not None and job.preferred in world.bots[nth].kinds]
        bot = max(preferred or suitable, key=lambda nth: free[nth] - 0.01 * world.bots[nth].priority)
        free[bot] -= job.units
        usage[job.instance] += job.units
        waiting.remove(first)
        placed.append((first, bot))


def built(pool: Pool, world: World, cohort: str) -> dict[str, int]:
    """Build the world in a cohort of its own; returns the number of each job by its id."""
    put_cohort(pool, cohort, cohort)
    for instance, (least, most) in world.limits.items():
        pool.database.run(
            lambda connection, instance=instance, least=least, most=most: quotas.set_quota(
                connection, cohort, instance, minimum=least, maximum=most, actor="test"
            )
        )
    for nth, bot in enumerate(world.bots):
        fields: dict[str, Any] = {"capacity": bot.capacity, "priority": bot.priority, "labels": [cohort]}
        pool.bot(f"{cohort}-{nth}", properties={"kind": list(bot.kinds)}, **fields)
    numbers: dict[str, int] = {}
    for nth, job in enumerate(world.jobs):
        fields = {"instance": job.instance, "priority": job.priority, "units": job.units, "label": cohort}
        if job.preferred is not None:
            fields["preferred_properties"] = {"kind": [job.preferred]}
        (found,) = pool.submit(properties={"kind": job.kind}, **fields)
        numbers[found] = nth
    return numbers


def placed_by(pool: Pool, cohort: str, numbers: dict[str, int], *, batch: int, kind: str) -> list[tuple[int, int]]:
    """Run an assigner until it places nothing more; returns what it has placed, in the order of the events."""
    (row,) = pool.rows("SELECT id FROM cohorts WHERE name = :cohort", cohort=cohort)
    assigner = pool.assigner(
        kind=kind,
        minimums_first=kind == "cohort",
        batch=batch,
        priority_percentage=100,
        strategy={"weights": WEIGHTS, "sampling": {"sample_size": 100}},
        chance=random.Random(1),
        quotas=QuotaSettings(preemption=False),
        cohorts=(row.id,),
    )
    before = -1
    events: list[object] = []
    while len(events) > before:
        before = len(events)
        assigner.run_once()
        events = pool.rows(
            "SELECT j.public_id::text AS job, e.details ->> 'bot' AS bot FROM job_events e"
            " JOIN jobs j ON j.id = e.job_id"
            " WHERE e.move = 'grant' AND j.cohort = :cohort ORDER BY e.id",
            cohort=row.id,
        )
    return [(numbers[event.job], int(event.bot.rsplit("-", 1)[1])) for event in events]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
@pytest.mark.parametrize("minimums", [False, True], ids=["maximums", "minimums"])
def test_a_batch_of_500_places_as_batches_of_one_and_as_the_rules_say(pool: Pool, minimums: bool, kind: str) -> None:
    for seed in range(WORLDS):
        world = drawn_world(random.Random(f"{seed} {minimums}"), minimums=minimums)
        for batch in (1, 500):
            cohort = f"w{seed}-{batch}"
            numbers = built(pool, world, cohort)
            placed = placed_by(pool, cohort, numbers, batch=batch, kind=kind)
            assert placed == expected(world, minimums_first=kind == "cohort"), (seed, batch, world)
