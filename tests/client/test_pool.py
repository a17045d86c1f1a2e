"""`Pool` against a gateway that answers what the test says, and against a real gateway without bots."""

import ast
import asyncio
import dataclasses
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import leasehold
import pytest
from leasehold import transport
from leasehold.credentials import Credentials
from leasehold.errors import BadInput, Conflict, LeaseholdError, NotFound, NotSucceeded, QueueFull, TimedOut
from leasehold.jobs import JobFields, JobFilter, NodeFields, Result
from leasehold.pool import Pool
from leasehold.states import JobState

from schema import filters, requests
from tests.support.http import JOB_COMMANDING as JOB
from tests.support.http import OTHER, Answer, ReceivedRequest, accept, gateway, in_turn, problem
from tests.support.patience import NEWS, eventually
from tests.support.pool import Pool as Database
from tests.support.pool import completed
from tests.support.servers import Served

TOKEN = "lh_operator_x_y"
MADE = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def connected(served: Served) -> Iterator[Pool]:
    """An operator's pool of the test's own gateway, which has no bots and no assigners."""
    with Pool(served.url, served.token("operator")) as pool:
        yield pool


def state(job: str, state: str, *, second: float = 0.0, **result: Any) -> dict[str, Any]:
    """What the gateway says of a job that ended in this second."""
    ended = f"2026-03-01T12:00:{second:06.3f}Z" if state in leasehold.FINAL else None
    times = {"created_at": "2026-03-01T12:00:00Z", "started_at": None, "finished_at": ended}
    return {"id": job, "state": state, "reason": None, "attempts": 1, "result": result or None, **times}


# What a program may ask for


def test_the_fields_of_a_request_are_those_of_the_gateway() -> None:
    job = set(requests.JobRequest.model_fields)
    assert set(get_type_hints(JobFields)) == job - {"command"}
    assert set(get_type_hints(NodeFields)) == job - {"command", *requests._OF_THE_GRAPH}
    assert set(get_type_hints(JobFilter)) == set(filters.JobFilter.model_fields)


def test_a_refusal_of_one_job_names_its_field_alone() -> None:
    refusals = [problem(400, f"{at}: no", field=at) for at in ("jobs.0.retry.base", "jobs[0]", "body")]
    refusals.append(problem(409, "jobs.0.dedup_key: is taken", code="dedup_key_taken"))
    with gateway(in_turn(*refusals)) as stands, Pool(stands.url, TOKEN) as pool:
        for field in ("retry.base", "job", "body"):
            with pytest.raises(BadInput) as refused:
                pool.submit(["x"])
            assert (refused.value.field, str(refused.value)) == (field, f"{field}: no")
        with pytest.raises(Conflict, match=r"^dedup_key: is taken"):
            pool.submit(["x"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"delay": math.inf}, "delay: inf is not a number of JSON"),
        ({"metadata": {"a": [1, Path("x")]}}, "metadata.a.1: is a 'PosixPath', and JSON has none"),
        ({"metadata": {(1,): "a"}}, "metadata: has a key of type 'tuple', not a text"),
        ({"metadata": {1: "a"}, "delay": math.inf}, "delay: inf is not a number of JSON"),
        ({"label": "\ud800"}, "label: holds half of a surrogate pair"),
        ({"env": {"A": "x\0"}}, "env.A: holds a NUL character"),
        ({"env": {"A\0": "x"}}, "env: has a key that holds a NUL character"),
        ({"priority": 10**5000}, "priority: is an integer of too many digits"),
    ],
)
def test_what_is_no_json_is_refused_by_its_place_and_never_sent(fields: Any, said: str) -> None:
    with gateway(in_turn(Answer({"jobs": [{"id": JOB, "created": True}]}))) as stands, Pool(stands.url, TOKEN) as pool:
        with pytest.raises(BadInput, match=rf"^{re.escape(said)}$"):
            pool.submit(["true"], **fields)
        with pytest.raises(BadInput, match=rf"^jobs.1.{re.escape(said)}$"):
            pool.submit_many([{"command": ["true"]}, {"command": ["true"], **fields}])
        with pytest.raises(BadInput, match=re.escape(said)):
            pool.plan(["true"], **fields)
        assert stands.asked == []


