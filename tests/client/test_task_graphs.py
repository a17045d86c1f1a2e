"""Graphs of calls of tasks, which take what earlier calls have returned."""

import json
import uuid
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import leasehold
import pytest
from leasehold.client import Client
from leasehold.errors import BadInput, NotFound
from leasehold.graphs import GraphRequest, GraphState, Node
from leasehold.tasks.arguments import decode_call, encode_call
from leasehold.tasks.node_results import NodeResult
from leasehold.wire import JsonSerialiser

from schema.requests import GraphRequest as StoredGraph
from tests.support.apps import example_app, task_app


def test_calls_that_cannot_be_put_together_are_refused() -> None:
    greet = example_app.greet
    with pytest.raises(BadInput, match="unique: does not hold for nodes"):
        leasehold.chain(greet.s("a"))
    with pytest.raises(BadInput, match="calls: are at least one"):
        leasehold.chain()
    with pytest.raises(BadInput, match="calls: are at least one"):
        leasehold.chain(leasehold.group())
    with pytest.raises(BadInput, match="is one of another"):
        leasehold.chain(example_app.divide.s(1), task_app.add.s(2))
    with pytest.raises(BadInput, match=r"value: a dict with the key 'leasehold.result' alone stands for the result"):
        leasehold.chain(example_app.unannotated.s([{"leasehold.result": 1}]))
    named = leasehold.chain(example_app.divide.s(1), name="halves").request()
    assert (named["name"], [node["node"] for node in named["nodes"]]) == ("halves", [0])


def test_a_call_runs_once_all_others_have_ended_if_one_has_failed() -> None:
    divide = example_app.divide
    calls = leasehold.chain(divide.s(1), divide.s(2)).then(divide.s(3), on="failed")
    request = calls.request()
    callback = request["callback"]
    assert (callback["on"], callback["command"][-1], json.loads(callback["stdin"])["args"]) == (
        "failed", request["nodes"][0]["command"][-1], [3]
    )  # fmt: skip
    taken = StoredGraph.model_validate(request)
    assert (taken.on_failure, taken.callback_node) == ("cancel", 2), "a node that stays blocked would be refused"
    command = GraphRequest("report", {"on_failure": "run"}).then(["echo", "over"], label="tell")
    assert command.request() == {
        "name": "report", "on_failure": "run", "nodes": [],
        "callback": {"command": ["echo", "over"], "label": "tell", "on": "done"},
    }  # fmt: skip
    with pytest.raises(BadInput, match="callback: is there already: a graph has one"):
        calls.then(divide.s(4))
    other = leasehold.chain(divide.s(1))
    with pytest.raises(BadInput, match="callback: takes no result of a node"):
        other.then(example_app.add_all.s([Node(0).result]))
    with pytest.raises(BadInput, match=r"label: is an option of the task: use task.using"):
        other.then(divide.s(3), label="tell")
    with pytest.raises(BadInput, match=r"callback: is a call such as divide.s\(1\), not the task"):
        other.then(divide)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="add' is one of another"):
        other.then(task_app.add.s(1, 2))


def test_a_callback_that_had_nothing_to_do_is_no_call_that_failed() -> None:
    calls = leasehold.chain(example_app.divide.s(1)).then(example_app.divide.s(3), on="failed")
    result = {"state": "succeeded", "result": {"ok": 0.5}, "reason": None}
    client = SimpleNamespace(results=lambda ids: [result | {"id": id} for id in ids])
    ids = [str(uuid.UUID(int=number)) for number in range(2)]
    nodes = [{"node": 0, "job": ids[0], "state": "succeeded"}, {"node": 1, "job": ids[1], "state": "cancelled"}]
    assert calls.value(cast(Client, client), nodes) == 0.5
    counts = dict.fromkeys(("blocked", "blocked_forever", "queued", "parked", "active", "failed", "dead"), 0)
    shown = {"id": ids[0], "name": "a", "state": "finished", "nodes": 2, "succeeded": 1, "cancelled": 1, **counts}
    told = {outcome: GraphState.of(shown | {"callback": "failed", "callback_outcome": outcome}) for outcome in (
        "cancelled", "succeeded")}  # fmt: skip
    assert (told["cancelled"].needless, told["cancelled"].all_succeeded) == (1, True)
    assert not told["succeeded"].all_succeeded, "another node was cancelled"
    assert not GraphState.of(shown | {"callback": None}).all_succeeded


