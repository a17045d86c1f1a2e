"""The reference client: the calls of callers and operators to a gateway, over HTTP.

The client repeats a call when its outcome is unknown. That is safe: a submit carries keys, and every other call states
what should be true. Answers are the gateway's JSON objects; `/openapi.json` describes their fields.

One module because a program needs one client for all calls, and its parts share how ids and filters are sent in parts.
"""

import base64
import hashlib
import json
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar
from urllib.parse import quote

from leasehold import wire
from leasehold.calls.backlog import Backlog, Jobs, Records, Told, job_id, slices
from leasehold.calls.graphs import Graphs
from leasehold.calls.operators import Operators
from leasehold.errors import BadInput, LeaseholdError
from leasehold.states import FINAL
from leasehold.transport import Record, TooLarge, Transport

E = TypeVar("E", bound=LeaseholdError)


# Calls on schedules


class Schedules:
    """The client's calls on schedules.

    A name is unique in an instance. `instance`: None = that of the token, or `default` for an operator. Raises NotFound
    if there is no such schedule, Forbidden for the instance of another.
    """

    def __init__(self, transport: Transport, *, key: Callable[[], str]) -> None:
        self._transport, self._key = transport, key

    def put(self, name: str, cron: str, job: Mapping[str, Any], **terms: str | int | float | bool | None) -> Record:
        """Make a schedule, or replace it: a job request without key and instance, at each tick of a cron expression.

        terms: zone, catch_up, catch_up_most, catch_up_seconds, overlap, enabled, instance, take_over: replace one that
        an app declares, too. Raises BadInput, Conflict `declared`.
        """
        return self._transport.call("PUT", _schedule_path(name), body=_schedule(cron, job, terms))

    def plan(self, name: str, cron: str, job: Mapping[str, Any], **terms: str | int | float | bool | None) -> Record:
        """Return the next five `ticks` of the schedule that `put` would make, and if it `exists`. Stores nothing.

        Raises BadInput as `put` does.
        """
        return self._transport.call("POST", _schedule_path(name) + "/plan", body=_schedule(cron, job, terms))

    def show(self, name: str, *, instance: str | None = None) -> Record:
        """Return one schedule with its job, its next tick and its last error."""
        return self._transport.call("GET", _schedule_path(name), query=_of(instance))

    def list(self, *, instance: str | None = None) -> Records:
        """List all schedules, by instance and name."""
        found: Records = []
        while True:
            after = {"after": f"{found[-1]['instance']}/{found[-1]['name']}"} if found else {}
            page: Records = self._transport.call(
                "GET", "/v1/schedules", query={**(_of(instance) or {}), **after, "limit": MAX_IDS}
            )["schedules"]
            found += page
            if len(page) < MAX_IDS:
                return found

    def enable(self, name: str, *, enabled: bool = True, instance: str | None = None) -> Record:
        """Enable a schedule, or disable it with `enabled=False`. What it misses meanwhile is not made up for."""
        return self._transport.call("PATCH", _schedule_path(name), query=_of(instance), body={"enabled": enabled})

    def run_now(self, name: str, *, key: str | None = None, instance: str | None = None) -> "Job":
        """Submit the job of a schedule now, beside its ticks. The same key never makes a second job."""
        path = _schedule_path(name) + "/run"
        answer = self._transport.call("POST", path, query=_of(instance), body={"key": key or self._key()})
        return Job(id=answer["id"], created=answer["created"])

    def apply(
        self, app: str, schedules: Iterable[Mapping[str, Any]], *, prune: bool = False, take_over: bool = False
    ) -> Records:
        """Make the schedules of an app those that are given, all or none; return what became of each.

        A schedule is given by `name`, `cron`, `job` and the terms of `put`. prune: remove those that the app declared
        before and that are not given. take_over: change those that a command has set or another app declares, too.
        Raises BadInput, Conflict `schedule_owned`.
        """
        body = {"app": app, "schedules": [*schedules], "prune": prune, "take_over": take_over}
        done: Records = self._transport.call("POST", "/v1/schedules/apply", body=body)["schedules"]
        return done

    def remove(self, name: str, *, instance: str | None = None, take_over: bool = False) -> None:
        """Remove a schedule. Its jobs stay. take_over: also one that an app declares. Raises Conflict `declared`."""
        query = {**(_of(instance) or {}), **({"take_over": "true"} if take_over else {})}
        self._transport.call("DELETE", _schedule_path(name), query=query or None)


