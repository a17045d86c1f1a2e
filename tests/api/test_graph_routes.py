"""Graphs over HTTP and on the command line."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold import Client
from leasehold.errors import BadInput, Conflict, LeaseholdError, NotFound
from structlog.testing import capture_logs

from tests.support.http import Answer, Gateway, call, gateway, in_turn
from tests.support.pool import Pool, completed
from tests.support.servers import Served, counts

GRAPH: dict[str, Any] = {
    "name": "build",
    "nodes": [
        {"node": 1, "command": ["true"], "priority": 3},
        {"node": 2, "command": ["true"], "after": [1], "label": "x"},
        {"node": 3, "command": ["true"], "after": [1, {"node": 2, "on_failure": "run"}]},
    ],
}


def with_node(**fields: Any) -> dict[str, Any]:
    """The graph with a first node that says more."""
    return GRAPH | {"nodes": [GRAPH["nodes"][0] | fields, *GRAPH["nodes"][1:]]}


@pytest.fixture
def commanding(served: Served, monkeypatch: pytest.MonkeyPatch, no_pool_of_our_own: None) -> None:
    monkeypatch.setenv("LEASEHOLD_URL", served.url)
    monkeypatch.setenv("LEASEHOLD_TOKEN", served.token("operator"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "graph.json", GRAPH)


def written(path: Path, graph: Any) -> Path:
    path.write_text(json.dumps(graph))
    return path


def test_a_graph_is_submitted_shown_listed_and_cancelled(operator: httpx.Client) -> None:
    answer = operator.post("/v1/graphs", json=GRAPH)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["created"], made["edges"], made["ready"], made["warnings"]) == (True, 3, 1, [])
    assert [node["node"] for node in made["nodes"]] == [1, 2, 3]
    shown = operator.get("/v1/graphs/build").json()
    assert shown["id"] == made["id"]
    assert (shown["state"], shown["blocked"], shown["queued"]) == ("active", 2, 1)
    assert [(node["state"], node["depth"], node["waits_for"]) for node in shown["page"]] == [
        ("queued", 0, 0), ("blocked", 1, 1), ("blocked", 2, 2)
    ]  # fmt: skip
    assert [node["after"] for node in shown["page"]] == [[], [1], [1, 2]]
    assert [node["command"] for node in shown["page"]] == [node["command"] for node in GRAPH["nodes"]]
    assert operator.get("/v1/jobs", params={"state": "blocked"}).json()["jobs"][0]["state"] == "blocked"
    page = operator.get(f"/v1/graphs/{made['id']}", params={"limit": 1, "after": 1}).json()["page"]
    assert [node["node"] for node in page] == [2]
    for states, found in ((["queued"], [1]), (["blocked"], [2, 3]), (["blocked", "queued"], [1, 2, 3]), (["dead"], [])):
        page = operator.get("/v1/graphs/build", params={"state": states}).json()["page"]
        assert [node["node"] for node in page] == found
    assert operator.get("/v1/graphs/build", params={"state": "lost"}).status_code == 422
    (graph,) = operator.get("/v1/graphs", params={"open": "true"}).json()["graphs"]
    assert graph["name"] == "build"
    cancelled = [operator.post("/v1/graphs/cancel", json={"graph": made["id"]}).json() for _ in range(2)]
    assert [(each["state"], each["jobs"]) for each in cancelled] == [("cancelled", 3), ("cancelled", 0)]


def test_a_name_that_several_instances_use_needs_its_instance(operator: httpx.Client) -> None:
    for instance in ("ci", "qa"):
        operator.post("/v1/graphs", json=GRAPH | {"instance": instance})
    answer = operator.get("/v1/graphs/build")
    assert (answer.status_code, answer.json()["field"]) == (400, "instance")
    assert operator.get("/v1/graphs/build", params={"instance": "qa"}).json()["instance"] == "qa"


def test_a_token_keeps_all_nodes_to_its_priorities(served: Served) -> None:
    mine = served.client(served.token("submitter", instance="ci", priority_ceiling=2))
    assert mine.post("/v1/graphs", json=GRAPH).status_code == 403
    allowed = mine.post("/v1/graphs", json=GRAPH | {"priority": 2})
    assert allowed.status_code == 200, allowed.text
    assert mine.post("/v1/graphs", json=with_node(priority=1) | {"priority": 2}).status_code == 403


def test_what_is_no_graph_is_refused_with_its_place_and_not_written(served: Served, operator: httpx.Client) -> None:
    before = counts(served.database)
    for body, status, field in (
        (GRAPH | {"nodes": []}, 422, "nodes"),
        (GRAPH | {"name": "Not A Name"}, 422, "name"),
        (GRAPH | {"on_failure": "explode"}, 422, "on_failure"),
        (with_node(node=-1), 422, "nodes.0.node"),
        (with_node(node="1"), 422, "nodes.0.node"),
        (with_node(after=["2"]), 422, "nodes.0.after.0"),
        (with_node(after=[{"node": 2, "on_failure": "no"}]), 422, "nodes.0.after.0.on_failure"),
        (with_node(command=[]), 422, "nodes.0.command"),
        (with_node(key="k"), 400, "nodes.0.key"),
        (with_node(dedup_key="k"), 400, "nodes.0.dedup_key"),
        (with_node(instance="ci"), 400, "nodes.0.instance"),
        (with_node(after=[7, 7]), 400, "nodes.0.after"),
        (with_node(label="x" * 65), 400, "nodes.0.label"),
        (with_node(after=[3]), 400, "nodes"),
        (with_node(node=3), 400, "nodes"),
        (with_node(after=[9]) | {"on_phantom": "reject"}, 400, "nodes"),
        (GRAPH | {"nodes": [{"node": n, "command": ["x"]} for n in range(10_001)]}, 422, "nodes"),
        (GRAPH | {"nodes": [{"node": n, "command": ["x"], "after": list(range(n))} for n in range(450)]}, 400, "nodes"),
    ):
        answer = operator.post("/v1/graphs", json=body)
        assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    for status, wrong in ((422, {"command": []}), (400, {"command": ["x"], "key": "k"})):
        answer = operator.post("/v1/graphs", json=GRAPH | {"nodes": [{"node": n, **wrong} for n in range(12)]})
        told = answer.json()
        assert (answer.status_code, len(told["errors"]), told["more"]) == (status, 10, 2), answer.text
    assert counts(served.database) == before


def test_the_same_key_is_the_same_graph_and_another_content_a_conflict(operator: httpx.Client) -> None:
    first, second = (operator.post("/v1/graphs", json=GRAPH | {"key": "k"}).json() for _ in range(2))
    assert (second["id"], second["nodes"], second["created"]) == (first["id"], first["nodes"], False)
    answer = operator.post("/v1/graphs", json=with_node(priority=9) | {"key": "k"})
    assert (answer.status_code, answer.json()["code"]) == (409, "key_reused")


def test_a_retry_that_is_repeated_gets_the_same_answer_and_runs_nothing_again(
    pool: Pool, operator: httpx.Client
) -> None:
    operator.post("/v1/graphs", json=GRAPH)
    bot, request = pool.bot(), {"graph": "build", "key": "k"}

    def fail() -> None:
        (work,) = pool.given(bot)
        bot.sync(completed(work, "failed"))

    fail()
    first, again = (operator.post("/v1/graphs/retry", json=request).json() for _ in range(2))
    assert [node["node"] for node in first["nodes"]] == [1]
    assert again == first
    fail()
    assert operator.post("/v1/graphs/retry", json=request).json() == first, "the answer to the first may be late"
    assert operator.post("/v1/graphs/retry", json={**request, "key": "l"}).json() != first
    fail()
    assert operator.post("/v1/graphs/retry", json=request).json() == first, "also after another retry"
    assert operator.post("/v1/graphs/retry", json={**request, "key": "k" * 151}).json()["field"] == "key"


def test_a_client_retries_a_graph_at_an_older_gateway_without_a_key() -> None:
    unknown = Answer({"code": "bad_input", "field": "key", "detail": "key: is not known"}, 422)
    with gateway(in_turn(unknown, Answer({"nodes": []}), unknown)) as older:
        client = Client(older.url, "token", chance=random.Random(1))
        assert client.graphs.retry("g") == {"nodes": []}
        assert ["key" in asked.body for asked in older.asked] == [True, False]
        with pytest.raises(BadInput, match="key"):
            client.graphs.retry("g", key="k")


def test_a_graph_that_a_queue_has_no_room_for_is_refused_whole(pool: Pool, operator: httpx.Client) -> None:
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('x', 0)")
    answer = operator.post("/v1/graphs", json=GRAPH)
    assert (answer.status_code, answer.json()["code"]) == (409, "queue_full")
    assert pool.row("SELECT count(*) FROM jobs")[0] == 0


def test_what_happens_to_graphs_is_told_in_the_log(operator: httpx.Client) -> None:
    with capture_logs() as logs:
        for _ in range(2):
            made = operator.post("/v1/graphs", json=with_node(after=[9, 8])).json()
        operator.post("/v1/graphs/cancel", json={"graph": "build"})
        operator.post("/v1/graphs/cancel", json={"graph": "nobody"})
    assert made["warnings"] == ["no node has the numbers 8, 9: what depends on them will never become ready"]
    told = [entry["event"] for entry in logs if entry["event"].startswith("leasehold.")]
    assert told.count("leasehold.node_completed") == 6, "all nodes of both graphs were cancelled"
    assert [event for event in told if event != "leasehold.node_completed"] == [
        "leasehold.phantom_dependencies",
        "leasehold.job_registered",
        "leasehold.duplicate_register",
        "leasehold.phantom_dependencies",
        "leasehold.job_registered",
        "leasehold.job_deregistered",
        "leasehold.deregister_unknown_job",
    ]


FAIR = """
SELECT g.name, count(*) FILTER (WHERE c.terms->>'graph' = g.id::text AND j.constrained) AS sharing, count(*) AS nodes
FROM graphs g JOIN graph_nodes n ON n.graph = g.id JOIN jobs j ON j.id = n.job_id JOIN queues q ON q.id = j.queue
LEFT JOIN constraint_sets c ON c.id = q.constraint_set GROUP BY 1 ORDER BY 1"""


@pytest.mark.usefixtures("commanding")
def test_a_graph_asks_for_its_fair_share_over_http_in_its_file_by_an_option_and_in_sql_alike(
    operator: httpx.Client, file: Path, pool: Pool
) -> None:
    def named(name: str, **fields: Any) -> dict[str, Any]:
        return GRAPH | {"name": name} | fields

    assert operator.post("/v1/graphs", json=named("http", fair_share=True)).status_code == 200
    assert operator.post("/v1/graphs", json=named("http-not", fair_share=False)).status_code == 200
    call("graph", "submit", str(written(file, named("file", fair_share=True))))
    call("graph", "submit", str(written(file, named("file-not"))))
    call("graph", "submit", str(written(file, named("option"))), "--fair-share")
    pool.row("SELECT * FROM submit_graph(CAST(:it AS jsonb))", it=json.dumps(named("sql", fair_share=True)))
    pool.row("SELECT * FROM submit_graph(CAST(:it AS jsonb))", it=json.dumps(named("sql-not")))
    assert {row.name: (row.sharing, row.nodes) for row in pool.rows(FAIR)} == {
        name: (0 if name.endswith("-not") else 3, 3)
        for name in ("file", "file-not", "http", "http-not", "option", "sql", "sql-not")
    }
    refused = operator.post("/v1/graphs", json=named("wrong", fair_share="yes"))
    assert (refused.status_code, refused.json()["detail"]) == (422, "fair_share: input should be a valid boolean")
    with pytest.raises(BadInput, match=r"fair_share: input should be a valid boolean$"):
        call("graph", "submit", str(written(file, named("wrong", fair_share=1))))


@pytest.mark.usefixtures("commanding")
def test_the_commands_submit_show_list_and_cancel(file: Path, capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    call("graph", "submit", str(file))
    graph = capsys.readouterr().out.split()[-1]
    call("graph", "show", "build")
    shown = capsys.readouterr().out
    assert graph in shown
    assert "3, with 3 dependencies" in shown
    assert "--after" not in shown
    call("graph", "show", "build", "--state", "blocked", "--nodes", "1", "--json")
    assert [each["node"] for each in json.loads(capsys.readouterr().out)["page"]] == [2]
    call("graph", "show", "build", "--nodes", "2")
    assert capsys.readouterr().out.endswith("\nmore, if there are any: --after 2\n")
    call("graph", "show", "build", "--nodes", "2", "--after", "2", "--json")
    assert [each["node"] for each in json.loads(capsys.readouterr().out)["page"]] == [3]
    call("graph", "list", "--open", "--json")
    (listed,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (listed["id"], listed["blocked"], listed["state"]) == (graph, 2, "active")
    call("graph", "retry", "@last")
    assert f"{graph} (unchanged): no node of it has failed, and it goes on\n" in capsys.readouterr().out
    with pytest.raises(
        NotFound, match="@failed: there is no graph that this token has submitted and that has a failed"
    ):
        call("graph", "show", "@failed")
    pool.change("UPDATE graphs SET actor = actor || 'x'")
    with pytest.raises(NotFound, match="@last"):
        call("graph", "wait", "@last")
    call("graph", "cancel", "build")
    assert f"{graph} cancelled, 3 jobs cancelled or asked to stop\n" in capsys.readouterr().out
    with pytest.raises(
        LeaseholdError, match=r"3 of 3 nodes did not succeed; the first: node 1, job [0-9a-f-]+, is cancelled: "
    ):
        call("graph", "wait", graph)
    with pytest.raises(NotFound):
        call("graph", "show", "nobody")


@pytest.mark.usefixtures("commanding")
def test_acts_that_leave_a_blocked_node_say_why_and_what_would_do_it(
    operator: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = operator.post("/v1/graphs", json=GRAPH).json()["nodes"][1]["id"]
    instead = f"`leasehold reschedule {blocked} --in 1h` puts off its start"
    for act, why in (
        (["hold"], f"it waits for nodes before it, and only queued jobs are held; {instead}"),
        (["release"], f"it is not held; `leasehold explain {blocked}` says what it waits for"),
        (["requeue"], f"it waits already; `leasehold explain {blocked}` says for what"),
        (["priority", "0"], "it has this priority already"),
        (["reschedule", "--now"], "it has this start already"),
    ):
        call(*act, blocked)
        assert capsys.readouterr().out.endswith(f" (unchanged: {why})\n"), act
    call("reschedule", blocked, "--in", "1h")
    assert "(unchanged" not in capsys.readouterr().out, "what hold proposes does it"


@pytest.mark.usefixtures("commanding")
def test_a_requeue_of_a_node_that_cannot_run_says_what_stands_in_its_way(
    pool: Pool, operator: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"node": n, "command": ["true"], "after": [n - 1] if n > 1 else []} for n in (1, 2, 3)]
    made = operator.post("/v1/graphs", json={"name": "g", "nodes": nodes, "on_failure": "cancel"}).json()
    done, failing, cancelled = (node["id"] for node in made["nodes"])
    bot = pool.bot()
    for job, state in ((done, "succeeded"), (failing, "failed")):
        (work,) = pool.given(bot)
        assert work["job"] == job
        if state == "failed":
            call("requeue", job)
            assert capsys.readouterr().out.endswith(" (unchanged: a bot has it)\n")
        bot.sync(completed(work, state))
    pool.upkeep().run_once()
    goes_on = f"`leasehold graph retry {made['id']}` lets the graph go on"
    for job, why in (
        (done, "succeeded: only jobs that are held, failed, dead or cancelled are queued again"),
        (cancelled, f"cancelled: it depends on node 2 of its graph, which failed; {goes_on}"),
    ):
        with pytest.raises(Conflict) as refused:
            call("requeue", job)
        assert str(refused.value) == f"job '{job}' is {why}; nothing was changed"
    call("graph", "retry", made["id"])
    assert "\nnode 2 again as " in capsys.readouterr().out, "what the requeue proposes does it"


@pytest.mark.usefixtures("commanding")
def test_the_first_node_that_failed_is_named_with_why(pool: Pool, operator: httpx.Client, tmp_path: Path) -> None:
    """Not one that was cancelled because of it, whatever its number, nor a callback that has nothing to do."""
    nodes = [
        {"node": 1, "command": ["true"], "after": [{"node": 3, "on_failure": "cancel"}]},
        {"node": 2, "command": ["true"], "after": [{"node": 3, "on_failure": "run"}]},
        {"node": 3, "command": ["false"]},
    ]
    file = written(tmp_path / "g.json", {"name": "g", "nodes": nodes, "callback": {"command": ["true"]}})
    call("graph", "submit", str(file))
    assert operator.get("/v1/graphs/g").json()["first_failed"] is None
    bot = pool.bot()
    (work,) = pool.given(bot)
    bot.sync(completed(work, "failed", exit_code=3, reason="exit code 3"))
    failed = {"node": 3, "job": work["job"], "state": "failed", "reason": "exit code 3"}
    assert operator.get("/v1/graphs/g").json()["first_failed"] == failed


def test_wait_goes_on_until_no_node_can_run(stands: Gateway, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is stalled will not end by itself; a cancelled graph is over when its bots have stopped what ran."""
    seen = dict.fromkeys(("blocked", "blocked_forever", "queued", "parked", "active", "failed", "cancelled"), 0)
    shown = seen | {"id": "g", "name": "build", "instance": "ci", "nodes": 3, "edges": 3, "missing": [], "dead": 0}
    going = Answer(shown | {"state": "active", "active": 1, "succeeded": 2})
    stands.script = in_turn(
        Answer({"id": "g", "warnings": ["no node 9"]}), going, Answer(shown | {"state": "finished", "succeeded": 3})
    )
    call("graph", "submit", str(file), "--wait")
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == "warning: no node 9"
    assert "2 of 3 jobs ended" in told.err, "who waits sees how far it is"
    assert "finished" in told.out
    assert len(stands.asked) == 3
    stalled = Answer(shown | {"state": "stalled", "succeeded": 1, "failed": 1, "blocked": 1, "blocked_forever": 1})
    stands.script = in_turn(Answer(shown | {"state": "cancelled", "active": 1, "succeeded": 1}), stalled)
    with pytest.raises(
        LeaseholdError, match=r"^2 of 3 nodes did not succeed; `leasehold graph retry g` lets it go on$"
    ):
        call("graph", "wait", "g")
    stands.script = in_turn(going)
    with pytest.raises(LeaseholdError, match="not final after 0 s: g"):
        call("graph", "wait", "g", "--timeout", "0")
    del stands.asked[:]
    stands.script = in_turn(going, Answer(shown | {"state": "replaced", "succeeded": 3}))
    call("graph", "wait", "build")
    assert stands.paths() == ["GET /v1/graphs/build", "GET /v1/graphs/g"], "it keeps to the first one"
    over = {"id": "g", "name": "build", "state": "finished"}
    for command, answer, why in (
        ("retry", over | {"nodes": []}, "graph 'g' is finished, no node of it has failed; nothing runs again"),
        ("cancel", over | {"jobs": 0}, "graph 'g' is finished already; results are kept"),
    ):
        stands.script = in_turn(Answer(answer), Answer(over))
        with pytest.raises(Conflict, match=why):
            call("graph", command, "g")


