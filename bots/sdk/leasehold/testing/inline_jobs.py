"""Tasks that run in this process when they are deferred: for tests without a pool, its database and its bots.

A call is encoded, decoded, run and its result stored by the code of a bot's own process, `runtime.task_runner`. What is
left out is the pool: nothing decides when and where a job may start, so each starts at once, one after the other.
"""

import asyncio
import contextvars
import random
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

from leasehold.client import Client
from leasehold.errors import KEY_TAKEN, Conflict, LeaseholdError, NotFound, NotInline
from leasehold.runtime import attempt as attempts
from leasehold.runtime import retries
from leasehold.runtime.attempt import Attempt
from leasehold.runtime.task_runner import CANCELLED, DONE, TaskCall, load
from leasehold.states import JobState
from leasehold.tasks.periodic import AppRegistry
from leasehold.tasks.task import module_name
from leasehold.testing.inline_graphs import InlineGraphs
from leasehold.testing.inline_job import InlineAttempt, InlineJob
from leasehold.transport import Record, Transport
from leasehold.wire import COMMAND, MAX_AGAINS, PROPERTY

#: Fields of a request that decide neither whether nor where its job may start.
_HEEDED = frozenset(
    {
        *("command", "stdin", "instance", "key", "dedup_key", "max_attempts", "retry_failed", "retry", "properties"),
        *("schedule_after", "delay", "on_conflict", "unique_for", "debounce", "debounce_max"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("label", "metadata", "owner", "project", "timeout_seconds", "queue_timeout_seconds", "deadline_seconds"),
        *("priority", "job_class", "user_priority", "graph_priority", "estimated_seconds", "max_lost"),
    }
)
#: Fields of a node beside those of its job.
_OF_NODES = frozenset({"node", "after"})
#: What the calls are about that only a pool can answer, by their paths.
_FEATURES = (
    (r"/v1/jobs/[^/]+/output", "the output of a job"),
    (r"/v1/jobs/[^/]+/explain", "explain"),
    (r"/v1/jobs/(hold|release|requeue|priority|reschedule)", "what is done to waiting jobs"),
    (r"/v1/jobs", "a list of jobs"),
    (r"/v1/graphs/.*", "what is done to graphs that were submitted"),
    (r"/v1/graphs", "a list of graphs"),
    (r"/v1/bots.*", "bots"),
    (r"/v1/quotas.*", "quotas"),
    (r"/v1/schedules.*", "what is done to schedules besides `apply` and `run_now`"),
)


class InlineCall(TaskCall):
    """One call of a task, as a bot's process makes it; Ctrl-C is for the test, and no error of the task."""

    def _fail(self, error: BaseException) -> int:
        if isinstance(error, KeyboardInterrupt):
            raise error
        return super()._fail(error)

    def run_here(self, attempt: Attempt, *, is_async: bool) -> int:
        """Run the call and return its exit code: in this thread, or beside it if an event loop runs here."""
        context = contextvars.copy_context()
        # A task that defers another one is in a context that has an attempt already.
        context.run(attempts.in_context, attempt)
        if not is_async:
            return context.run(self.run)
        if not _in_loop():
            return context.run(asyncio.run, self.run_in_loop())
        codes: list[int] = []
        thread = threading.Thread(
            target=lambda: codes.append(context.run(asyncio.run, self.run_in_loop())), name="leasehold-inline"
        )
        thread.start()
        thread.join()
        (code,) = codes
        return code


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class InlineJobs(Transport):
    """What `inline` gives: the jobs that were deferred, by id in their order, and the schedules that were applied.

    It answers the calls of a `Client` in the place of a gateway. ignore: fields of requests that need a pool, and that
    are passed over instead of refused.
    """

    def __init__(self, ignore: Sequence[str] = ()) -> None:
        self.url = "inline"
        self.jobs: dict[str, InlineJob] = {}
        #: Each with `name`, `cron`, `job` and the other terms that it was declared with.
        self.schedules: list[Record] = []
        self._ignored = frozenset(ignore)
        #: Submissions that have joined a job, by their ids.
        self._joined: dict[str, InlineJob] = {}
        #: The id and the request of the first submission with each key.
        self._keys: dict[tuple[str, str], tuple[str, Record]] = {}
        #: The newest job with each deduplication key.
        self._unique: dict[tuple[str, str], InlineJob] = {}
        self._changed = threading.Condition()
        self._graphs = InlineGraphs(self._new, self._start)
        # Ids in the order of their making, as a pool's are. Those of another block or process are others, because
        # tasks name by them what they keep elsewhere.
        block = random.SystemRandom().getrandbits(48) << 80 | 0x7000_8000_0000_0000_0000
        self._ids = (uuid.UUID(int=block | number) for number in range(1, 2**48))

    def close(self) -> None:
        """Nothing is open."""

    def rest(self, seconds: float) -> None:
        """Rest, if another thread runs a job. Raises LeaseholdError if not: nothing would happen meanwhile."""
        if all(job.thread in (None, threading.get_ident()) for job in list(self.jobs.values())):
            raise LeaseholdError("what is waited for waits for its time, or for itself: see run_delayed() of inline()")
        time.sleep(seconds)

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Record | bytes | None = None,
        held: float = 0.0,  # noqa: ARG002
    ) -> Record:
        """Answer a call as a gateway would. Raises NotInline for one that needs a pool, and what a Client raises."""
        asked: Record = body if isinstance(body, dict) else {}
        match method, path.strip("/").split("/"):
            case "POST", ["v1", "jobs"] if query:
                raise NotInline("a plan of jobs")
            case "POST", ["v1", "jobs"]:
                return {"jobs": self._submit(asked["jobs"])}
            case "POST", ["v1", "jobs", "wait"]:
                return self._wait(asked)
            case "POST", ["v1", "results"]:
                return {"jobs": [self._result(each) for each in asked["ids"]], "more": False}
            case "POST", ["v1", "jobs", "cancel"] if "ids" in asked:
                return {"jobs": self._cancel(asked["ids"])}
            case "GET", ["v1", "jobs", job]:
                return self._job(job).shown(job)
            case "GET", ["v1", "jobs", job, "result"]:
                if (found := self._job(job)).result is None:
                    raise NotFound(f"job {job} has no result")
                return {"result": found.result, "fence": found.fence}
            case "POST", ["v1", "graphs"]:
                return self._submit_graph(asked)
            case "GET", ["v1", "graphs", graph]:
                return self._graphs.show(unquote(graph), query or {})
            case "POST", ["v1", "schedules", "apply"]:
                return {"schedules": self._apply(asked)}
            case "POST", ["v1", "schedules", name, "run"]:
                return self._run_schedule(name.replace("%2E", "."), asked["key"])
            case _:
                raise NotInline(
                    next((words for form, words in _FEATURES if re.fullmatch(form, path)), f"{method} {path}")
                )

    # Jobs

    def _submit(self, requests: Sequence[Record]) -> list[Record]:
        for request in requests:
            self._check(request)
        answers: list[Record] = []
        new: list[InlineJob] = []
        with self._all_or_none():
            for number, request in enumerate(requests):
                id, created = self._made(number, request)
                answers.append({"id": id, "created": created})
                job = self._job(id)
                if created or (job.state is JobState.QUEUED and job.due is None and job not in new):
                    new.append(job)
        for job in new:
            self._start(job)
        return answers

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Take back what was made if one request of a list is refused, as a pool does."""
        with self._changed:
            before = dict(self.jobs), dict(self._joined), dict(self._keys), dict(self._unique)
            waiting = [(job, job.request, job.due, job.kept_until) for job in self.jobs.values() if not job.is_final]
            try:
                yield
            except LeaseholdError:
                self.jobs, self._joined, self._keys, self._unique = before
                for job, request, due, kept_until in waiting:
                    job.request, job.due, job.kept_until = request, due, kept_until
                raise

    def _submit_graph(self, graph: Record) -> Record:
        for name in sorted(graph.keys() & {"callback"} - self._ignored):
            raise NotInline(f"the {name} of a graph", ignored_as=name)
        for node in graph["nodes"]:
            self._check(node, _OF_NODES)
        return self._graphs.submit(graph)

    def _new(self, request: Record) -> InlineJob:
        """Make a job that waits."""
        with self._changed:
            id = str(next(self._ids))
            job = self.jobs[id] = InlineJob(id, request)
        return job

    def _start(self, job: InlineJob) -> None:
        """Run a job, or let it wait for its time."""
        job.state, job.due = JobState.QUEUED, _due(job.request, datetime.now(UTC))
        if job.due is None:
            self._run(job)

    def run_delayed(self) -> int:
        """Run the jobs that wait for a time, in the order of their times, as if these had come; return how many.

        Those that they submit for later wait for the next call.
        """
        waiting = [job for job in self.jobs.values() if job.due is not None]
        for job in sorted(waiting, key=lambda job: job.due or job.created_at):
            job.due = None
            self._run(job)
        return len(waiting)

    def _check(self, request: Record, known: frozenset[str] = frozenset()) -> None:
        if request["command"][0] != COMMAND:
            raise NotInline("a command, which a bot runs; `inline` runs tasks")
        # The lock of a task's `concurrency` names its slots. Here nothing runs at once.
        of_concurrency = {"locks"} if all(":" in lock for lock in request.get("locks", ())) else set[str]()
        for name in sorted(request.keys() - of_concurrency - _HEEDED - _WITHOUT_EFFECT - known - self._ignored):
            raise NotInline(name, ignored_as=name)
        more = sorted(request["properties"].keys() - {PROPERTY})
        if more and "properties" not in self._ignored:
            raise NotInline(f"properties, such as '{more[0]}'", ignored_as="properties")

    def _made(self, number: int, request: Record) -> tuple[str, bool]:
        """Return the id of the submission, and whether it has made a new job."""
        instance = str(request.get("instance"))
        key = (instance, request["key"])
        if key in self._keys:
            id, first = self._keys[key]
            if first != request:
                raise Conflict("key_reused", f"jobs[{number}].key: '{key[1]}' was used before for a different request")
            return id, False
        joins = (instance, request["dedup_key"]) if "dedup_key" in request else None
        before = None if joins is None else self._unique.get(joins)
        taken = None if before is None else self._taken(number, before, request)
        id = taken or str(next(self._ids))
        if taken is None:
            self.jobs[id] = InlineJob(id, request)
            if joins is not None:
                self._unique[joins] = self.jobs[id]
                self.jobs[id].keep_key(request)
        self._keys[key] = id, request
        return id, taken is None

    def _taken(self, number: int, job: InlineJob, request: Record) -> str | None:
        """Return the id of a submission that the job with its deduplication key takes; None if a new one is made.

        It is joined, replaced or in the way as in a pool. Raises Conflict `key_taken`.
        """
        if job.is_final and not job.keeps_key:
            return None
        way = request.get("on_conflict") or ("replace" if "debounce" in request else "join")
        is_shared = job in self._joined.values()
        if way == "refuse" or (way == "replace" and is_shared and not job.is_final):
            said = f"job {job.id}, which " + ("several submissions share" if way == "replace" else f"is {job.state}")
            raise Conflict(KEY_TAKEN, f"jobs.{number}.dedup_key: '{request['dedup_key']}' is that of {said}")
        if job.is_final:
            return job.id
        if way == "replace" and job.due is not None:
            job.request, job.due = request, _due(request, datetime.now(UTC))
            if job.due is not None and "debounce_max" in request:
                job.due = min(job.due, job.created_at + timedelta(seconds=request["debounce_max"]))
            job.keep_key(request)
            return job.id
        if way == "replace" and not job.keeps_key:
            return None
        id = str(next(self._ids))
        self._joined[id] = job
        return id

    def _run(self, job: InlineJob) -> None:
        """Run a job to its end: once, and again while it fails and has tries left, without a pause between them."""
        place, name = job.request["command"][1:]
        pool = _pool_at(place)
        task = pool.tasks.get(name)
        job.inputs = self._graphs.inputs_of(job)
        most = job.request.get("max_attempts", 5) if job.request.get("retry_failed") else 1
        again = 0
        while not job.is_final:
            with self._changed:
                job.state, job.attempts, job.fence = JobState.RUNNING, job.attempts + 1, job.fence + 1
                job.started_at, job.thread = datetime.now(UTC), threading.get_ident()
                attempt = InlineAttempt(job)
                call = job.call = InlineCall(pool, name, job.request["stdin"], attempt)
                job.result = None
            begun = time.monotonic()
            code = call.run_here(attempt, is_async=task is not None and task.is_async)
            job.exit_code, job.seconds = code, time.monotonic() - begun
            cancelling = attempt.cancelled
            asked = retries.asks_again(code, job.result)
            if asked is not None and again < MAX_AGAINS and not cancelling:
                again, job.attempts = again + 1, job.attempts - 1
                continue
            retried = retries.is_retried(job.request.get("retry", {}), exit_code=code, result=job.result)
            if code != DONE and job.attempts < most and retried and not cancelling:
                continue
            state = JobState.SUCCEEDED if code == DONE else JobState.FAILED
            with self._changed:
                job.end(
                    JobState.CANCELLED if code == CANCELLED and cancelling else state,
                    None if code == DONE else retries.error_in_words(job.result) or f"exit code {code}",
                )
                self._changed.notify_all()
        self._graphs.ended(job)

    def _job(self, job: str) -> InlineJob:
        found = self.jobs.get(job) or self._joined.get(job)
        if found is None:
            raise NotFound(f"job {job} does not exist")
        return found

    def _wait(self, asked: Record) -> Record:
        """Tell the states of jobs. They have ended, unless another thread runs them, or a task waits for itself."""
        found = [self._job(each) for each in asked["ids"]]
        enough = any if asked.get("any") else all
        with self._changed:
            if asked["wait"] > 0 and not enough(job.is_final for job in found):
                for job in found:
                    if job.thread == threading.get_ident():
                        raise LeaseholdError(f"job {job.id} waits for its own end")
                    if job.due is not None:
                        raise LeaseholdError(f"job {job.id} waits for its time: run_delayed() of inline() runs it")
                self._changed.wait_for(lambda: enough(job.is_final for job in found), asked["wait"])
            told = [job.told(id) for id, job in zip(asked["ids"], found, strict=True)]
            return {"jobs": told, "done": all(job.is_final for job in found)}

    def _result(self, id: str) -> Record:
        job = self._job(id)
        told = {"exit_code": job.exit_code, "reason": job.reason, "result": job.result}
        known = told if job.is_final else dict.fromkeys(told)
        return {"id": id, "state": str(job.state), "has_result": known["result"] is not None, **known}

    def _cancel(self, ids: Sequence[str]) -> list[Record]:
        found = [self.jobs.get(each) or self._joined.get(each) for each in ids]
        known = [job for job in found if job is not None]
        if not known:
            raise NotFound("none of these jobs exists")
        if all(job.is_final for job in known):
            raise Conflict("already_final", "all of these jobs have ended")
        answers: list[Record] = []
        for id, job in zip(ids, found, strict=True):
            changed = job is not None and (job.call is not None or job.due is not None)
            if job is not None and job.call is not None:
                job.state = JobState.CANCELLING
                job.call.mark_cancelled()
            elif job is not None and job.due is not None:
                job.end(JobState.CANCELLED, None)
                self._graphs.ended(job)
            answers.append({"id": id, "state": None if job is None else str(job.state), "changed": changed})
        return answers

    # Schedules

    def _apply(self, asked: Record) -> list[Record]:
        """Take the schedules of an app. Their ticks do not come; `client.schedules.run_now(name)` makes one."""
        before = {each["name"]: each for each in self.schedules}
        given = {each["name"]: each for each in asked["schedules"]}
        for request in given.values():
            self._check(request["job"])
        left = {name: each for name, each in before.items() if name not in given and each["app"] == asked["app"]}
        kept = {name: each for name, each in before.items() if not (asked["prune"] and name in left)}
        new = {name: {**each, "app": asked["app"]} for name, each in given.items()}
        self.schedules = list({**kept, **new}.values())

        def outcome(name: str) -> str:
            return "created" if name not in before else "unchanged" if before[name] == new[name] else "changed"

        outcomes = {name: outcome(name) for name in new} | dict.fromkeys(left, "removed" if asked["prune"] else "left")
        return [
            {
                "name": name,
                "instance": (new | left)[name].get("instance", "default"),
                "outcome": what,
                "next_tick": None,
            }
            for name, what in outcomes.items()
        ]

    def _run_schedule(self, name: str, key: str) -> Record:
        for each in self.schedules:
            if each["name"] == name:
                own = {"instance": each["instance"]} if "instance" in each else {}
                (made,) = self._submit([{**each["job"], **own, "key": key}])
                return made
        raise NotFound(f"schedule '{name}' does not exist")


def _due(request: Record, now: datetime) -> datetime | None:
    """Return when a job may start at the earliest; None = at once."""
    if "schedule_after" in request:
        due = datetime.fromisoformat(request["schedule_after"])
        return due if due > now else None
    seconds = request.get("delay") or request.get("debounce")
    return now + timedelta(seconds=seconds) if seconds else None


def _pool_at(place: str) -> AppRegistry:
    """Return the pool that a bot would import. The main program has another name there, and is not run once more."""
    module, _, attribute = place.partition(":")
    main = sys.modules["__main__"]
    if module not in sys.modules and getattr(main, "__file__", None) and module == module_name("__main__"):
        found: AppRegistry = getattr(main, attribute)
        return found
    return load(place)


@contextmanager
def inline(*, ignore: Sequence[str] = ()) -> Iterator[InlineJobs]:
    """Run the tasks of all pools in this process: each when it is deferred, before `defer` returns.

    No pool is called, and none has to be there. Calls, results and errors go through the same code as on a bot. A task
    that fails is tried again at once as often as its `retries` say. ignore: fields that need a pool and are to be
    passed over, such as `locks` or `properties`; otherwise such a field, and any call that needs one, raises NotInline.
    """
    jobs = InlineJobs(ignore)
    with Client.over(jobs, chance=random.SystemRandom()).instead_of_all():
        yield jobs
