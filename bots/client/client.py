"""The reference client: what callers and operators may ask a gateway, over HTTP.

Every call may safely be repeated (a submit carries keys, everything else states what should be true), so every call is
repeated when its outcome is unknown. Answers are the gateway's JSON objects; `/openapi.json` describes their fields.
"""

import base64
import json
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import quote

from bots.client.transport import Record, TooLarge, Transport
from schema import clock, validation
from schema.errors import BadInput, Conflict
from schema.states import FINAL

# What callers may do to jobs that wait: hold, release, queue again, another priority. A part of the client.


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


# What callers may do with graphs of jobs. A part of the client.


#: Nodes, and graphs, in one answer.
MAX_NODES, MAX_GRAPHS = 1000, 100


class Graphs:
    """The calls. A graph is named by its id, or by its name, of several the newest; NotFound if there is none."""

    def __init__(self, transport: Transport, *, key: Callable[[], str], held: float) -> None:
        self._transport, self._key, self._held = transport, key, held

    def submit(self, graph: Mapping[str, Any]) -> Record:
        """Submit a graph, all or nothing; an unfinished one of its name is replaced.

        Without a key it gets a random one, so that no retry can submit it twice. Raises BadInput with the place in
        `graph`, also for a circle; Conflict `key_reused`, and QueueFull if a label has no room for its jobs.
        """
        keyed = dict(graph) if graph.get("key") is not None else {**graph, "key": self._key()}
        return self._transport.call("POST", "/v1/graphs", body=keyed, held=self._held)

    def show(self, graph: str, *, instance: str | None = None, nodes: int = 0) -> Record:
        """One graph, how many of its nodes are in which state, and as `page` the first `nodes` (up to 1000) of them."""
        return self._show(graph, {"instance": instance, "limit": nodes})

    def nodes(self, graph: str, *, instance: str | None = None) -> Iterator[Record]:
        """All nodes of a graph, by number."""
        last = -1
        while True:
            page = self._show(graph, {"instance": instance, "limit": MAX_NODES, "after": last})["page"]
            yield from page
            if len(page) < MAX_NODES:
                return
            last = page[-1]["node"]

    def list(self, **filters: str | int | bool | None) -> Records:
        """Graphs, newest first. Filters: instance, open (not over yet), limit (up to 100), before (a graph's id)."""
        query = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in filters.items()
            if value is not None
        }
        found: Records = self._transport.call("GET", "/v1/graphs", query=query)["graphs"]
        return found

    def cancel(self, graph: str, *, instance: str | None = None) -> Record:
        """Cancel what waits in a graph and stop what runs; `jobs` is how many that were."""
        body = {"graph": graph} | ({} if instance is None else {"instance": instance})
        return self._transport.call("POST", "/v1/graphs/cancel", body=body)

    def _show(self, graph: str, query: Mapping[str, str | int | None]) -> Record:
        given = {name: value for name, value in query.items() if value is not None}
        return self._transport.call("GET", _path(graph), query=given)


def _path(graph: str) -> str:
    return f"/v1/graphs/{quote(graph, safe='')}"


#: Jobs, bytes, and JSON values and keys in one request. Larger submits are split, and each part is a transaction of its
#: own: half of what every gateway takes makes no part last too long.
MAX_JOBS, MAX_BYTES, MAX_JSON_NODES = validation.MAX_BATCH, validation.LEAST_BODY // 2, validation.MAX_JSON_NODES
#: Ids in one request.
MAX_IDS = validation.MAX_LIST
#: Seconds, on top of the timeout, in which the largest submit must be done.
SUBMIT_TIME = 30.0
#: Seconds one long poll may be held: below what proxies usually cut.
LONG_POLL = 30.0
_PLACE = re.compile(r"^(?:body\.)?jobs(?:\.|\[)(\d+)\]?")


@dataclass(frozen=True)
class Submitted:
    """One job the pool has taken. `created` is false if the key had been used before, by the same request."""

    id: str
    created: bool


@dataclass(frozen=True)
class Output:
    """Bytes of the current attempt's output from offset `start`; ask again with `next`.

    `final`: the job is over and nothing follows after `data`.
    """

    start: int
    data: bytes
    next: int
    state: str
    attempt: int
    final: bool


