"""What callers may do to jobs that wait: hold, release, queue again, another priority. A part of the client."""

from collections.abc import Callable, Sequence
from typing import Protocol

from bots.transport import Record, Transport

Records = list[Record]

#: Ids in one requeue, for each of which there may be a new job.
MAX_REQUEUED = 500


class Each(Protocol):
    """Calls a route for some jobs after the others, and gathers the answers."""

    def __call__(self, path: str, jobs: Sequence[str], *, size: int = ..., **body: str | int | None) -> Records: ...


class Backlog:
    """The calls. Each gives, for every job in the order asked, its id, its state (None if it is absent) and whether
    this call changed anything; NotFound if none of the jobs exists. `reason` is kept in the history and the audit."""

    def __init__(self, transport: Transport, *, each: Each, key: Callable[[], str]) -> None:
        self._transport, self._each, self._key = transport, each, key

    def hold(self, jobs: Sequence[str], *, reason: str | None = None) -> Records:
        """Hold queued jobs aside until they are released."""
        return self._each("/v1/jobs/hold", jobs, reason=reason)

    def release(self, jobs: Sequence[str], *, reason: str | None = None) -> Records:
        """Put held jobs back into the queue, with the age they had."""
        return self._each("/v1/jobs/release", jobs, reason=reason)

    def requeue(self, jobs: Sequence[str], *, key: str | None = None, reason: str | None = None) -> Records:
        """Release held jobs, and make a new job like each one that failed, died or was cancelled: `job` is what will
        run. The same key never makes a second job of the same one; without one a random key makes retries harmless."""
        return self._each("/v1/jobs/requeue", jobs, size=MAX_REQUEUED, key=key or self._key(), reason=reason)

    def prioritise(self, jobs: Sequence[str], priority: int, *, reason: str | None = None) -> Records:
        """Give waiting jobs another priority (lower = more urgent); `priority` is what each has now."""
        return self._each("/v1/jobs/priority", jobs, priority=priority, reason=reason)

    def prioritise_all(
        self, priority: int, *, instance: str | None = None, label: str | None = None, reason: str | None = None
    ) -> int:
        """Give all waiting jobs of an instance, with a label, or both, another priority; returns how many changed.

        It takes as many calls, each a transaction of its own, as there are 10,000 jobs.
        """
        asked = {"priority": priority, "instance": instance, "label": label, "reason": reason}
        body = {name: value for name, value in asked.items() if value is not None}
        changed = 0
        while True:
            answer = self._transport.call("POST", "/v1/jobs/priority", body=body)
            changed += int(answer["changed"])
            if not answer["more"]:
                return changed
