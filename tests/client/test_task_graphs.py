"""Graphs of calls of tasks, which take what earlier calls have returned."""

import json
from decimal import Decimal
from typing import Any

import leasehold
import pytest
from leasehold.errors import BadInput
from leasehold.graphs import GraphRequest
from leasehold.tasks.arguments import decode_call, encode_call
from leasehold.tasks.node_results import NodeResult
from leasehold.wire import JsonSerialiser

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