class Client:
    """Talks to one gateway; may be used by several threads.

    url: `http://…`, `https://…` or `http+unix://` followed by the socket's absolute path.
    timeout: seconds for one request, on top of what a long poll asks for.
    patience: seconds for which lost connections and 429, 502, 503 and 504 are retried, with full jitter.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        chance: random.Random,
        timeout: float = 10.0,
        patience: float = 30.0,
    ) -> None:
        self._transport = Transport(url, token, chance=chance, timeout=timeout, patience=patience)
        self._chance = chance
        #: What may be done to jobs that wait.
        self.backlog = Backlog(self._transport, each=self._each, key=self._key)
        self.graphs = Graphs(self._transport, key=self._key, held=SUBMIT_TIME)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, jobs: Iterable[Mapping[str, Any]]) -> list[Submitted]:
        """Submit job requests; the answers stand in their order.

        A job without a key gets a random one, so that no retry can double it. Over 10,000 jobs or 8 MB are sent in
        parts, and in smaller ones where something on the way takes less: if a later part is refused, the earlier ones
        stay submitted. Raises BadInput with the place of the job in `jobs`, and Conflict `key_reused` for a key that
        was used by another request, and QueueFull if a label has no room for so many more jobs at the moment.
        """
        keyed = [dict(job) if job.get("key") is not None else {**job, "key": self._key()} for job in jobs]
        answers: list[Submitted] = []
        parts = list(reversed(list(_parts(keyed))))
        while parts:
            part = parts.pop()
            try:
                answer = self._transport.call("POST", "/v1/jobs", body={"jobs": part}, held=SUBMIT_TIME)
            except TooLarge as refused:
                if len(part) == 1:
                    raise TooLarge(f"jobs.{len(answers)}", refused.reason) from None
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
            except BadInput as refused:
                raise BadInput(_moved(refused.field, len(answers)), refused.reason) from None
            else:
                answers += [Submitted(id=job["id"], created=job["created"]) for job in answer["jobs"]]
        return answers

    def show(self, job: str) -> Record:
        """Everything the pool tells of one job. Raises NotFound."""
        return self._transport.call("GET", _job_path(job))

    def explain(self, job: str) -> Record:
        """Why a job runs where it runs, or why it does not run. Raises NotFound."""
        return self._transport.call("GET", _job_path(job) + "/explain")

    def cancel(self, jobs: Sequence[str], *, all_submissions: bool = False) -> Records:
        """Ask to cancel; for each job its id, its state (None if it is absent) and whether this call changed
        anything. Raises NotFound if none of them exists, Conflict `already_final` if all had ended before.

        A job that other submissions share goes on, unless an operator cancels with `all_submissions`.
        """
        answers: Records = []
        parts = list(_slices(jobs))
        whole = {"all_submissions": True} if all_submissions else {}
        refused = 0
        for part in parts:
            try:
                answers += self._transport.call("POST", "/v1/jobs/cancel", body={"ids": part} | whole)["jobs"]
            except Conflict:
                refused += 1
                if refused == len(parts):
                    raise
                answers += [
                    {"id": job["id"], "state": job["state"], "changed": False} for job in self.read_states(part)
                ]
        return answers

    def wait(self, jobs: Sequence[str], *, timeout: float | None = None, poll: float = LONG_POLL) -> Iterator[Record]:
        """Yield each job once it is final; end when all are, or after `timeout` seconds.

        `poll` is the longest time one request is held, seconds: finished jobs are told at least that often.
        """
        pending = dict.fromkeys(_job_id(job) for job in jobs)
        deadline = None if timeout is None else clock.monotonic() + timeout
        while pending:
            parts = list(_slices(list(pending)))
            for part in parts:
                left = poll if deadline is None else min(poll, max(0.0, deadline - clock.monotonic()))
                for job in self.read_states(part, wait=min(left, LONG_POLL) / len(parts)):
                    if job["state"] in FINAL:
                        pending.pop(job["id"], None)
                        yield job
            if deadline is not None and clock.monotonic() >= deadline:
                return

    def read_states(self, jobs: Sequence[str], *, wait: float = 0.0) -> Records:
        """The state of at most 1000 jobs, as soon as all are final or `wait` (up to 30) seconds have passed."""
        body = {"ids": list(jobs), "wait": round(wait, 3)}
        records: Records = self._transport.call("POST", "/v1/jobs/wait", body=body, held=wait)["jobs"]
        return records

    def output(self, job: str, *, start: int = 0, wait: float = 0.0) -> Output:
        """Output from offset `start`; held up to `wait` seconds while there is none and the job is not final."""
        answer = self._transport.call(
            "GET", _job_path(job) + "/output", query={"start": start, "wait": wait}, held=wait
        )
        return Output(
            start=answer["start"],
            data=base64.b64decode(answer["data"]),
            next=answer["next"],
            state=answer["state"],
            attempt=answer["attempt"],
            final=answer["final"],
        )

    def written(self, job: str) -> Iterator[Output]:
        """The output of the current attempt so far, in pieces; the last one is empty."""
        start = 0
        while True:
            piece = self.output(job, start=start)
            yield piece
            if not piece.data:
                return
            start = piece.next

    def follow(self, job: str) -> Iterator[Output]:
        """The output as it is written, in pieces, until the job is final; the last one may be empty. A new attempt
        starts again at its first byte."""
        start, attempt = 0, None
        while True:
            piece = self.output(job, start=start, wait=LONG_POLL)
            if attempt is not None and piece.attempt != attempt and start > 0:
                start, attempt = 0, piece.attempt
                continue
            attempt, start = piece.attempt, piece.next
            if piece.data or piece.final:
                yield piece
            if piece.final:
                return

    def status(self) -> Record:
        """The pool at a glance."""
        return self._transport.call("GET", "/v1/status")

    def bots(self) -> Records:
        """Every bot the pool knows, by name."""
        found: Records = []
        while True:
            query: dict[str, str | int] = {"limit": MAX_IDS} | ({"after": found[-1]["name"]} if found else {})
            page: Records = self._transport.call("GET", "/v1/bots", query=query)["bots"]
            found += page
            if len(page) < MAX_IDS:
                return found

    def bot(self, name: str) -> Record:
        """One bot. Raises NotFound."""
        return self._transport.call("GET", f"/v1/bots/{quote(name, safe='')}")

    def drain(
        self, bot: str, *, draining: bool = True, reason: str | None = None, deadline: float | None = None
    ) -> Record:
        """Ask a bot to take no more work, or with `draining=False` to go on. What it still runs after `deadline`
        seconds is stopped and queued again; None is never. Raises NotFound."""
        given = {"reason": reason, "deadline": deadline}
        body = {"draining": draining} | {name: value for name, value in given.items() if value is not None}
        return self._transport.call("POST", f"/v1/bots/{quote(bot, safe='')}/drain", body=body)

    def quotas(self) -> Records:
        """Every quota, by cohort and instance."""
        found: Records = self._transport.call("GET", "/v1/quotas")["quotas"]
        return found

    def set_quota(self, cohort: str, instance: str, *, minimum: int = 0, maximum: int | None = None) -> Record:
        """Give the instance this minimum and maximum, in units, in the cohort; None is no maximum. Raises NotFound."""
        return self._transport.call("PUT", _quota_path(cohort, instance), body={"min": minimum, "max": maximum})

    def remove_quota(self, cohort: str, instance: str) -> None:
        """Let the instance have any number of units in the cohort. Raises NotFound if it has no quota there."""
        self._transport.call("DELETE", _quota_path(cohort, instance))

    def list(self, **filters: str | int | None) -> Records:
        """Jobs, newest first. Filters: instance, state, label, limit (up to 1000), before (a job's id)."""
        query = {name: value for name, value in filters.items() if value is not None}
        records: Records = self._transport.call("GET", "/v1/jobs", query=query)["jobs"]
        return records

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | float] | None = None,
        body: Record | None = None,
        held: float = 0.0,
    ) -> Record:
        """One request to a route that has no method here; `held`: seconds that the gateway may take for it."""
        return self._transport.call(method, path, query=query, body=body, held=held)

    def _each(self, path: str, jobs: Sequence[str], *, size: int = MAX_IDS, **body: str | int | None) -> Records:
        given = {name: value for name, value in body.items() if value is not None}
        answers: Records = []
        for part in _slices(jobs, size):
            answers += self._transport.call("POST", path, body={"ids": part, **given})["jobs"]
        return answers

    def _key(self) -> str:
        return str(uuid.UUID(int=self._chance.getrandbits(128), version=4))