def test_many_jobs_are_a_list_of_requests() -> None:
    with gateway(in_turn(Answer({}))) as stands, Pool(stands.url, TOKEN) as pool:
        for wrong, said in (
            ({"command": ["true"]}, 'jobs: are many, such as [{"command": ["true"]}], and not one \'dict\''),
            ("true", "jobs: are many, "),
            (["true"], 'jobs.0: is not the fields of a job, such as {"command": ["true"]}'),
            ([{"command": ["true"]}, {"label": "x"}], "jobs.1: is not the fields of a job"),
        ):
            with pytest.raises(BadInput, match=f"^{re.escape(said)}"):
                pool.submit_many(wrong)  # type: ignore[arg-type]
        assert stands.asked == []


@pytest.mark.parametrize("timeout", ["3", timedelta(seconds=1), math.nan, True])
def test_a_wait_takes_a_number_of_seconds(timeout: Any) -> None:
    with gateway(in_turn(Answer({}))) as stands, Pool(stands.url, TOKEN) as pool:
        with pytest.raises(BadInput, match=r"^timeout: is a number of seconds, not "):
            pool.wait(JOB, timeout)
        with pytest.raises(BadInput, match=r"^timeout: "):
            pool.client.graphs.wait(JOB, timeout=timeout)
        with pytest.raises(BadInput, match=r"^timeout: "):
            asyncio.run(_result_of_a_coroutine(stands.url, timeout))
        assert stands.asked == []


async def _result_of_a_coroutine(url: str, timeout: Any) -> None:
    async with leasehold.AsyncPool(url, TOKEN) as pool:
        await pool.result(JOB, timeout)


def test_a_submit_sends_the_fields_and_gives_the_job() -> None:
    with gateway(accept) as stands, Pool(stands.url, TOKEN) as pool:
        job = pool.submit(("make", "test"), label="a", key="mine", properties={"os": "linux"})
        with pytest.raises(BadInput, match="command: is a text; give a list"):
            pool.submit("make test")
    assert job == leasehold.Job("a", created=True)
    ((sent,),) = [asked.body["jobs"] for asked in stands.asked]
    assert sent == {"command": ["make", "test"], "label": "a", "key": "mine", "properties": {"os": "linux"}}


def test_a_key_for_many_jobs_makes_the_repeat_of_the_whole_call_harmless() -> None:
    jobs: list[leasehold.JobRequest] = [{"command": ["a"], "label": "a"}, {"command": ["b"], "label": "b", "key": "k"}]
    with gateway(accept) as stands, Pool(stands.url, TOKEN) as pool:
        pool.submit_many(jobs, key="nightly")
        pool.submit_many(iter(jobs), key="nightly")
    first, again = (asked.body["jobs"] for asked in stands.asked)
    assert [job["key"] for job in first] == ["nightly-0", "k"]
    assert first == again


@pytest.mark.parametrize(
    ("refusal", "kind"), [(problem(400, "jobs.0.units: no", field="jobs.0.units"), BadInput),
                          (problem(409, "full", code="queue_full"), QueueFull)],
)  # fmt: skip
def test_a_submit_that_is_refused_midway_says_what_it_has_made(
    monkeypatch: pytest.MonkeyPatch, refusal: Answer, kind: type[LeaseholdError]
) -> None:
    monkeypatch.setattr("leasehold.client.MAX_JOBS", 2)
    made = Answer({"jobs": [{"id": JOB, "created": True}, {"id": OTHER, "created": True}]})
    with gateway(in_turn(made, refusal)) as stands, Pool(stands.url, TOKEN) as pool:
        with pytest.raises(kind) as refused:
            pool.submit_many([{"command": ["x"]}] * 3)
        assert refused.value.submitted == (JOB, OTHER)
        with pytest.raises(kind) as refused:
            pool.submit(["x"])
        assert refused.value.submitted == ()


