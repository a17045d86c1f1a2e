"""Instances share the pool by their weights through several assigner processes, while they come, go and are reweighed.

Starts are counted in the database, where all of them have one order, whoever has made them.
"""

import os
import random
from collections import Counter

import pytest

from assigner.admission.controller import DEMAND_RECHECK
from schema import clock
from schema.moves.cancel import cancel
from tests.support.assigners import assigner_processes
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Bot, Pool, completed
from tests.support.tenancy import share

SECONDS_VARIABLE = "LEASEHOLD_TEST_SOAK"
PROCESSES, UNITS = 4, 12
#: The fewest starts in a span over which shares are compared with weights.
STARTS = 240
#: Two hundredths, and two jobs: the minimum guarantee and one that is running.
TOLERANCE, EDGE = 0.02, 2

STARTED = """
SELECT i.name, count(*) AS jobs FROM job_events e JOIN jobs j ON j.id = e.job_id JOIN instances i ON i.id = j.instance
WHERE e.move = 'grant' AND e.id > :after GROUP BY 1"""


class Tenants:
    """Instances with weights. Some of them want everything; one bot ends at once whatever it is given."""

    def __init__(self, pool: Pool, weights: dict[str, float]) -> None:
        self.pool, self.weights = pool, dict[str, float]()
        self.wanting: set[str] = set()
        self.bot: Bot = pool.bot(capacity=UNITS, sync_service=pool.sync_service(enabled=False))
        for name, weight in weights.items():
            self.reweigh(name, weight)

    def reweigh(self, name: str, weight: float) -> None:
        self.weights[name] = weight
        share(self.pool, name, credit_weight=weight)

    def go(self, name: str) -> None:
        """It has no jobs any more. Then an hour passes."""
        self.wanting.discard(name)
        waiting = self.pool.rows(
            "SELECT j.public_id FROM jobs j JOIN instances i ON i.id = j.instance"
            " WHERE i.name = :name AND j.state = 'queued'",
            name=name,
        )
        ids = [str(row.public_id) for row in waiting]
        self.pool.database.run(lambda c: cancel(c, ids, instances=None, sync=1.0, actor="test"))
        self.pool.change(
            "UPDATE accounts SET demand_at = now() - interval '1 hour'"
            " WHERE instance = (SELECT id FROM instances WHERE name = :name)",
            name=name,
        )

    def fill(self) -> None:
        """Submit jobs of those that want everything, so that more of them wait than can start at once."""
        for name in sorted(self.wanting):
            waiting = self.pool.row(
                "SELECT count(*) AS jobs FROM jobs j JOIN instances i ON i.id = j.instance"
                " WHERE i.name = :name AND j.state = 'queued'",
                name=name,
            ).jobs
            if waiting < 2 * UNITS:
                self.pool.submit(4 * UNITS, instance=name, estimated_cost=1)

    def end(self) -> None:
        """End what runs."""
        given = self.bot.sync()["leases"]
        self.bot.sync(*(completed(lease, usage={"cost": 1}) for lease in given))

    def pause(self) -> int:
        """Let nothing start, and end what runs; returns the number of the last event."""
        self.pool.change("UPDATE bots SET draining = true")

        def idle() -> bool:
            self.end()
            return not self.pool.rows("SELECT FROM live")

        eventually(idle)
        self.pool.upkeep().run_once()
        return int(self.pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id)

    def shares(self, after: int, seconds: float) -> str:
        """Let work go on for so long, and at least until enough jobs have started; returns what is not as it should."""
        self.fill()
        self.pool.change("UPDATE bots SET draining = false")
        found, until = Counter[str](), clock.monotonic() + seconds

        def enough() -> bool:
            self.fill()
            self.end()
            found.clear()
            found.update({row.name: row.jobs for row in self.pool.rows(STARTED, after=after)})
            return found.total() >= STARTS and clock.monotonic() >= until

        eventually(enough, seconds + 4 * MINUTE)
        total, weight = found.total(), sum(self.weights[name] for name in self.wanting)
        wrong = {
            name: f"{found[name] / total:.3f} instead of {self.weights[name] / weight:.3f}"
            for name in self.wanting
            if abs(found[name] / total - self.weights[name] / weight) > TOLERANCE + EDGE / total
        }
        print(f"{total} starts: " + ", ".join(f"{n} {found[n] / total:.3f}" for n in sorted(self.wanting)))
        assert not found.keys() - self.wanting
        return f"of {total} starts {wrong}" if wrong else ""


@pytest.mark.timeout(900)
def test_shares_follow_the_weights_through_four_processes_while_one_returns_and_one_is_reweighed(
    pool: Pool, database_url: str, chance: random.Random
) -> None:
    """`LEASEHOLD_TEST_SOAK=60` goes on for a minute."""
    seconds = float(os.environ.get(SECONDS_VARIABLE) or 0.0) / 4
    tenants = Tenants(pool, {"a": 1.0, "b": 2.0, "c": 4.0})
    tenants.wanting |= {"a", "b", "c"}
    wrong = dict[str, str]()
    with assigner_processes(
        database_url, pool.timing, chance, [[None]] * PROCESSES, wakeups=True, interval=0.1, jitter=0.1
    ):
        wrong["all want everything"] = tenants.shares(tenants.pause(), seconds)
        after = tenants.pause()
        tenants.go("c")
        # So long that no process takes the demand of the one that has gone for recorded lately.
        wrong["one has gone"] = tenants.shares(after, max(seconds, DEMAND_RECHECK))
        after = tenants.pause()
        tenants.wanting.add("c")
        wrong["it returns from an idle hour"] = tenants.shares(after, seconds)
        after = tenants.pause()
        tenants.reweigh("b", 5.0)
        wrong["another one is reweighed"] = tenants.shares(after, seconds)
    assert not {when: told for when, told in wrong.items() if told}
