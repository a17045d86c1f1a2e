"""The client's calls on waiting jobs: hold, release, requeue, priority, start."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from leasehold import wire
from leasehold.errors import BadInput, Conflict, LeaseholdError
from leasehold.transport import Record, Transport

Records = list[Record]

#: The most ids in one requeue, which may make a new job for each.
MAX_REQUEUED = 500

#: Jobs by their ids, or all that pass a filter.
Jobs = Sequence[str] | Mapping[str, Any]
#: Takes the number of jobs that an act has changed so far.
Told = Callable[[int], object] | None


def job_id(job: str) -> str:
    """Return the id of a job in its usual form. Raises BadInput if the text is none."""
    try:
        return str(uuid.UUID(job))
    except ValueError:
        raise BadInput("id", f"'{wire.escaped(job, 80)}' is not the id of a job") from None


def slices(jobs: Sequence[str], size: int = wire.MAX_LIST) -> Iterator[list[str]]:
    """Divide ids, in their order, into parts for one request each."""
    ids = [job_id(job) for job in jobs]
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


class Backlog:
    """The client's calls on waiting jobs: hold, release, requeue, priority, start.

    Jobs are given by their ids, or by a filter with the fields of `JobFilter`: all that pass it are acted on, up to 500
    in a transaction. Each call returns, for every job in the given order, its id, its state (None if there is no such
    job) and whether the call changed anything. Raises NotFound if none of the given ids exists. `reason` is stored in
    the jobs' history and in the audit. told: called after each request but the last of an act on many jobs, with the
    number of jobs changed so far.
    """

    def __init__(self, transport: Transport, *, key: Callable[[], str]) -> None:
        self._transport, self._key = transport, key

    def each(
        self,
        path: str,
        jobs: Jobs,
        *,
        size: int = wire.MAX_LIST,
        ended: Callable[[Sequence[str]], Records] | None = None,
        told: Told = None,
        **body: str | float | None,
    ) -> Records:
        """Call a route for jobs in parts of at most `size`, and join the answers.

        ended: reads the states of ids, for a route that answers Conflict if all jobs of a part had ended before. The
        states are then the answer of that part, unless all parts are answered so. Without it a Conflict is raised.
        """
        given = {name: value for name, value in body.items() if value is not None}
        answers: Records = []
        changed = 0
        left: list[Record]
        if isinstance(jobs, Mapping):
            left, ended = [{"where": dict(jobs)}], None
        else:
            left = [{"ids": part} for part in slices(jobs, size)]
        parts, refused = len(left), 0
        try:
            while left:
                asked = left.pop(0)
                try:
                    answer = self._transport.call("POST", path, body={**asked, **given})
                except Conflict:
                    refused += 1
                    if ended is None or refused == parts:
                        raise
                    found = ended(asked["ids"])
                    answer = {"jobs": [{"id": job["id"], "state": job["state"], "changed": False} for job in found]}
                answers += answer["jobs"]
                changed += sum(job["changed"] for job in answer["jobs"])
                if answer.get("next") is not None:
                    left.append({**asked, "cursor": answer["next"]})
                if left and told is not None:
                    told(changed)
        except LeaseholdError as error:
            # The calls before it were transactions of their own.
            if changed:
                key = f", with the key {given['key']}" if "key" in given else ""
                error.add_note(f"{changed} {'job was' if changed == 1 else 'jobs were'} changed before{key}")
            raise
        return answers

    def hold(self, jobs: Jobs, *, reason: str | None = None, told: Told = None) -> Records:
        """Hold queued jobs aside until they are released."""
        return self.each("/v1/jobs/hold", jobs, reason=reason, told=told)

    def release(self, jobs: Jobs, *, reason: str | None = None, told: Told = None) -> Records:
        """Return held jobs to the queue with the age that they had."""
        return self.each("/v1/jobs/release", jobs, reason=reason, told=told)

    def requeue(self, jobs: Jobs, *, key: str | None = None, reason: str | None = None, told: Told = None) -> Records:
        """Release held jobs, and submit a copy of each job that failed, died or was cancelled.

        In the answer `job` is the id of the job that will run. The same key never makes a second copy of a job.
        Without a key the client draws a random one, so that its own retries make no second copy.
        """
        return self.each("/v1/jobs/requeue", jobs, size=MAX_REQUEUED, key=key or self._key(), reason=reason, told=told)

    def prioritise(self, jobs: Jobs, priority: int, *, reason: str | None = None, told: Told = None) -> Records:
        """Give waiting jobs another priority (lower = more urgent); the answer holds each job's new priority."""
        return self.each("/v1/jobs/priority", jobs, priority=priority, reason=reason, told=told)

    def reschedule(
        self,
        jobs: Jobs,
        *,
        schedule_after: str | None = None,
        delay: float | None = None,
        reason: str | None = None,
        told: Told = None,
    ) -> Records:
        """Let waiting jobs start at a time with an offset, or in `delay` seconds, 0 = at once, at the earliest.

        The answer holds each job's start, `starts_at`; None if it may start now, or does not wait.
        """
        return self.each(
            "/v1/jobs/reschedule", jobs, schedule_after=schedule_after, delay=delay, reason=reason, told=told
        )

    def prioritise_all(
        self,
        priority: int,
        *,
        instance: str | None = None,
        label: str | None = None,
        reason: str | None = None,
        told: Told = None,
    ) -> int:
        """Give all waiting jobs of an instance, with a label, or both, another priority; return how many changed.

        Makes one call for every 10,000 jobs. Each call is a transaction of its own.
        """
        asked = {"priority": priority, "instance": instance, "label": label, "reason": reason}
        body = {name: value for name, value in asked.items() if value is not None}
        changed = 0
        while True:
            answer = self._transport.call("POST", "/v1/jobs/priority", body=body)
            changed += int(answer["changed"])
            if not answer["more"]:
                return changed
            if told is not None:
                told(changed)