# Waiting


def test_jobs_come_in_the_order_of_their_ends_and_progress_counts_them() -> None:
    third = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0003"
    script = in_turn(
        Answer({"jobs": [state(JOB, "failed", second=2.5), state(OTHER, "running"), state(third, "dead", second=1)]}),
        Answer({"jobs": [state(OTHER, "succeeded", second=9, exit_code=0, seconds=8.5)]}),
    )
    told: list[tuple[int, int]] = []
    with gateway(script) as stands, Pool(stands.url, TOKEN) as pool:
        found = list(pool.as_completed([JOB, OTHER, third], progress=lambda *counts: told.append(counts)))
    assert [result.id for result in found] == [third, JOB, OTHER]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [asked.body["ids"] for asked in stands.asked] == [[JOB, OTHER, third], [OTHER]]
    assert all(asked.body["any"] for asked in stands.asked)
    assert (found[-1].exit_code, found[-1].seconds, found[-1].created_at) == (0, 8.5, MADE)


def test_a_wait_whose_time_is_over_names_what_is_not_final() -> None:
    script = in_turn(Answer({"jobs": [state(JOB, "succeeded"), state(OTHER, "queued")]}))
    with gateway(script) as stands, Pool(stands.url, TOKEN) as pool:
        with pytest.raises(TimedOut, match=f"not final after 0 s: {OTHER}\n") as over:
            pool.wait([JOB, OTHER], timeout=0)
        assert over.value.pending == (OTHER,)
        with pytest.raises(TimedOut):
            list(pool.as_completed([JOB, OTHER], timeout=0))