def _of(instance: str | None) -> dict[str, str | int | float] | None:
    return None if instance is None else {"instance": instance}


def _schedule(cron: str, job: Mapping[str, Any], terms: Mapping[str, Any]) -> Record:
    return {"cron": cron, "job": dict(job)} | {key: value for key, value in terms.items() if value is not None}


def _schedule_path(name: str) -> str:
    # What is no name would lead to another route, which says "not found".
    wire.check_name("name", name)
    return f"/v1/schedules/{quote(name, safe='').replace('.', '%2E')}"


#: The most jobs, bytes, and JSON values and keys in one request. A larger submit is split, and each part is a
#: transaction of its own. A part has at most half of the bytes that every gateway accepts, so that none takes too long.
MAX_JOBS, MAX_BYTES, MAX_JSON_NODES = wire.MAX_BATCH, wire.LEAST_BODY // 2, wire.MAX_JSON_NODES
#: The most ids in one request.
MAX_IDS = wire.MAX_LIST
#: Seconds that the largest submit may take in addition to the timeout.
SUBMIT_TIME = 30.0
#: Seconds for which a long poll may be held: less than the usual timeout of proxies.
LONG_POLL = 30.0
#: Seconds for which the same is held where the progress of jobs is wanted.
PROGRESS_POLL = 1.0
_PLACE = re.compile(r"^(?:body\.)?jobs(?:\.|\[)(\d+)\]?")


@dataclass(frozen=True)
class Job(wire.Hinting):
    """A submitted job.

    created: False if an earlier, equal request with the same key had created it.
    advice: how far its estimated run time is from what like jobs took; None unless the gateway says so.
    """

    id: str
    created: bool
    advice: str | None = None
    _hints = (
        "a job",
        {name: f"use pool.{name}(job)" for name in ("wait", "result", "cancel", "output", "logs", "explain")}
        | {"get": "use pool.result(job)", "state": "use pool.job(job)"},
    )


@dataclass(frozen=True)
class Listed:
    """Jobs of a list in its order, and the cursor of those that follow; None if there are none."""

    jobs: Records
    next: str | None


@dataclass(frozen=True)
class Output:
    """Bytes of an attempt's output from offset `start`.

    next: the offset for the next call. final: the job, or the attempt that was asked for, has ended and no output
    follows `data`. lost: the bot was lost before the end, so what it had not sent by then is missing.
    """

    start: int
    data: bytes
    next: int
    state: str
    attempt: int
    final: bool
    lost: bool = False