@pytest.mark.usefixtures("commanding")
def test_a_file_that_holds_no_graph_is_refused_with_its_place(file: Path, pool: Pool) -> None:
    for broken, said in (
        (with_node(after=[2]), "Circular dependency detected in job build: 1 → 2 → 1"),
        ([], f"{file}: "),
        (with_node(after=["x"]), f"{file}: nodes.0.after.0 (node 1): "),
        (with_node(key="k"), f"{file}: nodes.0.key (node 1): "),
        (
            {"name": "g", "nodes": [{"node": n, "command": []} for n in range(1, 13)]},
            f"{file}: nodes.0.command (node 1): ",
        ),
    ):
        with pytest.raises(BadInput) as refused:
            call("graph", "submit", str(written(file, broken)))
        assert said in str(refused.value)
    assert [each.field for each in refused.value.others[:1]] == [f"{file}: nodes.1.command (node 2)"]
    assert (len(refused.value.others), refused.value.more) == (9, 2)
    assert pool.row("SELECT count(*) AS n FROM audit WHERE action = 'graphs.submit'").n == 0


CALLBACK: dict[str, Any] = {
    "name": "batch",
    "nodes": [{"node": 1, "command": ["true"]}, {"node": 2, "command": ["true"]}],
    "callback": {"command": ["tell"], "on": "failed"},
}