def test_output_is_read_once_and_only_if_it_is_asked_for() -> None:
    reads: list[str] = []

    def read(job: str) -> bytes:
        reads.append(job)
        return b"42\xff\n"

    result = Result.of(state(JOB, "failed", exit_code=3, reason="exit 3", new_field=1), read=read)
    assert reads == []
    assert (result.output, result.output, result.text) == (b"42\xff\n", b"42\xff\n", "42\ufffd\n")
    assert reads == [JOB]
    with pytest.raises(NotSucceeded, match=f"^job {JOB} is failed: exit 3$") as ended:
        result.check()
    assert (ended.value.job, ended.value.state, ended.value.reason) == (JOB, JobState.FAILED, "exit 3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.state = JobState.SUCCEEDED  # type: ignore[misc]


def test_an_interruption_ends_a_request_that_waits_and_the_connection_is_not_used_again() -> None:
    wanted = transport.Interruption()

    def interrupt(asked: ReceivedRequest) -> Answer:
        if asked.path.endswith("/wait"):
            wanted.interrupt()
        return Answer({"jobs": []})

    with gateway(interrupt) as stands, Pool(stands.url, TOKEN) as pool:
        with pytest.raises(transport.Interrupted), wanted:
            list(pool.client.wait([JOB]))
        assert pool.client.list().jobs == []
    assert stands.asked[-1].method == "GET"


def test_a_process_that_was_forked_uses_no_connection_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(accept) as stands, Pool(stands.url, TOKEN) as pool:
        connections = pool.client._transport._connections
        pool.submit(["true"], label="a")
        (of_parent,) = connections._idle
        monkeypatch.setattr("leasehold.transport.os.getpid", lambda: -1)
        pool.submit(["true"], label="b")
        assert of_parent not in connections._idle
    assert len(stands.asked) == 2


# A real gateway


def test_a_pool_and_a_real_gateway_understand_each_other(connected: Pool, pool: Database) -> None:
    fields: JobFields = {"label": "x", "properties": {"os": "plan9"}, "metadata": {"build": "7"}}
    job = connected.submit(["true"], key="k", **fields)
    assert connected.submit(["true"], key="k", **fields) == dataclasses.replace(job, created=False)
    shown = connected.job(job)
    assert (shown.command, shown.state, shown.metadata["build"]) == (("true",), JobState.QUEUED, "7")
    assert "no bot" in str(shown.waiting)
    assert [(event.move, event.after) for event in shown.events] == [("submit", JobState.QUEUED)]
    assert shown.created_at.tzinfo is not None
    assert [each.id for each in connected.jobs(metadata={"build": "7"}, state=[JobState.QUEUED])] == [job.id]
    assert list(connected.jobs(submitted_before=shown.created_at)) == []
    assert connected.explain(job).change == ("a bot with os=plan9",)
    assert [result.state for result in connected.results([job])] == [JobState.QUEUED]
    assert connected.output(job) == b""
    with pytest.raises(TimedOut):
        connected.wait(job, timeout=0.05)
    assert connected.cancel(job) == [leasehold.CancelledJob(job.id, JobState.CANCELLED, changed=True)]
    assert connected.result(job).state is JobState.CANCELLED
    assert connected.cancel(job) == [leasehold.CancelledJob(job.id, JobState.CANCELLED, changed=False)]
    with pytest.raises(NotFound):
        connected.wait([job, OTHER], timeout=0)
    with pytest.raises(BadInput, match="id: 'x' is not the id of a job"):
        connected.job("x")


def test_a_result_has_the_times_and_the_ending_that_the_bot_reported(connected: Pool, pool: Database) -> None:
    id, bot, work = pool.running()
    assert connected.results(id)[0].state is JobState.RUNNING
    bot.sync(completed(work, "failed", exit_code=3, seconds=1.5, reason="exit 3", output_bytes=9))
    result = connected.result(id)
    assert (result.state, result.exit_code, result.seconds, result.reason) == (JobState.FAILED, 3, 1.5, "exit 3")
    assert (result.output_bytes, result.attempts) == (9, 1)
    assert result.started_at is not None
    assert result.finished_at is not None
    with pytest.raises(Conflict, match="already"):
        connected.cancel(result)
    assert result.created_at <= result.started_at <= result.finished_at


def test_a_wait_for_any_job_is_answered_once_one_is_final(served: Served, connected: Pool) -> None:
    ids = [connected.submit(["true"]).id for _ in range(2)]
    with ThreadPoolExecutor(1) as thread:
        body = {"ids": ids, "wait": 60, "any": True}
        answer = thread.submit(connected.client.call, "POST", "/v1/jobs/wait", body=body, held=60)
        eventually(lambda: served.waits("done") == 1)
        connected.cancel(ids[1])
        found = answer.result(NEWS)
    assert [job["state"] for job in found["jobs"]] == ["queued", "cancelled"]
    assert not found["done"]


def test_many_jobs_are_submitted_in_parts_and_listed_in_pages(connected: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.client.MAX_JOBS", 800)
    taken = connected.submit_many(({"command": ["true"], "label": str(n)} for n in range(2_000)), key="all")
    assert len({job.id for job in taken}) == 2_000
    again = connected.submit_many(({"command": ["true"], "label": str(n)} for n in range(900)), key="all")
    assert again == [dataclasses.replace(job, created=False) for job in taken[:900]]
    listed = list(connected.jobs(order="asc", limit=450))
    assert [job.label for job in listed] == [str(n) for n in range(450)]


def test_a_graph_is_put_together_node_by_node(connected: Pool) -> None:
    graph = connected.graph("release", on_failure="cancel", key="k")
    build = graph.add(["make"], label="build")
    check = graph.add(["make", "check"], after=[build])
    graph.add(["tell"], after={build: None, check: "run"}, priority=5)
    assert graph.request()["nodes"][2]["after"] == [0, {"node": 1, "on_failure": "run"}]
    with pytest.raises(BadInput, match="after: names node 9, which the graph does not have yet"):
        graph.add(["x"], after=[leasehold.Node(9)])
    for wrong in ("build", [0], {0: "run"}):
        with pytest.raises(BadInput, match=r"^node: is what graph.add\(…\) returned, or Node\(3\), and not a '"):
            graph.add(["x"], after=wrong)  # type: ignore[arg-type]
    assert repr(graph) == "Graph(name='release', nodes=3)"
    taken, again = graph.submit(), graph.submit()
    assert (taken.created, again.created, again.id) == (True, False, taken.id)
    assert connected.job(taken.jobs[build]).label == "build"
    assert (taken.state().queued, taken.state().blocked) == (1, 2)
    with pytest.raises(TimedOut):
        taken.wait(timeout=0)
    assert taken.cancel() == 3
    assert taken.wait().state == "cancelled"
    assert {result.state for result in taken.results().values()} == {JobState.CANCELLED}


# The gateway and the token


@pytest.fixture
def data(tmp_path: Path, no_pool_of_our_own: None) -> Path:
    """A data directory with a gateway and a token."""
    (tmp_path / "gateway.url").write_text("http://127.0.0.1:7411\n")
    (tmp_path / "operator.token").write_text("lh_operator_a_b\n")
    (tmp_path / "operator.token").chmod(0o600)
    return tmp_path


def test_the_environment_goes_before_the_data_directory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_DATA", str(data))
    found = Credentials()
    assert (found.address(), found.token()) == ("http://127.0.0.1:7411", "lh_operator_a_b")
    monkeypatch.setenv("LEASEHOLD_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("LEASEHOLD_TOKEN", "lh_operator_c_d")
    assert (found.address(), found.token()) == ("http://127.0.0.1:1", "lh_operator_c_d")
    assert Credentials(token_file=data / "operator.token").token() == "lh_operator_a_b"
    Pool.from_env().close()


@pytest.mark.usefixtures("data")
def test_a_token_is_not_sent_in_clear_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"^url: would send the token in clear"):
        Pool("http://pool.example", TOKEN)
    Pool("http://pool.example", TOKEN, insecure=True).close()
    monkeypatch.setenv("LEASEHOLD_URL", "http://pool.example")
    monkeypatch.setenv("LEASEHOLD_TOKEN", TOKEN)
    with pytest.raises(BadInput, match=r"^url: would send the token in clear"):
        _ = Pool.from_env().client
    monkeypatch.setenv("LEASEHOLD_INSECURE", "yes")
    Pool.from_env().close()
    monkeypatch.setenv("LEASEHOLD_INSECURE", "maybe")
    with pytest.raises(BadInput, match=r"^LEASEHOLD_INSECURE: is neither true nor false$"):
        _ = Pool.from_env().client


def test_what_is_missing_or_open_to_others_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "operator.token").chmod(0o640)
    with pytest.raises(BadInput, match=r"^token_file: .*operator.token can be read by others: chmod 600"):
        _ = Pool.from_env(data=data).client
    (data / "operator.token").unlink()
    with pytest.raises(BadInput, match=r"^token_file: .*is not there: give token_file or set LEASEHOLD_TOKEN$"):
        _ = Pool.from_env(data=data).client
    (data / "gateway.url").unlink()
    with pytest.raises(BadInput, match=r"^url: no gateway is known in .*: start `leasehold up`, or give url or data$"):
        _ = Pool.from_env(data=data).client
    monkeypatch.setenv("LEASEHOLD_JOB", "a-job")
    with pytest.raises(
        BadInput, match=r"is known in .*: a job has none of its bot's; give data, see `leasehold help tas"
    ):
        _ = Pool.from_env(data=data).client


def test_every_exported_name_is_there_and_no_other_is() -> None:
    tree = ast.parse(Path(str(leasehold.__file__)).read_text())
    typed = {
        alias.name: str(node.module).removeprefix("leasehold.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("leasehold.")
        for alias in node.names
    }
    assert typed == leasehold._MODULES
    for name, module in typed.items():
        assert getattr(leasehold, name) is getattr(import_module(f"leasehold.{module}"), name)
        assert name in dir(leasehold)
    with pytest.raises(AttributeError, match="has no attribute 'Swimmer'"):
        _ = leasehold.Swimmer  # type: ignore[attr-defined]
