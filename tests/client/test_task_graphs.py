"""Graphs of calls of tasks, which take what earlier calls have returned."""

from decimal import Decimal

import pytest
from leasehold.errors import BadInput
from leasehold.graphs import GraphRequest
from leasehold.tasks.arguments import decode_call
from leasehold.testing import running_pool
from leasehold.wire import JsonSerialiser

from tests.support.apps import example_app

pytest_plugins = ["leasehold.testing"]


def test_calls_of_a_graph_take_what_others_have_returned() -> None:
    with running_pool(bots=0, app="tests.support.apps.example_app:pool"):
        graph = example_app.pool.graph("sums")
        first = graph.add(example_app.add_all, [], Decimal("1.5"))
        second = graph.add(example_app.add_all, [first.result, first.result])
        seen = graph.add(example_app.add_all, [second.result], named={"more": first.result})
        taken = graph.submit()
        taken.wait(example_app.ENDS)
        (ended,) = example_app.pool.client.results([taken.jobs[seen].id])
    assert ended["result"] == {"ok": "4.5", "typed": True}, ended


def test_the_request_of_a_node_says_whose_results_it_takes() -> None:
    graph = GraphRequest("sums", {})
    first = graph.add(example_app.add_all, [])
    graph.add(example_app.add_all, [first.result])
    _, node = graph.request()["nodes"]
    assert node["after"] == [0]
    assert '"inputs": [0]' in node["stdin"]
    filled = node["stdin"].replace("[0]}", '{"0": {"state": "%s", "result": %s}}}')
    function, large = example_app.add_all.function, {"ok": "2", "typed": True}

    def arguments(state: str, result: str) -> object:
        return decode_call(function, JsonSerialiser(), filled % (state, result), lambda _: large)[0][0]

    assert arguments("succeeded", '{"ok": "1.5", "typed": true}') == [Decimal("1.5")]
    assert arguments("succeeded", '{"kept": 1}') == [Decimal(2)]
    assert arguments("failed", "null") == [None]
    with pytest.raises(BadInput, match=r"^inputs: node 0 has succeeded without a result"):
        arguments("succeeded", "null")