def test_a_callback_is_a_node_that_says_when_it_runs(operator: httpx.Client) -> None:
    made = operator.post("/v1/graphs", json=CALLBACK).json()
    assert [node["node"] for node in made["nodes"]] == [1, 2, 3]
    assert made["callback"] == made["nodes"][2]["id"]
    shown = operator.get("/v1/graphs/batch").json()
    assert (shown["nodes"], shown["callback"], shown["callback_outcome"]) == (3, "failed", None)
    assert [node["callback"] for node in shown["page"]] == [None, None, "failed"]
    assert operator.post("/v1/graphs", json=GRAPH).json()["callback"] is None
    refused = operator.post("/v1/graphs", json=CALLBACK | {"callback": {"command": ["tell"], "key": "k"}})
    assert refused.json()["field"] == "callback.key"
    assert operator.post("/v1/graphs", json=GRAPH | {"callback": {"command": ["x"]}}).json()["field"] == "nodes.1.after"


def test_jobs_and_their_callback_are_submitted_by_one_command(
    commanding: None, tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"command": ["true"]}\n\n{"command": ["false"], "label": "x"}\n')
    options = ("--then-on", "failed", "--key", "k", "--instance", "ours", "--label", "told")
    call("submit", "--file", str(jobs), *options, "--json", "--", "tell", "-v")
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    call("submit", "--file", str(jobs), *options, "--json", "--", "tell", "-v")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == done | {"created": False}
    query = "SELECT public_id::text, label, state FROM jobs WHERE instance = (SELECT id FROM instances) ORDER BY id"
    assert [tuple(row) for row in pool.rows(query)] == [
        (done["jobs"][0], "", "queued"), (done["jobs"][1], "x", "queued"), (done["callback"], "told", "blocked")
    ]  # fmt: skip
    jobs.write_text('{"command": ["true"]}\n{"command": ["true"], "key": "own"}\n')
    with pytest.raises(BadInput, match=r"jobs.jsonl:2: key: belongs to the graph"):
        call("submit", "--file", str(jobs), "--then-on", "done", "--", "tell")
    with pytest.raises(BadInput, match=r"--model: needs a --resource-class"):
        call("submit", "--file", str(jobs), "--then-on", "done", "--model", "m", "--", "tell")


def test_a_wait_for_a_graph_whose_callback_had_nothing_to_do_is_a_success(
    commanding: None, pool: Pool, operator: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    operator.post("/v1/graphs", json=CALLBACK)
    bot = pool.bot(capacity=2)
    bot.sync(*[completed(work) for work in pool.given(bot)])
    call("graph", "wait", "batch")
    said = capsys.readouterr().out
    assert "if failed: cancelled" in said