class Client:
    """Calls one gateway; several threads may share a client.

    url: `http://…`, `https://…` or `http+unix://` followed by the socket's absolute path.
    chance: source of the random keys and of the pauses between retries.
    timeout: seconds for one request, in addition to the time for which a long poll may be held.
    patience: seconds for which lost connections and the statuses 429, 502, 503 and 504 are retried, with full jitter.
    """

    #: The client of all pools of this process, where `instead_of_all` holds; None = each pool has its own.
    substitute: "ClassVar[Client | None]" = None

    def __init__(
        self,
        url: str,
        token: str,
        *,
        chance: random.Random,
        timeout: float = 10.0,
        patience: float = 30.0,
    ) -> None:
        self._begin(Transport(url, token, chance=chance, timeout=timeout, patience=patience), chance)

    @classmethod
    def over(cls, transport: Transport, *, chance: random.Random) -> Self:
        """Return a client whose calls this transport takes."""
        made = cls.__new__(cls)
        made._begin(transport, chance)
        return made

    def _begin(self, transport: Transport, chance: random.Random) -> None:
        self._transport, self._chance = transport, chance
        #: Calls on waiting jobs.
        self.backlog = Backlog(self._transport, key=self._key)
        self.graphs = Graphs(self._transport, key=self._key, held=SUBMIT_TIME)
        self.schedules = Schedules(self._transport, key=self._key)
        self.operators = Operators(self._transport)

    @contextmanager
    def instead_of_all(self) -> Iterator[Self]:
        """Be the client of every pool of this process, for tests of programs whose pools are variables of modules."""
        before, Client.substitute = Client.substitute, self
        try:
            yield self
        finally:
            Client.substitute = before

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, jobs: Iterable[Mapping[str, Any]], *, told: Callable[[list[Job]], object] | None = None
    ) -> list[Job]:
        """Submit job requests; the answers have the order of the requests.

        told: called after each part but the last with the jobs so far.

        A job without a key gets a random one, so that no retry can submit it twice. More than 10,000 jobs or 8 MB are
        sent in parts, and in smaller parts if a proxy accepts less. If a later part is refused, the earlier parts stay
        submitted, and `submitted` of the error holds their ids. Raises BadInput with the job's place in `jobs`;
        Conflict `key_reused` for a key that another request used, `key_taken` for a deduplication key of a job that the
        request refuses or cannot replace; QueueFull.
        """
        keyed = [dict(job) if job.get("key") is not None else {**job, "key": self._key()} for job in jobs]
        answers: list[Job] = []
        left = list(reversed(list(in_parts(keyed))))
        while left:
            part = left.pop()
            try:
                answer = self._transport.call("POST", "/v1/jobs", body={"jobs": part}, held=SUBMIT_TIME)
            except TooLarge as refused:
                if len(part) == 1:
                    raise _after(answers, TooLarge(f"jobs.{len(answers)}", refused.reason)) from None
                middle = len(part) // 2
                left += [part[middle:], part[:middle]]
            except BadInput as refused:
                raise _after(answers, refused.renamed(partial(moved, offset=len(answers)))) from None
            except LeaseholdError as refused:
                raise _after(answers, refused) from refused.__cause__
            else:
                advice = {each["job"]: each["text"] for each in answer.get("advice", ())}
                answers += [
                    Job(id=job["id"], created=job["created"], advice=advice.get(index))
                    for index, job in enumerate(answer["jobs"])
                ]
                if left and told is not None:
                    told(answers)
        return answers

    def plan(self, jobs: Iterable[Mapping[str, Any]]) -> Records:
        """Return what a submit of up to 100 job requests would do, and submit nothing. Raises what `submit` raises."""
        body = {"jobs": [dict(job) for job in jobs]}
        answer = self._transport.call("POST", "/v1/jobs", query={"plan": "true"}, body=body, held=SUBMIT_TIME)
        return answer["jobs"]  # type: ignore[no-any-return]

    def submit_one(self, job: Mapping[str, Any]) -> Job:
        """Submit one job request. Raises as `submit` does; errors name the fields of the job alone."""
        with _alone():
            return self.submit([job])[0]

    def plan_one(self, job: Mapping[str, Any]) -> Record:
        """Return what `submit_one` would do, and submit nothing. Raises as it does."""
        with _alone():
            return self.plan([job])[0]

    def submit_with_callback(
        self,
        jobs: Iterable[Mapping[str, Any]],
        callback: Mapping[str, Any],
        *,
        on: str = "done",
        key: str | None = None,
        instance: str | None = None,
        priority: int | None = None,
    ) -> Record:
        """Submit up to 10,000 jobs and a job that runs once all of them have ended; all or nothing.

        on: `done` = whatever became of the jobs, `succeeded` = if all succeeded, `failed` = if at least one failed,
        died or was cancelled. Otherwise the callback is cancelled. It finds the id of the graph and the counts in its
        variables LEASEHOLD_GRAPH, LEASEHOLD_GRAPH_SUCCEEDED, LEASEHOLD_GRAPH_FAILED (dead ones included) and
        LEASEHOLD_GRAPH_CANCELLED. Jobs have no keys of their own; a repeated call with the same key makes nothing new.

        Returns `graph`, the id for the calls of `graphs`; `jobs`, the ids in the order of the requests; `callback`, its
        job's id; and `created`. Raises BadInput with the job's place in `jobs`.
        """
        key = key or self._key()
        nodes = [{**job, "node": place} for place, job in enumerate(jobs, start=1)]
        given = {"instance": instance, "priority": priority}
        request = {
            # No other graph has this name, so that none is replaced; a repeated call has the same one.
            "name": f"batch-{hashlib.sha256(key.encode()).hexdigest()[:32]}",
            "nodes": nodes,
            "callback": {**callback, "on": on},
            "key": key,
            **{name: value for name, value in given.items() if value is not None},
        }
        try:
            taken = self.graphs.submit(request)
        except BadInput as refused:
            raise refused.renamed(lambda field: re.sub(r"^(?:body\.)?nodes\b", "jobs", field)) from None
        ids = [node["id"] for node in taken["nodes"] if node["id"] != taken["callback"]]
        return {"graph": taken["id"], "jobs": ids, "callback": taken["callback"], "created": taken["created"]}

    def show(self, job: str, *, forecast: bool = False) -> Record:
        """Return one job with its request, state, result and history. Raises NotFound.

        forecast: also when it will start, if it waits; that costs the pool some reads.
        """
        return self._transport.call("GET", _job_path(job), query={"forecast": "true"} if forecast else None)

    def result(self, job: str) -> Any:
        """Return the JSON that the job's command left as its result. Raises NotFound if it left none, or none yet."""
        return self._transport.call("GET", _job_path(job) + "/result")["result"]

    def results(self, jobs: Sequence[str]) -> Records:
        """Return for each job its id and state, and once it is final its exit_code, reason, has_result and result.

        The result is the JSON that the command left, None without one. Raises NotFound if one of the jobs is not there.
        """
        answers: Records = []
        for part in slices(list(dict.fromkeys(jobs))):
            while part:
                # An answer has a bounded number of bytes, and at least one job.
                found: Records = self._transport.call("POST", "/v1/results", body={"ids": part})["jobs"]
                answers += found
                part = part[len(found) :]
        return answers

    def explain(self, job: str) -> Record:
        """Return why a job runs where it runs, or why it does not run. Raises NotFound."""
        return self._transport.call("GET", _job_path(job) + "/explain")

    def cancel(self, jobs: Jobs, *, all_submissions: bool = False, told: Told = None) -> Records:
        """Cancel waiting jobs and ask bots to stop running ones, by their ids or by a filter.

        Returns for each job its id, its state (None if there is no such job) and whether this call changed anything.
        Raises NotFound if none of the jobs exists, Conflict `already_final` if all of them had ended before. A job
        that other submissions share goes on, unless an operator cancels with `all_submissions`. told: called after each
        request but the last, with the number of jobs cancelled so far.
        """
        whole = {"all_submissions": True} if all_submissions else {}
        return self.backlog.each("/v1/jobs/cancel", jobs, ended=self.read_states, told=told, **whole)

    def wait(
        self,
        jobs: Sequence[str],
        *,
        timeout: float | None = None,
        together: bool = False,
        told: Callable[[Record], object] | None = None,
    ) -> Iterator[Record]:
        """Yield each job once it is final; end when all jobs are, or after `timeout` seconds.

        Jobs that one look finds final are yielded in the order of their ends. together: look only once all jobs of a
        request are final, which costs the gateway less. told: called about once a second with each job that is not
        final and has told its progress, if at most 1,000 are waited for. Raises NotFound if one of the jobs does not
        exist.
        """
        pending = dict.fromkeys(job_id(job) for job in jobs)
        deadline = time.monotonic() + wire.waited(timeout)
        while pending:
            left = max(0.0, deadline - time.monotonic())
            looks = told is not None and len(pending) <= MAX_IDS
            hold = min(left, PROGRESS_POLL if looks else LONG_POLL)
            ended = self.look(list(pending), wait=hold, together=together, told=told if looks else None)
            for job in ended:
                pending.pop(job["id"], None)
                yield job
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if pending and ended:
                self._transport.rest(min(left, pause(len(pending))))

    def look(
        self,
        jobs: Sequence[str],
        *,
        wait: float,
        together: bool = False,
        told: Callable[[Record], object] | None = None,
    ) -> Records:
        """Return those jobs that are final, in the order of their ends, once there are any or after `wait` seconds.

        wait: up to 30. together: wait for all jobs of a request. told: called with those that are not final and have
        told their progress. Raises NotFound if one of the jobs does not exist.
        """
        ended: Records = []
        parts = list(slices(jobs))
        if len(parts) > 1 and not together:
            # A job of the last part is not to wait for the hold of all the others.
            wait = min(wait, max(1.0, pause(len(jobs))))
        for part in parts:
            # Once a job of another part has ended, nobody waits for this one.
            held = 0.0 if ended and not together else wait / len(parts)
            found = self.read_states(part, wait=held, first=not together, progress=told is not None)
            if told is not None:
                for job in found:
                    if job.get("progress") is not None:
                        told(job)
            ended += (job for job in found if job["state"] in FINAL)
        return sorted(ended, key=_end)

    def read_states(
        self, jobs: Sequence[str], *, wait: float = 0.0, first: bool = False, progress: bool = False
    ) -> Records:
        """Return the states of at most 1000 jobs once all are final or `wait` (up to 30) seconds have passed.

        first: return once one of them is final. progress: also tell that of those that are not final. Raises NotFound
        if one of them does not exist.
        """
        body: Record = {"ids": list(jobs), "wait": round(wait, 3)} | ({"any": True} if first else {})
        body |= {"progress": True} if progress else {}
        records: Records = self._transport.call("POST", "/v1/jobs/wait", body=body, held=wait)["jobs"]
        return records

    def states(self, jobs: Sequence[str]) -> Records:
        """Return the states of jobs in their order. Raises NotFound if one of them does not exist."""
        found = {job["id"]: job for part in slices(jobs) for job in self.read_states(part)}
        return [found[job_id(job)] for job in jobs]

    def output(self, job: str, *, start: int = 0, wait: float = 0.0, attempt: int | None = None) -> Output:
        """Return output from offset `start`; wait up to `wait` seconds for some unless the job is final.

        attempt: number of the attempt, from 1; None = the newest. Raises NotFound if there is none of that number.
        """
        asked: dict[str, float] = {} if attempt is None else {"attempt": attempt}
        answer = self._transport.call(
            "GET", _job_path(job) + "/output", query={"start": start, "wait": wait} | asked, held=wait
        )
        return Output(
            start=answer["start"],
            data=base64.b64decode(answer["data"]),
            next=answer["next"],
            state=answer["state"],
            attempt=answer["attempt"],
            final=answer["final"],
            lost=answer.get("lost", False),  # older gateways do not say
        )

    def written(self, job: str, *, attempt: int | None = None) -> Iterator[Output]:
        """Yield the output that an attempt, None = the newest, has so far, in pieces; the last piece is empty."""
        start = 0
        while True:
            piece = self.output(job, start=start, attempt=attempt)
            yield piece
            if not piece.data:
                return
            start = piece.next

    def read_output(self, job: str) -> bytes:
        """Return the output that the current attempt has so far."""
        return b"".join(piece.data for piece in self.written(job))

    def follow(self, job: str, *, poll: float = LONG_POLL, idle: bool = False) -> Iterator[Output]:
        """Yield the output as it is written, in pieces, until the job is final.

        The last piece may be empty. When a new attempt begins, the pieces start again at its first byte. poll: seconds
        (up to 30) for which one request is held. idle: yield an empty piece after each request that brought nothing.
        """
        start, attempt = 0, None
        while True:
            piece = self.output(job, start=start, wait=poll)
            if attempt is not None and piece.attempt != attempt and start > 0:
                start, attempt = 0, piece.attempt
                continue
            attempt, start = piece.attempt, piece.next
            if piece.data or piece.final or idle:
                yield piece
            if piece.final:
                return

    def summary(self, metadata: Sequence[str], *, instance: str | None = None) -> Record:
        """Return the sum of all jobs that have each `KEY=VALUE` of `metadata`."""
        query: dict[str, Any] = {"metadata": list(metadata)} | ({} if instance is None else {"instance": instance})
        return self._transport.call("GET", "/v1/metadata/summary", query=query)

    def values(
        self, key: str, *, contains: str | None = None, instance: str | None = None, limit: int = MAX_IDS
    ) -> list[str]:
        """Return up to `limit` values of a key of metadata, those that contain a text, in their order."""
        found: list[str] = []
        asked = {"key": key, "contains": contains, "instance": instance}
        query: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        while True:
            page = self._transport.call(
                "GET", "/v1/metadata", query=query | {"limit": min(limit - len(found), MAX_IDS)}
            )
            found += page["values"]
            if page["next"] is None or len(found) >= limit:
                return found
            query["after"] = page["next"]

    def status(self) -> Record:
        """Return an overview of the pool: jobs, bots, quotas and rates."""
        return self._transport.call("GET", "/v1/status")

    def samples(self, scope: str | None = None, *, hours: float = 1.0) -> Record:
        """Return `samples` of the last `hours`, oldest first: what waited, ran and ended in each minute.

        scope: `pool`, `cohort:NAME` or `instance:NAME`; None = all that the token may see.
        """
        query: dict[str, str | float] = {"hours": hours} | ({} if scope is None else {"scope": scope})
        return self._transport.call("GET", "/v1/samples", query=query)

    def fairness(self, *, hours: float = 1.0) -> Record:
        """Return `samples` of the last `hours`, oldest first: Jain's index of the instances that had waiting jobs."""
        return self._transport.call("GET", "/v1/samples/fairness", query={"hours": hours})

    def bots(self) -> Records:
        """List all bots, by name."""
        found: Records = []
        while True:
            query: dict[str, str | int] = {"limit": MAX_IDS} | ({"after": found[-1]["name"]} if found else {})
            page: Records = self._transport.call("GET", "/v1/bots", query=query)["bots"]
            found += page
            if len(page) < MAX_IDS:
                return found

    def bot(self, name: str) -> Record:
        """Return one bot. Raises NotFound."""
        return self._transport.call("GET", f"/v1/bots/{quote(name, safe='')}")

    def drain(
        self, bot: str, *, draining: bool = True, reason: str | None = None, deadline: float | None = None
    ) -> Record:
        """Drain a bot, or end its drain with `draining=False`. Raises NotFound.

        deadline: seconds after which its running jobs are stopped and queued again; None = never.
        """
        given = {"reason": reason, "deadline": deadline}
        body = {"draining": draining} | {name: value for name, value in given.items() if value is not None}
        return self._transport.call("POST", f"/v1/bots/{quote(bot, safe='')}/drain", body=body)

    def quotas(self) -> Records:
        """List all quotas, by cohort and instance."""
        found: Records = self._transport.call("GET", "/v1/quotas")["quotas"]
        return found

    def set_quota(
        self, cohort: str, instance: str, *, minimum: int = 0, maximum: int | None = None, create: bool = False
    ) -> Record:
        """Set the minimum and maximum units of an instance in a cohort; None = no maximum.

        create: make the instance if it is not there. Raises NotFound.
        """
        body = {"min": minimum, "max": maximum}
        query = {"create": "true"} if create else None
        return self._transport.call("PUT", _quota_path(cohort, instance), query=query, body=body)

    def remove_quota(self, cohort: str, instance: str) -> None:
        """Remove an instance's quota in a cohort: no minimum, no maximum. Raises NotFound if there is none."""
        self._transport.call("DELETE", _quota_path(cohort, instance))

    def list(self, *, limit: int = 100, cursor: str | None = None, **filters: Any) -> Listed:
        """List up to `limit` jobs that pass the filters, which are the fields of `JobFilter`; also sort, order, before.

        A page of the gateway may hold fewer jobs than are asked for; further ones are read until there are enough.
        """
        jobs: Records = []
        while True:
            asked = {**filters, "limit": min(limit - len(jobs), MAX_IDS), "cursor": cursor}
            query = {name: value for name, value in asked.items() if value not in (None, [], ())}
            page = self._transport.call("GET", "/v1/jobs", query=query)
            jobs += page["jobs"]
            cursor = page.get("next")
            if cursor is None or len(jobs) >= limit:
                return Listed(jobs, cursor)

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | float] | None = None,
        body: Record | None = None,
        held: float = 0.0,
    ) -> Record:
        """Call a route that has no method here. `held`: seconds the gateway may take in addition to the timeout."""
        return self._transport.call(method, path, query=query, body=body, held=held)

    def _key(self) -> str:
        return f"{wire.AUTOMATIC}{uuid.UUID(int=self._chance.getrandbits(128), version=4)}"


