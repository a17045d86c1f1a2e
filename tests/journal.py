"""What a client was promised, kept outside of the database: every acknowledged submit, and what has to come of it."""

from collections import Counter
from typing import Any

from bots.client import Client
from schema import verify
from schema.states import FINAL
from tests.patience import MINUTE, eventually
from tests.pool import Pool

STATES = "SELECT public_id, state FROM jobs"
ENDS = """
SELECT job_id, count(*) AS times FROM job_events
WHERE to_state IN ('succeeded', 'failed', 'cancelled', 'dead') GROUP BY job_id"""
# A job ends in the hands of whoever has its last fence, and nobody else's word counts.
WRONG_ENDS = """
SELECT j.public_id FROM jobs j JOIN job_events e ON e.job_id = j.id AND e.move = 'finish'
WHERE e.fence <> j.fence OR j.result_fence IS DISTINCT FROM j.fence"""


class Journal:
    """Acknowledged submits: key and id."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.jobs: dict[str, str] = {}

    def submit(self, count: int, **fields: Any) -> list[str]:
        """Submit through the function that the gateway calls, each job with a key of its own."""
        return [self._note(key, *self._pool.submit(key=key, **fields)) for key in self._keys(count)]

    def send(self, client: Client, count: int, *command: str, **fields: Any) -> list[str]:
        """Submit over HTTP in one request, which the client repeats until it is answered."""
        keys = self._keys(count)
        taken = client.submit([{"command": list(command), "key": key, **fields} for key in keys])
        return [self._note(key, job.id) for key, job in zip(keys, taken, strict=True)]

    def wait(self, within: float = MINUTE) -> None:
        """Until every acknowledged job is final."""
        eventually(self._all_final, within, what="every acknowledged job is final")

    def check(self) -> None:
        """0 lost, 0 finished twice, 0 rows that break an invariant; all succeeded, and nothing is there twice."""
        states = {str(row.public_id): row.state for row in self._pool.rows(STATES)}
        assert set(self.jobs.values()) - states.keys() == set(), "acknowledged submits are lost"
        assert len(states) == len(self.jobs), "a submit made more than one job"
        assert Counter(states.values()) == {"succeeded": len(self.jobs)}
        ends = Counter(row.times for row in self._pool.rows(ENDS))
        assert ends == {1: len(self.jobs)}, "a job has not ended exactly once"
        assert self._pool.rows(WRONG_ENDS) == []
        assert [finding for finding in verify.verify(self._pool.database) if finding.rows] == []

    def _all_final(self) -> bool:
        final = {str(row.public_id) for row in self._pool.rows(STATES) if row.state in FINAL}
        return final >= set(self.jobs.values())

    def _keys(self, count: int) -> list[str]:
        return [f"key-{len(self.jobs) + number}" for number in range(count)]

    def _note(self, key: str, job: str) -> str:
        assert self.jobs.setdefault(key, job) == job, "one key, two jobs"
        return job
