"""Classes, ageing, deadlines, promotion, overflow and quotas at once: whatever happens, every job comes to its end."""

import random

import pytest

from assigner.books import Rules
from assigner.operator_resources.priorities import reprice
from assigner.ordering import OrderingSettings
from assigner.overflow import Tide
from schema import classes, clock, counters, moves
from schema.requests import JobRequest
from tests.pool import Bot, Pool, active, completed

CLASSES = ("critical", "serious_project", "serious", "random", "auto_generated", "background", None)


def submitted(pool: Pool, chance: random.Random) -> None:
    kind = chance.choice(CLASSES)
    fields = {
        "job_class": kind,
        "user_priority": chance.randint(0, 10) if kind and chance.random() < 0.5 else None,
        "owner": chance.choice(["ann", "bob", None]),
        "project": chance.choice(["site", None]),
        "deadline_seconds": chance.choice([0.001, 5.0, 1e5, None]),
        "locks": chance.choice([["tree"], [], []]),
        "service_level": chance.choice(["premium", "economy", None, None]),
        "max_attempts": 50,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    pool.submit(chance.randint(1, 6), **JobRequest(command=["true"], **given).normal())  # type: ignore[arg-type]


def worked(bot: Bot, held: list[dict[str, object]], chance: random.Random) -> list[dict[str, object]]:
    """The bot ends some of what it has and takes what is offered."""
    ended = [work for work in held if chance.random() < 0.6]
    kept = [work for work in held if work not in ended]
    verdicts = ("succeeded", "succeeded", "failed")
    answer = bot.sync(*(completed(work, chance.choice(verdicts)) for work in ended), *map(active, kept))
    return [work for work in answer["leases"] if not work.get("stop")]


@pytest.mark.parametrize("seed", range(4))
def test_sa_all_at_once_every_job_comes_to_its_end(pool: Pool, seed: int) -> None:
    chance = random.Random(seed)
    pool.database.run(lambda c: counters.limit(c, "owner:default:ann:cost", 12))
    policy = classes.Policy(starvation_seconds=0.001, max_queue_size=5)
    pool.database.run(lambda c: classes.put_policy(c, policy, actor="test"))
    bots = [pool.bot(f"bot-{n}", capacity=4) for n in range(2)]
    assigners = [pool.assigner() for _ in range(3)]
    kinds = (OrderingSettings(), OrderingSettings(ageing_rate=900.0), OrderingSettings(kind="score"))
    for assigner, ordering in zip(assigners, kinds, strict=True):
        assigner.reconfigure(assigner._settings, assigner._quotas, Rules(ordering))
    upkeep, tide = pool.upkeep(), Tide(pool.database, name="test", now=clock.monotonic)
    held: list[list[dict[str, object]]] = [[], []]
    for step in range(300):
        submitting = step < 40
        if submitting:
            submitted(pool, chance)
        chance.choice(assigners).run_once()
        if step % 4 == 0:
            upkeep.run_once()
        tide.run_once()
        if submitting and step % 10 == 9:
            points = chance.randint(0, 100)
            pool.database.run(lambda c, points=points: classes.put_class(c, "random", points=points, actor="test"))
            reprice(pool.database, actor="test")
        if step == 60:
            pool.database.run(lambda c: counters.limit(c, "owner:default:ann:cost", None))
        held = [worked(bot, mine, chance) for bot, mine in zip(bots, held, strict=True)]
        if not submitting and not pool.rows("SELECT FROM jobs WHERE finished_at IS NULL LIMIT 1"):
            break
        if submitting and chance.random() < 0.2:
            jobs = pool.rows("SELECT public_id FROM jobs WHERE state IN ('queued', 'deferred') ORDER BY id LIMIT 3")
            ids = [str(row.public_id) for row in jobs]
            pool.database.run(lambda c, ids=ids: moves.cancel(c, ids, instances=None, sync=1.0, actor="test"))
    assert pool.rows("SELECT state, count(*) FROM jobs WHERE finished_at IS NULL GROUP BY state") == []
    told = {row.move for row in pool.rows("SELECT DISTINCT move FROM job_events")}
    assert {"promote", "hasten", "at_risk"} <= told
