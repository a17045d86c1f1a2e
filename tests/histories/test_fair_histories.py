"""Histories of instances that share a pool: whatever happens, they share by their weights right afterwards."""

import random
from collections import Counter

import pytest

from schema.moves.cancel import cancel
from schema.tenancy.drains import drain_instance
from tests.support.pool import Pool, completed
from tests.support.tenancy import share

NAMES = ("a", "b", "c", "d")
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0)
UNITS, ROUNDS, STEPS = 24, 10, 5
#: Jobs that start after a disturbance, over which shares are compared with weights.
STARTS = UNITS * ROUNDS
#: Two hundredths, and two jobs: the minimum guarantee and one that is running.
TOLERANCE = 0.02 + 2 / STARTS


class History:
    """Instances that share a pool by their weights. Some want everything; the others have nothing that may start."""

    def __init__(self, pool: Pool, chance: random.Random) -> None:
        self.pool, self.chance = pool, chance
        self.weights: dict[str, float] = {}
        self.wanting: dict[str, list[str]] = {}
        for name in NAMES:
            self.reweigh(name)
        self.bot = pool.bot(capacity=UNITS)

    def reweigh(self, name: str) -> None:
        self.weights[name] = self.chance.choice(WEIGHTS)
        share(self.pool, name, weight=self.weights[name])

    def come(self, name: str) -> None:
        self.drain(name, draining=False)
        self.wanting[name] = []

    def go(self, name: str) -> None:
        """It has no jobs any more, or only such as no bot offers to run, or it is drained. Then an hour passes."""
        waiting = self.wanting.pop(name)
        how = self.chance.choice(("idle", "stuck", "drained"))
        if how == "drained":
            self.drain(name, draining=True)
        else:
            self.pool.database.run(lambda c: cancel(c, waiting, instances=None, sync=1.0, actor="test"))
        if how == "stuck":
            self.pool.submit(3, instance=name, properties={"gpu": "nowhere"})
        self.starts(2)
        self.pool.change(
            "UPDATE accounts SET demand_at = now() - interval '1 hour'"
            " WHERE instance = (SELECT id FROM instances WHERE name = :name)",
            name=name,
        )

    def drain(self, name: str, *, draining: bool) -> None:
        self.pool.change("SELECT intern_instance(:name)", name=name)
        self.pool.database.run(lambda c: drain_instance(c, name, draining=draining, actor="test"))

    def starts(self, rounds: int) -> Counter[str]:
        """Give all units to those that want them, so many times; returns how many jobs each has started."""
        assigner, found = self.pool.assigner(), Counter[str]()
        for _ in range(rounds):
            for name, waiting in self.wanting.items():
                if len(waiting) < UNITS:
                    waiting += self.pool.submit(2 * UNITS, instance=name, estimated_cost=1)
            assigner.run_once()
            given = self.bot.take()
            for work in given:
                self.wanting[work["instance"]].remove(work["job"])
            found.update(work["instance"] for work in given)
            self.bot.sync(*(completed(work, usage={"cost": 1}) for work in given))
            self.pool.upkeep().run_once()
        return found

    def disturb(self) -> str:
        """Let something happen; returns what."""
        away = sorted({*NAMES} - self.wanting.keys())
        what = self.chance.choice(("reweigh", "come", "go"))
        if what == "come" and away:
            self.come(name := self.chance.choice(away))
        elif what == "go" and len(self.wanting) > 2:
            self.go(name := self.chance.choice(sorted(self.wanting)))
        else:
            self.reweigh(name := self.chance.choice(NAMES))
        return f"{what} {name}"


@pytest.mark.long
def test_after_any_disturbance_those_that_want_everything_share_by_their_weights(pool: Pool) -> None:
    chance = random.Random(0)
    history, told = History(pool, chance), list[str]()
    for name in ("a", "b"):
        history.come(name)
    for _ in range(STEPS):
        told.append(history.disturb())
        found = history.starts(ROUNDS)
        assert found.total() == STARTS, "no unit stays free"
        total = sum(history.weights[name] for name in history.wanting)
        wrong = {
            name: (found[name] / STARTS, history.weights[name] / total)
            for name in history.wanting
            if abs(found[name] / STARTS - history.weights[name] / total) > TOLERANCE
        }
        assert not wrong, (told, history.weights, found)