def pause(pending: int) -> float:
    """Seconds between two looks at jobs that end one by one: a caller reads at most 5,000 states a second."""
    return pending / 5000


def _quota_path(cohort: str, instance: str) -> str:
    return f"/v1/quotas/{quote(cohort, safe='')}/{quote(instance, safe='')}"


def _job_path(job: str) -> str:
    return f"/v1/jobs/{job_id(job)}"


def in_parts(jobs: Sequence[Record]) -> Iterator[Records]:
    """Divide requests, in their order, into parts that are not too large for one call."""
    part: Records = []
    empty = json.dumps({"jobs": []})
    size, nodes = len(empty), wire.count_nodes(empty)
    for number, job in enumerate(jobs):
        try:
            document = wire.written(job)
        except BadInput as refused:
            raise BadInput(f"jobs.{number}.{refused.field}", refused.reason) from None
        # The extra one is the comma between two jobs.
        length, count = len(document.encode()) + 1, wire.count_nodes(document) + 1
        if part and (len(part) == MAX_JOBS or size + length > MAX_BYTES or nodes + count > MAX_JSON_NODES):
            yield part
            part, size, nodes = [], len(empty), wire.count_nodes(empty)
        part.append(job)
        size, nodes = size + length, nodes + count
    if part:
        yield part


