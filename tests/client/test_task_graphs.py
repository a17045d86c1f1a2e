"""Graphs of calls of tasks, which take what earlier calls have returned."""

from decimal import Decimal

import leasehold
import pytest
from leasehold.errors import BadInput
from leasehold.graphs import GraphRequest
from leasehold.tasks.arguments import decode_call
from leasehold.testing import running_pool
from leasehold.wire import JsonSerialiser

from tests.support.apps import example_app, task_app

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
        add, half = example_app.add_all, example_app.divide
        chained = leasehold.chain(half.s(8), half.s(2), leasehold.group(half.s(2), half.s(4))).defer()
        assert chained.result(example_app.ENDS) == [1.0, 0.5]
        summed = leasehold.chord([add.s([Decimal(n)]) for n in (1, 2, 3)], add.s(Decimal(10))).defer()
        assert summed.result(example_app.ENDS) == Decimal(16)
        failing = leasehold.chain(half.s(8, 0), half.s(2)).defer()
        with pytest.raises(leasehold.TaskFailed, match="division by zero"):
            failing.result(example_app.ENDS)
    assert ended["result"] == {"ok": "4.5", "typed": True}, ended


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
    named = leasehold.chain(example_app.divide.s(1), name="halves").request()
    assert (named["name"], [node["node"] for node in named["nodes"]]) == ("halves", [0])


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
