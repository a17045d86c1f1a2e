"""The pages of graphs: the newest graphs with the states of their nodes, and one graph with its nodes."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from leasehold.client import Client
from leasehold.errors import LeaseholdError
from leasehold.graphs import GraphState

from bots.console.graph_drawing import MAX_DRAWN, Drawing, name_of
from bots.console.parts import Cell, Facts, Line, Table, node
from bots.console.view import SLOW, View
from bots.console.words import ago, state, text

Record = Mapping[str, Any]

#: Graphs on one page, and nodes on the page of a graph that is too large to be drawn.
PAGE, PART = 50, 200
#: States of nodes that have ended badly.
BAD = ("failed", "dead", "cancelled")
EMPTY = "There is no graph. leasehold graph submit FILE makes one."
STATES = ("blocked", "queued", "parked", "active", "succeeded", "failed", "cancelled", "dead")


def show_graphs(view: View) -> None:
    """Put the graphs before the one that the URL names into `view`."""
    before, unfinished = view.query.get("before"), "open" in view.query
    with node("nav", kind="acts", aria_label="Which graphs"):
        node("a", "All", href="/graphs", aria_current=None if unfinished else "page")
        node("a", "Unfinished", href="/graphs?open=1", aria_current="page" if unfinished else None)
    table = Table(
        "",
        ("graph", "state", "instance", "nodes", *STATES, "submitted"),
        empty=EMPTY,
    )
    following = node("a", "Next page", data_key="n")
    following.set_visibility(False)

    async def refresh() -> None:
        found = await view.ask(lambda client: client.graphs.list(limit=PAGE, before=before, open=unfinished or None))
        table.show([(graph["id"], graph_cells(graph)) for graph in found])
        following.set_visibility(len(found) == PAGE)
        if len(found) == PAGE:
            query = {"before": found[-1]["id"]} | ({"open": "1"} if unfinished else {})
            following.props["href"] = f"/graphs?{urlencode(query)}"

    view.live(refresh, seconds=SLOW)


def graph_cells(graph: Record) -> list[Cell]:
    """Return the cells of one graph."""
    return [
        Cell(text(graph["name"]), f"/graphs/{graph['id']}"),
        Cell(text(graph["state"]), kind=f"state-{graph['state']}"),
        Cell(text(graph["instance"])),
        Cell(text(graph["nodes"])),
        *(Cell(text(graph[state]), kind=f"state-{state}" if graph[state] else "") for state in STATES),
        ago(graph["created_at"]),
    ]


def show_graph(view: View, id: str) -> None:
    """Put the page of one graph into `view`."""

    async def question() -> str:
        graph = await view.ask(lambda client: client.graphs.show(id))
        if graph["finished_at"] is not None:
            raise LeaseholdError(f"the graph is {graph['state']} already")
        return f"Cancel the waiting jobs of the graph {text(graph['name'])}, and stop its running ones?"

    async def cancel() -> None:
        await view.ask(lambda client: client.graphs.cancel(id))

    async def retried() -> str:
        graph = await view.ask(lambda client: client.graphs.show(id))
        if not graph["failed"] + graph["cancelled"] + graph["dead"]:
            raise LeaseholdError("no node has failed")
        return f"Give the failed nodes of the graph {text(graph['name'])} new jobs? What depends on them waits again."

    async def retry() -> None:
        await view.ask(lambda client: client.graphs.retry(id))

    lead = Line()
    with node("section", kind="bar", aria_label="Acts on the graph"), node("div", kind="acts"):
        again = view.confirmed("Retry failed nodes", retried, retry, kind="main")
        stop = view.confirmed("Cancel the graph", question, cancel, kind="danger")
    for act in (again, stop):
        act.set_visibility(False)  # until it is known that there is such a graph
    drawing = Drawing()
    node("h2", "Nodes")
    columns = ("node", "runs", "state", "after", "depth", "waits for", "reason")
    nodes = Table("", columns, empty="There are none.")
    more = node("p", kind="note")
    node("h2", "The graph")
    facts = Facts()

    async def refresh() -> None:
        graph = await view.ask(lambda client: _with_nodes(client, id))
        view.heading.text = text(graph["name"])
        lead.show([state(graph["state"]), Cell(graph["instance"]), ago(graph["created_at"])])
        again.set_visibility(bool(graph["failed"] + graph["cancelled"] + graph["dead"]))
        stop.set_visibility(graph["finished_at"] is None)
        whole = len(graph["page"]) == graph["nodes"]
        drawing.show(graph["page"], whole=whole)
        told = f"{PART} of {graph['nodes']} nodes, those that ended badly first. leasehold graph show tells of all."
        more.text = "" if whole else told
        known = {name: graph[name] for name in ("name", "id", "instance", "priority", "nodes", "edges", *STATES)}
        known |= {"can never run": graph["blocked_forever"]}
        cells = {"state": Cell(graph["state"]), "submitted": ago(graph["created_at"])}
        if (first := GraphState.of(graph).first_failed) is not None:
            cells["first failed"] = Cell(text(str(first)), first.job and f"/jobs/{first.job}")
        facts.show(cells | {key: Cell(text(value)) for key, value in known.items()})
        nodes.show([(str(one["node"]), node_cells(one)) for one in graph["page"]])

    view.live(refresh, seconds=SLOW)


def _with_nodes(client: Client, id: str) -> Record:
    """Return a graph with all of its nodes if it can be drawn, else with a part, which begins with those that ended
    badly."""
    graph = client.graphs.show(id, nodes=MAX_DRAWN)
    if len(graph["page"]) == graph["nodes"]:
        return graph
    bad = client.graphs.show(graph["id"], nodes=PART, state=BAD)["page"]
    known = {one["node"] for one in bad}
    return graph | {"page": [*bad, *(one for one in graph["page"] if one["node"] not in known)][:PART]}


def node_cells(one: Record) -> list[Cell]:
    """Return the cells of one node."""
    return [
        Cell(text(one["node"])),
        Cell(text(name_of(one)), one["job"] and f"/jobs/{one['job']}", "command"),
        Cell(text(one["state"]), kind=f"state-{one['state']}"),
        Cell(", ".join(map(str, one["after"])) or "-"),
        Cell(text(one["depth"])),
        Cell("a node that can never end so" if one["dead_end"] else text(one["waits_for"])),
        Cell(text(one["reason"])),
    ]