def test_the_values_of_a_group_are_read_together() -> None:
    calls = leasehold.chain(leasehold.group(*[example_app.divide.s(number) for number in range(30)]))
    ids = [str(uuid.UUID(int=number)) for number in range(30)]
    asked: list[list[str]] = []

    def results(wanted: list[str]) -> list[dict[str, Any]]:
        asked.append(wanted)
        # In another order: an answer names its job.
        return [
            {"id": id, "state": "succeeded", "result": {"ok": ids.index(id)}, "reason": None} for id in wanted[::-1]
        ]

    nodes = [{"node": number, "job": id, "state": "succeeded"} for number, id in enumerate(ids)]
    assert calls.value(cast(Client, SimpleNamespace(results=results)), nodes) == list(range(30))
    assert asked == [ids]
    gone = [*nodes[:-1], nodes[-1] | {"job": None}]
    with pytest.raises(NotFound, match="node 29 ended long ago, and its job with its result is not kept any more"):
        calls.value(cast(Client, SimpleNamespace(results=results)), gone)


class Own:
    """A serialiser of a program's own."""

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, value: Any) -> Any:
        return value


def test_the_request_of_a_node_says_whose_results_it_takes() -> None:
    graph = GraphRequest("sums", {})
    first = graph.add(example_app.add_all, [])
    graph.add(example_app.add_all, [first.result, first.result])
    _, node = graph.request()["nodes"]
    assert node["after"] == [0]
    assert json.loads(node["stdin"])["inputs"] == [0]
    graph.add(task_app.echo.using(unique=False), "ä")
    assert graph.request()["nodes"][-1]["stdin"] == '{"args": ["\\u00e4"], "kwargs": {}}'
    two, seen = {"ok": "2", "typed": True}, []

    def fetch(reference: Any) -> dict[str, Any]:
        seen.append(reference)
        return two

    def arguments(state: str, result: object, task: Any = example_app.add_all) -> Any:
        found = {"0": {"state": state, "result": result}}
        return decode_call(task.function, JsonSerialiser(), node["stdin"], results=lambda: found, fetch=fetch)[0][0]

    assert arguments("succeeded", {"ok": "1.5", "typed": True}) == [Decimal("1.5")] * 2
    assert arguments("succeeded", {"kept": 1}) == [Decimal(2)] * 2
    assert seen == [1], "a large value is fetched once, however often it is taken"
    assert arguments("failed", None) == [None, None]
    with pytest.raises(BadInput, match=r"^inputs: node 0 has succeeded without a result"):
        arguments("succeeded", None)
    with pytest.raises(BadInput, match=r"^value: cannot be read by the annotation of this process: it has none"):
        arguments("succeeded", two, example_app.unannotated)
    with pytest.raises(BadInput, match=r"^parts: cannot be read by the annotation of this process"):
        arguments("succeeded", {"ok": "many", "typed": True})


@pytest.mark.parametrize("inputs", [{"0": {"state": "succeeded", "result": {"kept": 7}}}, 0, "0", ["0"], [True]])
def test_a_submitter_names_nodes_and_cannot_write_their_results(inputs: object) -> None:
    stdin = json.dumps({"args": [[{"leasehold.result": 0}]], "kwargs": {}, "inputs": inputs})
    used: list[object] = []
    with pytest.raises(BadInput, match=r"^inputs: lists the numbers of nodes"):
        decode_call(
            example_app.add_all.function,
            JsonSerialiser(),
            stdin,
            results=lambda: {},
            fetch=lambda reference: used.append(reference) or {},  # type: ignore[func-returns-value]
        )
    assert used == []


def test_a_pool_with_a_serialiser_of_its_own_takes_no_results_of_nodes() -> None:
    with pytest.raises(BadInput, match="cannot be the result of a node in a pool with a serialiser"):
        encode_call(example_app.add_all.function, Own(), ([NodeResult(0)],), {}, in_graph=True)
    with pytest.raises(BadInput, match="beside the result of a node an argument holds only JSON"):
        encode_call(example_app.add_all.function, JsonSerialiser(), ([NodeResult(0), Decimal(1)],), {}, in_graph=True)
