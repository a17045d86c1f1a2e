"""Python functions as jobs: what is submitted for a call, what is refused before that, and what comes back."""

import asyncio
import copy
import hashlib
import json
import math
import pickle
import random
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, LiteralString
from zoneinfo import ZoneInfo

import django
import leasehold
import psycopg
import pytest
from django.conf import settings
from django.db.utils import ConnectionHandler
from leasehold.async_pool import AsyncPool
from leasehold.client import Client, Job
from leasehold.errors import (
    BadInput,
    Conflict,
    Forbidden,
    LeaseholdError,
    NotFound,
    NotReady,
    NotSucceeded,
    QueueFull,
    TaskFailed,
    TimedOut,
)
from leasehold.graphs import GraphRequest
from leasehold.jobs import job_ids
from leasehold.pool import Pool
from leasehold.states import EndKind, JobState
from leasehold.tasks.task import TaskJob
from leasehold.testing import inline
from leasehold.transaction import submit_in
from psycopg.rows import dict_row
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from schema.postgres.engine import Database, libpq_url
from tests.support.apps import task_app
from tests.support.http import JOB_COMMANDING, Answer, Gateway, ReceivedRequest, problem

A_JOB = "0196f0a0-0000-7000-8000-000000000001"


@pytest.fixture
def program(stands: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway that accepts jobs, and that the tasks of `task_app` call."""
    client = Client(stands.url, "lh_operator_x_y", chance=random.Random(1), patience=0.0)
    monkeypatch.setitem(vars(task_app.pool), "_client", client)
    with client:
        yield stands


def test_a_call_is_an_ordinary_job_with_the_options_of_its_task(program: Gateway) -> None:
    task_app.echo.defer("käse")
    ((sent,),) = [asked.body["jobs"] for asked in program.asked]
    assert sent.pop("key"), "no retry of the request makes a second job"
    assert json.loads(sent.pop("stdin")) == {"args": ["käse"], "kwargs": {}}
    assert sent == {
        "command": ["leasehold-task", "tests.support.apps.task_app:pool", "tests.support.apps.task_app.echo"],
        "properties": {"app": "tests"},
        "label": "tested",
        "priority": 7,
        "timeout_seconds": 60,
        "max_attempts": 3,
        "retry_failed": True,
        "metadata": {"kind": "echo"},
        "dedup_key": "tests.support.apps.task_app.echo:käse",
    }


def test_a_batch_is_one_request_and_named_arguments_keep_their_names(program: Gateway) -> None:
    jobs = task_app.add.batch([(1, 2), {"right": 4, "left": 3}])
    (asked,) = program.asked
    calls = [json.loads(job["stdin"]) for job in asked.body["jobs"]]
    assert calls == [{"args": [1, 2], "kwargs": {}}, {"args": [], "kwargs": {"right": 4, "left": 3}}]
    assert len(jobs) == 2
    task_app.add.using(key="night").batch([(1, 2), (3, 4)])
    assert [job["key"] for job in program.asked[-1].body["jobs"]] == ["night-0", "night-1"]
    assert task_app.add(1, right=2) == 3, "a task that is called runs here"


def test_tasks_and_errors_go_from_one_process_to_another() -> None:
    assert pickle.loads(pickle.dumps(task_app.add)) is task_app.add
    later = pickle.loads(pickle.dumps(task_app.add.after(60)))
    assert later.request(1, 2) == task_app.add.after(60).request(1, 2)
    errors: list[LeaseholdError] = [
        BadInput("a", "is no name", others=[BadInput("b", "is none either")], more=3),
        Conflict("key_reused", "another job has this key"),
        QueueFull("too many jobs wait"),
        TimedOut([A_JOB], 5),
        NotSucceeded(A_JOB, JobState.FAILED, "exit code 3"),
        NotReady("of another version", retry_after=2.0),
        TaskFailed(A_JOB, task="add", state="failed", kind="ValueError", message="no", traceback="Traceback …"),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert {**vars(again), "others": None} == {**vars(error), "others": None}
        assert list(map(str, getattr(again, "others", ()))) == list(map(str, getattr(error, "others", ())))


def test_options_of_one_call_replace_those_of_the_task(program: Gateway) -> None:
    task_app.echo.using(priority=1, retries=0, unique=False, key="k", properties={"gpu": "a100"}).defer("x")
    (sent,) = program.asked[0].body["jobs"]
    assert (sent["priority"], sent["key"], sent["properties"]) == (1, "k", {"gpu": "a100", "app": "tests"})
    assert not {"max_attempts", "retry_failed", "dedup_key"} & sent.keys()


def test_a_call_may_start_later(program: Gateway) -> None:
    later, at = task_app.add.after(60), datetime(2026, 12, 1, 10, tzinfo=ZoneInfo("Europe/Berlin"))
    later.defer(1, 2)
    later.at(at).defer(1, 2)
    first, second = (asked.body["jobs"][0] for asked in program.asked)
    assert (first["delay"], "schedule_after" in first) == (60, False)
    assert (second["schedule_after"], "delay" in second) == ("2026-12-01T10:00:00+01:00", False)
    with pytest.raises(BadInput, match="time: 2026-12-01T10:00:00 has no zone"):
        later.at(at.replace(tzinfo=None))
    with pytest.raises(BadInput, match="time: must be a datetime with a zone, not '10:00'"):
        later.at("10:00")  # type: ignore[arg-type]


#: One call of `add` as it may be written.
SAME_CALLS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((7,), {}),
    ((7, 0), {}),
    ((7,), {"right": 0}),
    ((), {"left": 7}),
    ((), {"right": 0, "left": 7}),
]


def test_equal_calls_of_a_unique_task_have_one_deduplication_key(program: Gateway) -> None:
    def key(task: Any, *args: Any, **named: Any) -> str:
        task.defer(*args, **named)
        found: str = program.asked[-1].body["jobs"][0]["dedup_key"]
        return found

    by_arguments = task_app.add.using(unique=True)
    assert key(by_arguments, 1, 2) == key(by_arguments, 1, 2) != key(by_arguments, 2, 1)
    assert key(task_app.echo, "x") == "tests.support.apps.task_app.echo:x"
    assert len(key(task_app.echo, "x" * 300).encode()) <= 200
    assert len({key(by_arguments, *args, **named) for args, named in SAME_CALLS}) == 1
    text = '{"args": [1, 2], "kwargs": {}}'
    before = hashlib.sha256(f"tests.support.apps.task_app.add:{text}".encode()).hexdigest()
    assert key(by_arguments, 1, 2) == f"tests.support.apps.task_app.add:{before}", "the key of earlier versions"
    assert key(by_arguments, 7) == key(by_arguments, 7, 0)
    with pytest.raises(BadInput, match=r"unique: returned a 'int', not a text"):
        task_app.echo.defer(5)


def test_a_call_is_the_same_request_as_that_of_earlier_versions_which_escaped_letters(program: Gateway) -> None:
    task_app.echo.using(unique=True).defer("ä🙂")
    request = program.asked[-1].body["jobs"][0]
    assert request["stdin"] == '{"args": ["\\u00e4\\ud83d\\ude42"], "kwargs": {}}'
    told = hashlib.sha256(f"tests.support.apps.task_app.echo:{request['stdin']}".encode()).hexdigest()
    assert request["dedup_key"] == f"tests.support.apps.task_app.echo:{told}"


def test_arguments_that_fit_only_as_bytes_of_utf_8_are_sent_so(program: Gateway) -> None:
    for letters, is_escaped in ((37_000, True), (38_000, False), (130_000, False)):
        task_app.echo.using(unique=True).defer("ä" * letters)
        stdin = program.asked[-1].body["jobs"][0]["stdin"]
        assert json.loads(stdin) == {"args": ["ä" * letters], "kwargs": {}}
        assert stdin.isascii() == is_escaped
        assert len(json.dumps(stdin, ensure_ascii=False).encode()) <= 255 * 1024, "a payload holds it"


def test_what_other_libraries_call_it_is_told_in_the_words_of_this_one(program: Gateway) -> None:
    add = task_app.add
    with pytest.raises(BadInput, match=r"^retry_policy: is not an option of a task; use `retry`$"):
        add.using(retry_policy={})  # type: ignore[call-arg]
    for option, instead in (
        ("soft_time_limit", "`timeout`"),
        ("rate_limit", "`resource_class` and `leasehold rate set`"),
    ):
        with pytest.raises(BadInput, match=f"^{option}: is not an option of a task; use {instead}$"):
            add.using(**{option: 1})  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"a task has no 'delay': task.defer\(…\) submits a call"):
        getattr(add, "delay")  # noqa: B009
    with pytest.raises(AttributeError, match=r"a task has no 'AsyncResult': task.job\(ID\) is the job of an earlier"):
        getattr(add, "AsyncResult")  # noqa: B009
    call, job = add.s(1, 2), add.job(JOB_COMMANDING)
    for used, name, instead in (
        (call, "delay", "leasehold.chain(call).defer() makes it"),
        (leasehold.group(call), "apply_async", "use .defer()"),
        (leasehold.chain(call), "delay", "use .defer()"),
        (job, "get", "use job.result(timeout=60)"),
        (job, "revoke", "use job.cancel()"),
        (Job(JOB_COMMANDING, True), "wait", "use pool.wait(job)"),
    ):
        with pytest.raises(AttributeError, match=f"has no '{name}': {re.escape(instead)}$"):
            getattr(used, name)
        assert copy.copy(used) == used or isinstance(used, GraphRequest)
    for calls, what in (
        (call, "a call that is not made yet"),
        (leasehold.group(call), "a group"),
        (leasehold.chain(call), "a chain"),
    ):
        with pytest.raises(TypeError, match=rf"^{what} has no '\|': calls one after another are leasehold.chain"):
            calls | call  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        job | call  # type: ignore[operator]
    for given in ("5m", -1, True):
        with pytest.raises(BadInput, match=r"^after: takes a number of seconds"):
            add.after(given)  # type: ignore[arg-type]
    for long in (math.inf, timedelta(days=400)):
        with pytest.raises(BadInput, match=r"^after: takes at most a year"):
            add.after(long)
    with pytest.raises(BadInput, match=r"this is a 'list'; group\(\*calls\) takes many of them$"):
        leasehold.group([add.s(1, 2)]).defer()  # type: ignore[arg-type]
    for wrong in (lambda: leasehold.chain(add), lambda: leasehold.group(add.s(1, 2), add).defer()):  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=r"^calls: are such as task.s\(1\), and this is a 'Task'"):
            wrong()
    add.using(retry={"exceptions": [KeyError, "OSError"]}).after(timedelta(minutes=1)).defer(1, 2)
    (sent,) = [asked.body["jobs"][0] for asked in program.asked]
    assert (sent["retry"], sent["delay"]) == ({"exceptions": ["KeyError", "OSError"]}, 60.0)


def test_calls_take_the_lock_that_their_arguments_make(program: Gateway) -> None:
    limited = task_app.add.using(concurrency=("of-{left}-{right}", 2), locks=["tree"])
    limited.defer(1, right=2)
    limited.using(concurrency=(lambda left, right: f"sum-{left + right}", 3)).defer(1, 2)
    assert [asked.body["jobs"][0]["locks"] for asked in program.asked] == [["tree", "of-1-2:2"], ["tree", "sum-3:3"]]
    for wrong in (
        ("a", 0),
        ("a", True),
        "a",
        ("of-{lef}", 2),
        ("{", 2),
        ("{}", 2),
        ["a", 2],
        ("{left!z}", 2),
        ("{left:{wide}}", 2),
    ):
        with pytest.raises(BadInput, match=r"^concurrency: "):
            task_app.add.using(concurrency=wrong)
    for key in ("Of {left}", "{left.x}"):
        with pytest.raises(BadInput, match=r"^concurrency: "):
            task_app.add.using(concurrency=(key, 2)).defer(1, 2)
    graph = GraphRequest("sums", {})
    first = graph.add(task_app.add, 1, 2)
    for given in ("of-{right}", lambda left, right: f"{left}-{right}"):
        with pytest.raises(BadInput, match=r"^concurrency: takes 'right', which is the result of a node"):
            graph.add(task_app.add.using(concurrency=(given, 2)), 1, first.result)


def numbers() -> Iterator[int]:
    yield 1


#: Calls and options that cannot be sent, and why.
UNSENT: list[tuple[Callable[[], object], str]] = [
    (lambda: task_app.add.defer(Decimal(1)), "left: a value of type 'Decimal' is not JSON"),
    (lambda: task_app.add.defer(1, right=object()), "right: a value of type 'object' is not JSON"),
    (lambda: task_app.echo.defer({"a": [{1: 2}]}), "text: a key of type 'int' would come back as a text"),
    (lambda: task_app.echo.defer(float("nan")), "text: nan is not a number of JSON"),
    (lambda: task_app.echo.defer("a\0"), "text: holds a NUL character"),
    (lambda: task_app.echo.defer("\ud800"), "text: holds half of a surrogate pair"),
    (lambda: task_app.add.batch([(1,), (1, {2})]), "1.right: a value of type 'set' is not JSON"),
    (lambda: task_app.add.batch([5]), r"0.arguments: are a tuple or a mapping, not a 'int'; batch\(\[\(5,\)\]\) is"),
    (lambda: task_app.add.batch(5), r"calls: are many, such as \[\(5,\), \(6,\)\], and not one 'int'"),
    (lambda: task_app.add.batch({"left": 5}), "calls: are many, .*, and not one 'dict'"),
    (lambda: task_app.echo.defer("x" * 300_000), "text: the arguments have 300028 bytes as JSON, at most 261120"),
    (lambda: task_app.echo.defer("ä" * 131_000), "text: the arguments have 262028 bytes as JSON, at most 261120"),
    (
        lambda: task_app.echo.using(queue_timeout_seconds=math.inf).defer("x"),
        "^queue_timeout_seconds: inf is not a number",
    ),
    (lambda: task_app.echo.using(units=math.nan).defer_in(None, "x"), "^jobs.0.units: nan is not a number of JSON"),
    (lambda: task_app.echo.using(stdin="x"), "stdin: is made from the task"),
    (lambda: task_app.echo.using(retires=3), "retires: is not an option of a task; did you mean 'retries'?"),
    (lambda: Pool("http://localhost", "t").task(labels="x"), "labels: is not an option .* did you mean 'label'?"),
    (lambda: task_app.echo.using(max_attempts=3), "max_attempts: is made from the task; .*; use `retries`"),
    (lambda: task_app.echo.using(timeout="60"), "timeout: is a number of seconds above 0, not 60"),
    (lambda: task_app.echo.using(priority="high"), "priority: is a whole number, not high"),
    (lambda: task_app.echo.using(properties="gpu"), "properties: are a mapping, not a 'str'"),
    (lambda: Pool("http://localhost", "t").task("mail"), "task: decorates a function, not a 'str'; .* name=…"),
    (lambda: Pool("http://localhost", "t").task(numbers), "task: 'numbers' yields values, and a task returns one"),
    (lambda: task_app.echo.using(properties={"app": "x"}), "properties: 'app' is the app of the pool"),
    (lambda: task_app.echo.using(retries=-1), "retries: is a number of at least 0, not -1"),
    (lambda: Pool("http://localhost", "t").task(lambda: None), "task: '.*<lambda>' is not a function of a module"),
]


def test_what_cannot_be_sent_is_refused_by_name_before_anything_is(program: Gateway) -> None:
    for defer, reason in UNSENT:
        with pytest.raises(BadInput, match=reason):
            defer()
    assert program.asked == []


def test_two_functions_of_a_module_cannot_be_one_task() -> None:
    pool = Pool("http://localhost", "t")
    first = pool.task(name="mail")(task_app.add.function)
    assert pool.task(name="mail")(task_app.add.function).name == first.name, "its module was imported again"
    with pytest.raises(
        BadInput, match=r"^name: 'mail' is the name of another task, 'tests.support.apps.task_app.add'$"
    ):
        pool.task(name="mail")(task_app.echo.function)
    assert pool.tasks["mail"].function is task_app.add.function


def test_a_call_that_python_would_refuse_is_refused_as_python_does(program: Gateway) -> None:
    said = r"^task '[\w.]+\.add' is called as add\(left: .*\) -> int: too many positional arguments$"
    with pytest.raises(TypeError, match=said):
        task_app.add.defer(1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"call 1: task .* missing a required argument: 'left'"):
        task_app.add.batch([(1,), ()])
    assert program.asked == []


def test_a_pool_that_no_bot_can_find_is_refused(program: Gateway) -> None:
    hidden = [Pool("http://localhost", "t")][0].task(task_app.add.function)
    with pytest.raises(BadInput, match=r"pool: is no variable of the module 'tests.support.apps.task_app'"):
        hidden.defer(1)


def test_a_pool_without_an_environment_can_be_imported_but_not_called(no_pool_of_our_own: None, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^url: no gateway is known"):
        _ = Pool.from_env(data=tmp_path).client
    with pytest.raises(BadInput, match=r"^url: no gateway is known"):
        asyncio.run(AsyncPool.from_env(data=tmp_path).__aenter__())


def test_another_serialiser_makes_json_of_values(program: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    class Decimals:
        def encode(self, value: Any) -> Any:
            return {"decimal": str(value)} if isinstance(value, Decimal) else value

        def decode(self, found: Any) -> Any:
            return Decimal(found["decimal"]) if isinstance(found, dict) and "decimal" in found else found

    monkeypatch.setattr(task_app.pool, "serialiser", Decimals())
    job = task_app.echo.using(unique=False).defer(Decimal("1.10"))
    (sent,) = program.asked[0].body["jobs"]
    assert json.loads(sent["stdin"])["args"] == [{"decimal": "1.10"}]
    program.script = ended("succeeded", {"ok": {"decimal": "2.20"}})
    assert TaskJob(A_JOB, True, task=job.task).result() == Decimal("2.20")


# Results


def ended(state: str, result: Any = None, reason: str | None = None) -> Callable[[ReceivedRequest], Answer]:
    """A gateway with one job, which has ended so."""

    def answer(asked: ReceivedRequest) -> Answer:
        job = {"id": A_JOB, "state": state}
        if asked.path == "/v1/jobs/wait":
            return Answer({"jobs": [job]})
        if asked.path == "/v1/results":
            facts = {"exit_code": 0, "reason": reason, "has_result": result is not None, "result": result}
            return Answer({"jobs": [job | facts]})
        return problem(404, asked.path)

    return answer


def test_the_result_of_a_job_is_what_the_function_returned_or_its_error(program: Gateway) -> None:
    job = TaskJob(A_JOB, True, task=task_app.add)
    program.script = ended("succeeded", {"ok": 3})
    assert job.result() == 3
    program.script = ended(
        "failed", {"error": {"type": "ValueError", "message": "no\nluck", "traceback": "Traceback …"}}
    )
    with pytest.raises(TaskFailed) as failed:
        job.result()
    assert str(failed.value) == "task 'tests.support.apps.task_app.add' failed: ValueError: no"
    assert (failed.value.kind, failed.value.message, failed.value.job) == ("ValueError", "no\nluck", A_JOB)
    assert failed.value.__notes__ == ["The remote traceback:\nTraceback …"]


def test_the_value_of_an_earlier_call_is_read_by_the_id_of_its_job(program: Gateway) -> None:
    program.script = ended("succeeded", {"ok": 3})
    job = task_app.add.job(A_JOB.upper())
    assert (job, job.created, job.result()) == (TaskJob(A_JOB, False, task=task_app.add), False, 3)
    assert task_app.pool.gather([task_app.add.job(job)]) == [3]

    async def value() -> int:
        return await task_app.add.job_async(A_JOB).result()

    assert asyncio.run(value()) == 3
    with pytest.raises(BadInput, match=r"^id: 'seven' is not the id of a job"):
        task_app.add.job("seven")


def test_a_job_that_ended_without_a_result_says_why(program: Gateway) -> None:
    job = TaskJob(A_JOB, True, task=task_app.add)
    program.script = ended("failed", reason="killed by SIGKILL")
    with pytest.raises(TaskFailed, match=r"task '.*' failed: killed by SIGKILL"):
        job.result()
    program.script = ended("cancelled")
    with pytest.raises(TaskFailed, match=r"task '.*' cancelled: nobody gave a reason"):
        job.result()
    for state, reason, kind in (
        ("failed", "timeout after 0.5 s", EndKind.TIMEOUT),
        ("dead", "ran longer than the ceiling of its timeout", EndKind.TIMEOUT),
        ("dead", "waited longer than its queue timeout", EndKind.QUEUE_TIMEOUT),
        ("failed", "killed by SIGKILL; its last checkpoint is not kept", EndKind.KILLED),
        ("failed", "killed because it blocked other tasks of its process, at 1.5 s", EndKind.NO_RESULT),
        ("dead", "its bot was lost three times", EndKind.LOST),
        ("cancelled", None, EndKind.CANCELLED),
        ("failed", "exit code 3", EndKind.EXIT_CODE),
        ("succeeded", None, EndKind.NO_RESULT),
    ):
        program.script = ended(state, reason=reason)
        (failed,) = task_app.pool.gather([job], return_errors=True)
        assert (failed.kind, NotSucceeded(A_JOB, JobState(state), reason).kind) == (kind, kind)
        assert str(failed).count(kind) <= 1, "it is told once, in the words of the reason"
    assert NotSucceeded(A_JOB, JobState.FAILED, "ValueError: no", exit_code=1).kind is EndKind.EXIT_CODE
    program.script = ended("running")
    with pytest.raises(TimedOut, match=f"not final after 0.01 s: {A_JOB}") as going:
        job.result(timeout=0.01)
    assert isinstance(going.value, TimeoutError), "a caller may catch it as it catches others of Python"
    assert going.value.__notes__ == [f"`leasehold explain {A_JOB}` says how it stands"]


def test_the_results_of_many_jobs_come_together_in_the_order_of_the_jobs(
    program: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}

    def fetch(_reference: Any) -> bytes:
        raise NotFound("there is no such file")

    jobs = [TaskJob(A_JOB[:-1] + end, True, task=task_app.add) for end in "3121"]
    facts = {"exit_code": 0, "reason": None, "has_result": True}

    def answer(asked: ReceivedRequest) -> Answer:
        found = [{"id": id, "state": "failed" if id.endswith("2") else "succeeded"} for id in asked.body["ids"]]
        if asked.path == "/v1/jobs/wait":
            return Answer({"jobs": found})
        error = {"error": {"type": "ValueError", "message": "no", "traceback": ""}}
        results = [error if each["state"] == "failed" else {"ok": int(each["id"][-1])} for each in found]
        results[0] = kept or results[0]
        return Answer(
            {"jobs": [each | facts | {"result": result} for each, result in zip(found, results, strict=True)]}
        )

    program.script = answer
    values = task_app.pool.gather(jobs, return_errors=True)
    assert [each if isinstance(each, int) else str(each) for each in values] == [
        3, 1, "task 'tests.support.apps.task_app.add' failed: ValueError: no", 1
    ]  # fmt: skip
    assert [asked.path for asked in program.asked] == ["/v1/jobs/wait", "/v1/results"]
    with pytest.raises(TaskFailed, match="ValueError: no"):
        task_app.pool.gather(jobs)
    monkeypatch.setattr(task_app.pool, "fetch_result", fetch)
    kept = {"kept": "gone"}
    values = task_app.pool.gather(jobs, return_errors=True)
    assert [(type(each), getattr(each, "kind", None)) for each in values] == [
        (TaskFailed, "NotFound"), (int, None), (TaskFailed, "ValueError"), (int, None)
    ]  # fmt: skip
    with pytest.raises(NotFound):
        task_app.pool.gather(jobs)
    assert job_ids(jobs[0]) == job_ids([jobs[0].id]), "calls of a pool take the jobs of tasks"
    program.script = ended("running")
    with pytest.raises(TimedOut) as going:
        task_app.pool.gather(jobs[1:2], timeout=0.01)
    assert going.value.pending == (A_JOB,)


def test_gather_says_what_it_takes(program: Gateway) -> None:
    wrong: list[tuple[Any, str]] = [
        (TaskJob(A_JOB, True, task=task_app.add), r"jobs: are many, and this is one: gather\(\[job\]\), or"),
        (A_JOB, "jobs: are a list of jobs of tasks, not a 'str'"),
        (7, "jobs: are a list of jobs of tasks, not a 'int'"),
        ([A_JOB], r"jobs.0: is a 'str', not the job of a task; task.job\(ID\) is the job of an earlier call"),
        ([7], "jobs.0: is a 'int', not the job of a task$"),
    ]
    for jobs, reason in wrong:
        with pytest.raises(BadInput, match=reason):
            task_app.pool.gather(jobs)
    assert program.asked == []


@dataclass(frozen=True)
class Connections:
    """Ways to the database of a test."""

    url: str
    driver: str

    def rows(self, query: LiteralString) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    @property
    def submitted(self) -> int:
        return int(self.rows("SELECT count(*) FROM leasehold.jobs")[0][0])


@pytest.fixture
def ways(database: Database) -> Connections:
    return Connections(libpq_url(database.url), database.url.replace("postgresql://", "postgresql+psycopg://"))


PAYLOADS: LiteralString = (
    "SELECT public_id::text, payload FROM leasehold.jobs JOIN leasehold.job_payloads ON id = job_id ORDER BY id"
)


def test_a_call_in_a_transaction_exists_when_that_is_committed_and_never_if_it_is_undone(ways: Connections) -> None:
    with psycopg.connect(ways.url, row_factory=dict_row) as connection:
        task_app.add.defer_in(connection, 1, right=2)
        assert ways.submitted == 0
        connection.rollback()
        assert ways.submitted == 0
        job = task_app.add.defer_in(connection, 1, right=2)
    assert (isinstance(job, TaskJob), job.created) == (True, True)
    ((id, payload),) = ways.rows(PAYLOADS)
    assert (id, payload["command"][2]) == (job.id, "tests.support.apps.task_app.add")
    assert json.loads(payload["stdin"]) == {"args": [1], "kwargs": {"right": 2}}


def test_many_calls_in_a_transaction_are_submitted_together(ways: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.client.MAX_JOBS", 2)
    calls = [(1,), {"left": 2, "right": 3}, (4, 5)]
    with psycopg.connect(ways.url) as connection:
        assert task_app.add.batch_in(connection, []) == []
        task_app.add.batch_in(connection, calls)
        connection.rollback()
        jobs = task_app.add.batch_in(connection, calls)
        with pytest.raises(BadInput, match=r"1\.right: a value of type 'set' is not JSON"):
            task_app.add.batch_in(connection, [(1,), (1, {2})])
    rows = ways.rows(PAYLOADS)
    assert [id for id, _ in rows] == [job.id for job in jobs]
    assert [json.loads(payload["stdin"])["args"] for _, payload in rows] == [[1], [], [4, 5]]

    async def program() -> list[TaskJob[int]]:
        async with await psycopg.AsyncConnection.connect(ways.url) as connection:
            made: list[TaskJob[int]] = await task_app.add.batch_in(connection, calls)
            return made

    assert len({job.id for job in asyncio.run(program())}) == 3
    assert ways.submitted == 6


def test_a_text_that_the_database_cannot_hold_is_refused_in_a_transaction_without_the_value(ways: Connections) -> None:
    def submitted(text: str) -> int:
        made: int = submit_in(connection, [{"command": ["a"], "env": {"A": text}}], len)
        return made

    with psycopg.connect(ways.url) as connection:
        for text, said in (("secret\0", "a NUL character"), ("\ud83d\\\ude00", "half of a surrogate pair")):
            with pytest.raises(BadInput, match=rf"^jobs\.0\.env\.A: holds {said}$"):
                submitted(text)
        assert submitted("\\u0000, \\ud800, \U0001f600") == 1, "a backslash and a pair are held"


def test_a_statement_in_a_transaction_has_no_more_bytes_than_a_request(
    ways: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.client.MAX_BYTES", 4096)
    sent = list[int]()

    class Counting(psycopg.Cursor[Any]):
        def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
            sent.append(len(params[0].encode()))
            return super().execute(query, params, **more)

    letters = {"A": "ä" * 900, "B": "🙂" * 400}
    job = {"command": ["a"], "env": letters}
    with psycopg.connect(ways.url, cursor_factory=Counting) as connection:
        assert submit_in(connection, [job, job], len) == 2
    assert (len(sent), max(sent) <= 4096) == (2, True)
    (stored, *_) = ways.rows("SELECT payload->'env' FROM leasehold.job_payloads")
    assert stored == (letters,)


def test_a_connection_whose_encoding_cannot_write_a_text_is_refused(ways: Connections) -> None:
    with psycopg.connect(ways.url, client_encoding="LATIN1") as connection:
        assert task_app.add.defer_in(connection, 1).created
        assert submit_in(connection, [{"command": ["ä"]}], len) == 1
        with pytest.raises(BadInput, match=r"^connection: its encoding '\S+' cannot write a text of the request$"):
            submit_in(connection, [{"command": ["🙂"]}], len)


def test_connections_and_sessions_of_sqlalchemy_take_calls_too(ways: Connections) -> None:
    engine = create_engine(ways.driver)
    try:
        with engine.begin() as connection:
            task_app.add.defer_in(connection, 1)
        with Session(engine) as session:
            task_app.add.defer_in(session, 2)
            session.rollback()
            task_app.add.defer_in(session, 3)
            session.commit()
    finally:
        engine.dispose()
    assert ways.submitted == 2


def test_connections_of_psycopg_2_take_calls_too(ways: Connections) -> None:
    psycopg2, extras = pytest.importorskip("psycopg2"), pytest.importorskip("psycopg2.extras")
    for factory in (None, extras.RealDictCursor):
        with closing(psycopg2.connect(ways.url, cursor_factory=factory)) as connection:
            task_app.add.defer_in(connection, 1)
            connection.rollback()
            assert task_app.add.defer_in(connection, 2).created
            connection.commit()
            with pytest.raises(BadInput, match=r"^jobs\.0\.locks\.0: "):
                task_app.add.using(locks=["x" * 999]).defer_in(connection, 1)
    assert ways.submitted == 2


def test_connections_of_asyncpg_take_calls_that_are_awaited(ways: Connections) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def program() -> None:
        connections = asyncpg.create_pool(ways.url, min_size=1, max_size=1)
        async with connections, connections.acquire() as connection:
            await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
            undone = connection.transaction()
            await undone.start()
            await task_app.add.defer_in(connection, 1)
            await undone.rollback()
            async with connection.transaction():
                assert (await task_app.add.defer_in(connection, 2)).created
            with pytest.raises(BadInput, match=r"^jobs\.0\.locks\.0: "):
                await task_app.add.using(locks=["x" * 999]).defer_in(connection, 1)
            with inline():
                assert (await task_app.add.defer_in(connection, 1, right=2)).result() == 3
        with pytest.raises(BadInput, match="connection: a 'Pool' is no connection of psycopg, asyncpg, "):
            task_app.add.defer_in(connections, 1)

    asyncio.run(program())
    assert ways.submitted == 1


def test_connections_of_django_take_calls_too(ways: Connections) -> None:
    if not settings.configured:
        settings.configure()
        django.setup()
    url = make_url(ways.driver)
    place = {"NAME": url.database, "USER": url.username, "PASSWORD": url.password or "", "PORT": url.port or ""}
    host = url.query.get("host", url.host)
    connections = ConnectionHandler({
        "default": {"ENGINE": "django.db.backends.postgresql", "HOST": host, **place},
        "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    })  # fmt: skip
    connection = connections["default"]
    try:
        connection.set_autocommit(False)
        task_app.add.defer_in(connection, 1)
        connection.rollback()
        task_app.add.batch_in(connection, [(2,), (3,)])
        connection.commit()
        with pytest.raises(BadInput, match=r"^jobs\.0\.locks\.0: "):
            task_app.add.using(locks=["x" * 999]).defer_in(connection, 1)
    finally:
        connection.close()
    assert ways.submitted == 2
    with pytest.raises(BadInput, match="connection: is one to sqlite, and a pool's tables are in PostgreSQL"):
        task_app.add.defer_in(connections["other"], 1)


def test_asynchronous_connections_take_calls_that_are_awaited(ways: Connections) -> None:
    async def program() -> list[TaskJob[int]]:
        jobs = []
        async with await psycopg.AsyncConnection.connect(ways.url, row_factory=dict_row) as connection:
            jobs.append(await task_app.add.defer_in(connection, 1))
        engine = create_async_engine(ways.driver)
        async with engine.begin() as begun:
            jobs.append(await task_app.add.defer_in(begun, 2))
        async with AsyncSession(engine) as session:
            await task_app.add.defer_in(session, 3)
            await session.rollback()
            jobs.append(await task_app.add.defer_in(session, 4))
            await session.commit()
        await engine.dispose()
        return jobs

    assert len({job.id for job in asyncio.run(program())}) == 3
    assert ways.submitted == 3


def test_a_key_of_another_call_and_an_object_that_is_no_connection_are_refused(ways: Connections) -> None:
    with closing(psycopg.connect(ways.url)) as connection:
        keyed = task_app.add.using(key="order-7")
        first = keyed.defer_in(connection, 1)
        again = keyed.defer_in(connection, 1)
        assert (again.id, again.created) == (first.id, False)
        with pytest.raises(Conflict, match=r"jobs\.0\.key: was used by a different request"):
            keyed.defer_in(connection, 2)
    with pytest.raises(
        BadInput, match="connection: a 'str' is no connection of psycopg, asyncpg, SQLAlchemy or Django"
    ):
        task_app.add.defer_in("postgresql://", 1)


def test_a_refusal_of_the_database_is_one_sentence_of_the_same_error_as_over_http(ways: Connections) -> None:
    wrong = task_app.add.using(locks=["x" * 999])
    engine, async_engine = create_engine(ways.driver), create_async_engine(ways.driver)

    async def by_coroutine() -> None:
        async with async_engine.connect() as connection:
            await wrong.defer_in(connection, 1)
        await async_engine.dispose()

    with psycopg.connect(ways.url) as connection, Session(engine) as session:
        for defer in (
            lambda: wrong.defer_in(connection, 1),
            lambda: wrong.defer_in(session, 1),
            lambda: asyncio.run(by_coroutine()),
        ):
            with pytest.raises(BadInput, match=r"^jobs\.0\.locks\.0: [^\n]{5,80}$") as refused:
                defer()
            shown = "".join(traceback.format_exception(refused.value))
            assert "leasehold.submit(" not in shown, "neither the statement nor its parameters"
        connection.rollback()
        with pytest.raises(BadInput, match=r"^job_class: there is no job class 'golden'$"):
            task_app.add.using(job_class="golden").defer_in(connection, 1)
    engine.dispose()
    assert ways.submitted == 0


def test_the_place_of_a_refused_call_is_that_in_the_whole(ways: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.client.MAX_JOBS", 2)
    tasks = [task_app.add, task_app.add, task_app.add, task_app.add.using(locks=["x" * 999])]
    with psycopg.connect(ways.url) as connection, pytest.raises(BadInput, match=r"^jobs\.3\.locks\.0: "):
        submit_in(connection, [task.request(1) for task in tasks], list)


def test_a_database_without_a_pool_and_a_role_without_rights_are_told_so(ways: Connections, server_url: str) -> None:
    with psycopg.connect(libpq_url(server_url)) as empty, pytest.raises(NotReady, match="holds no pool: schema"):
        task_app.add.defer_in(empty, 1)
    with psycopg.connect(ways.url) as connection:
        connection.execute("CREATE ROLE lh_without_rights")
        connection.execute("SET LOCAL ROLE lh_without_rights")
        with pytest.raises(
            Forbidden, match=r"permission denied for schema leasehold; the owner of .* grant-submit ROLE"
        ):
            task_app.add.defer_in(connection, 1)
        connection.rollback()


def test_a_submit_that_an_upgrade_took_a_function_from_is_told_to_come_again(ways: Connections) -> None:
    with psycopg.connect(ways.url) as connection:
        connection.execute("ALTER FUNCTION leasehold.only_flat RENAME TO flat_only")
        with pytest.raises(NotReady, match=r"^the pool lacks a function, .*: function only_flat.*; repeat .*"):
            task_app.add.defer_in(connection, 1)
        connection.rollback()
        connection.execute("ALTER FUNCTION leasehold.submit RENAME TO submitted")
        with pytest.raises(NotReady, match=r"holds no pool: function leasehold\.submit\(jsonb\) does not exist"):
            task_app.add.defer_in(connection, 1)
        connection.rollback()
        assert task_app.add.defer_in(connection, 1)


def test_what_is_no_refusal_stays_the_error_of_the_driver(ways: Connections) -> None:
    with psycopg.connect(ways.url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1/0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            task_app.add.defer_in(connection, 1)
        connection.close()
        with pytest.raises(psycopg.OperationalError):
            task_app.add.defer_in(connection, 1)