def _quota_path(cohort: str, instance: str) -> str:
    return f"/v1/quotas/{quote(cohort, safe='')}/{quote(instance, safe='')}"


def _job_path(job: str) -> str:
    return f"/v1/jobs/{_job_id(job)}"


def _job_id(job: str) -> str:
    try:
        return str(uuid.UUID(job))
    except ValueError:
        raise BadInput("id", f"'{validation.escaped(job, 80)}' is not the id of a job") from None


def _slices(jobs: Sequence[str], size: int = MAX_IDS) -> Iterator[list[str]]:
    ids = [_job_id(job) for job in jobs]
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def _parts(jobs: Sequence[Record]) -> Iterator[Records]:
    part: Records = []
    empty = json.dumps({"jobs": []})
    size, nodes = len(empty), validation.count_nodes(empty)
    for job in jobs:
        # Escapes and spaces, which are not sent, make this more than what is; one more for the comma between two jobs.
        document = json.dumps(job)
        length, count = len(document) + 1, validation.count_nodes(document) + 1
        if part and (len(part) == MAX_JOBS or size + length > MAX_BYTES or nodes + count > MAX_JSON_NODES):
            yield part
            part, size, nodes = [], len(empty), validation.count_nodes(empty)
        part.append(job)
        size, nodes = size + length, nodes + count
    if part:
        yield part


def _moved(field: str, offset: int) -> str:
    """The field of a refusal with the job's place counted over all parts."""
    found = _PLACE.match(field)
    return field if found is None else f"jobs.{int(found[1]) + offset}{field[found.end() :]}"