def _after(answers: Sequence[Job], refused: E) -> E:
    """Return the refusal of a part, which says what the parts before it have made."""
    if answers:
        refused.submitted = tuple(job.id for job in answers)
        refused.add_note(f"{len(answers)} {'job was' if len(answers) == 1 else 'jobs were'} submitted before")
    return refused


def _end(job: Record) -> datetime:
    ended = job.get("finished_at")
    return datetime.max.replace(tzinfo=UTC) if ended is None else datetime.fromisoformat(ended)


@contextmanager
def _alone() -> Iterator[None]:
    """Let errors name the fields of the only job of a request without its place there."""
    try:
        yield
    except LeaseholdError as refused:
        refused.args = (_without_place(str(refused)),)
        if isinstance(refused, BadInput):
            refused.field = _without_place(refused.field)
        raise


def _without_place(text: str) -> str:
    """Return what is said of the only job of a request without its place there."""
    place = _PLACE.match(text)
    if place is None:
        return text
    rest = text[place.end() :].removeprefix(".")
    return rest if rest and not rest.startswith(":") else f"job{rest}"


def moved(field: str, offset: int) -> str:
    """Return the field of a refusal with the job's place counted over all parts."""
    found = _PLACE.match(field)
    return field if found is None else f"jobs.{int(found[1]) + offset}{field[found.end() :]}"
