"""The commands on graphs: submit, show, list, retry, cancel and wait."""

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import IO, Any

import click
from leasehold import wire
from leasehold.calls.graphs import MAX_GRAPHS, MAX_NODES
from leasehold.client import Client
from leasehold.errors import BadInput, Conflict, LeaseholdError
from leasehold.graphs import GraphState
from leasehold.states import JobState
from pydantic import ValidationError

from bots.cli import output, times
from bots.cli.caller import Caller, caller_options
from bots.cli.output import Record
from bots.cli.waiting import graph_progress
from bots.cli.watching import shown, watch_option
from schema import fields, readable, validation
from schema.readable import FAILED, LAST, Column, Group, plural, table, tell
from schema.requests import GraphRequest

_COUNTS = (
    "blocked", "blocked_forever", "queued", "parked", "active", "succeeded", "failed", "cancelled", "dead",
)  # fmt: skip
#: In this order they leave the list on a narrow terminal.
_LEAVING = (
    "parked", "dead", "cancelled", "blocked_forever", "blocked", "queued", "succeeded", "active", "failed",
)  # fmt: skip
_instance = click.option(
    "--instance", metavar="NAME", help="The graph's instance, if several have a graph of that name."
)
_timeout = click.option(
    "--timeout",
    type=times.Duration(0, validation.YEAR),
    metavar="DURATION",
    help="Give up after this time: seconds, or such as 90m [default: never].",
)


@click.group(cls=Group)
def graph() -> None:
    """Graphs: jobs that depend on each other."""


@graph.command()
@click.argument("file", type=click.File("rb"))
@click.option("--key", metavar="TEXT", help="The same key never makes a second graph.")
@click.option("--fair-share", is_flag=True, help="Divide the pool between this graph and others, in the order `graph`.")
@click.option("--wait", is_flag=True, help="Wait until no node can run any more; exit 0 only if all succeeded.")
@caller_options
def submit(caller: Caller, /, file: IO[bytes], key: str | None, fair_share: bool, wait: bool) -> None:
    """Submit a graph from a JSON file; - reads standard input. It replaces an unfinished graph of its name.

    \b
    {"name": "build", "nodes": [
        {"node": 1, "command": ["make", "lib"]},
        {"node": 2, "command": ["make", "test"], "after": [1]},
        {"node": 3, "command": ["notify"],
         "after": [{"node": 2, "on_failure": "run"}]}]}
    """
    request = _read(file, {"key": key} if key is not None else {}, {"fair_share": True} if fair_share else {})
    with caller.client() as client:
        taken = client.graphs.submit(request)
        for warning in taken["warnings"]:
            tell(f"warning: {output.plain(warning)}")
        if wait:
            finish(client, taken["id"], None, caller=caller, timeout=None)
        elif caller.json:
            readable.print_json(taken)
        else:
            click.echo(taken["id"])


@graph.command()
@click.argument("id")
@_instance
@_timeout
@caller_options
def wait(caller: Caller, /, id: str, instance: str | None, timeout: float | None) -> None:
    """Wait until no node of the graph can run any more. Exit 0 only if all nodes succeeded."""
    with caller.client() as client:
        finish(client, id, instance, caller=caller, timeout=timeout)


@graph.command()
@click.argument("id")
@_instance
@click.option(
    "--nodes", type=click.IntRange(0, MAX_NODES), default=50, show_default=True, help="The most nodes to show."
)
@click.option(
    "--state",
    type=click.Choice([state.value for state in JobState]),
    multiple=True,
    metavar="STATE",
    help=f"Only nodes in one of these states. [{', '.join(JobState)}; repeatable]",
)
@click.option("--after", type=click.IntRange(0), metavar="N", help="Only nodes behind this number: the next page.")
@watch_option
@caller_options
def show(
    caller: Caller,
    /,
    id: str,
    instance: str | None,
    nodes: int,
    state: Sequence[str],
    after: int | None,
    watch: float | None,
) -> None:
    """Show one graph, by its id or name, and its nodes.

    @last is the graph that this token has submitted last, @failed the last of these with a node that failed or died.
    The other commands on a graph know these words, too.
    """
    whole = id

    def look(client: Client) -> None:
        nonlocal whole
        found = client.graphs.show(whole, instance=instance, nodes=nodes, state=state, after=after)
        whole = found["id"]  # by the next look the name may be that of a newer graph
        readable.print_json(found) if caller.json else _print_graph_and_nodes(found, most=nodes, all=not state)

    shown(caller, watch, look)


@graph.command("list")
@click.option("--instance", metavar="NAME")
@click.option("--open", is_flag=True, help="Only unfinished graphs.")
@click.option("--limit", type=click.IntRange(1, MAX_GRAPHS), default=50, show_default=True)
@click.option("--before", metavar="ID", help="Only graphs submitted before this one: the next page.")
@watch_option
@caller_options
def list_graphs(
    caller: Caller, /, instance: str | None, open: bool, limit: int, before: str | None, watch: float | None
) -> None:
    """List graphs, the newest first."""

    def look(client: Client) -> None:
        found = client.graphs.list(instance=instance, open=open, limit=limit, before=before)
        readable.print_json(found) if caller.json else _list_graphs(found)

    shown(caller, watch, look)


def _list_graphs(found: Sequence[Record]) -> None:
    counts = (Column(_title(name), leaves=1 + _LEAVING.index(name)) for name in _COUNTS)
    columns: list[str | Column] = ["id", "state", Column("instance", leaves=len(_COUNTS) + 1)]
    # Beside the id, which stays whole, a name may be cut: that of chains is as long as an id.
    columns += [Column("name", least=20, middle=True), "nodes", *counts]
    rows = (
        (
            each["id"],
            output.state(each["state"]),
            each["instance"],
            each["name"],
            each["nodes"],
            *(each[name] for name in _COUNTS),
        )
        for each in found
    )
    table(columns, rows)


@graph.command()
@click.argument("id")
@_instance
@click.option(
    "--node", "nodes", type=click.IntRange(0), multiple=True, metavar="N", help="This node only [repeatable]."
)
@click.option("--from-failed", is_flag=True, help="All that failed, died or were cancelled; so without --node, too.")
@click.option("--wait", is_flag=True, help="Wait until no node can run any more; exit 0 only if all succeeded.")
@caller_options
def retry(
    caller: Caller, /, id: str, instance: str | None, nodes: tuple[int, ...], from_failed: bool, wait: bool
) -> None:
    """Let a graph go on: what failed, died or was cancelled gets new jobs, and what is blocked waits for these.

    Nodes that succeeded stay. With --node, nodes that were cancelled because of it run again as well. Exits with 2 if
    nothing has failed and the graph is over.
    """
    if nodes and from_failed:
        raise click.UsageError("give either --node or --from-failed")
    with caller.client() as client:
        done = client.graphs.retry(_whole(client, id), nodes=nodes or None, instance=instance)
        if not done["nodes"]:
            state = client.graphs.show(done["id"])["state"]
            what = f"{'none of these nodes' if nodes else 'no node of it'} has failed"
            if state != "active":
                raise Conflict("nothing_failed", f"graph '{done['id']}' is {state}, {what}; nothing runs again")
            goes_on = f"{done['id']} (unchanged): {what}, and it goes on"
            tell(goes_on) if wait or caller.json else output.line("", goes_on)
        if wait:
            finish(client, done["id"], None, caller=caller, timeout=None)
        elif caller.json:
            readable.print_json(done)
        else:
            for node in done["nodes"]:
                click.echo(f"node {node['node']} again as {node['id']}")


@graph.command()
@click.argument("id")
@_instance
@caller_options
def cancel(caller: Caller, /, id: str, instance: str | None) -> None:
    """Cancel a graph: waiting jobs at once, running ones by stopping them on their bot."""
    with caller.client() as client:
        done = client.graphs.cancel(_whole(client, id), instance=instance)
    if caller.json:
        readable.print_json(done)
    else:
        output.line("", f"{done['id']} {done['state']}, {plural(done['jobs'], 'job')} cancelled or asked to stop")
    if not done["jobs"] and done["state"] in ("finished", "replaced"):
        raise Conflict("already_final", f"graph '{done['id']}' is {done['state']} already; results are kept")


def _whole(client: Client, graph: str) -> str:
    """Return the id that a word stands for: while a command goes on, the word may come to mean another graph."""
    return str(client.graphs.show(graph)["id"]) if graph in (LAST, FAILED) else graph


#: The beginning of a file with an object on each line, and a command that makes a graph of nodes that are so.
_ONE_A_LINE = re.compile(rb"\s*\{[^\r\n]*\}[ \t]*\r?\n\s*\{")
_OF_LINES = """jq -s '{name: "crunch", nodes: .}'"""


def _read(file: IO[bytes], *options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph in the file, changed by the options of the command. Raises BadInput."""
    raw = file.read(wire.LEAST_BODY + 1).removeprefix(codecs.BOM_UTF8)
    if _ONE_A_LINE.match(raw):
        raise BadInput(file.name, f"is JSON lines: a graph is one object, which `{_OF_LINES}` makes of a node a line")
    document = validation.parse_json(raw, file.name)
    if not isinstance(document, dict):
        raise BadInput(file.name, "is not a JSON object")
    for given in options:
        document |= given
    try:
        GraphRequest.model_validate(document).normal()
    except ValidationError as error:
        found = GraphRequest.each_error(document) or error.errors(include_url=False, include_input=False)[:1]
        raise BadInput.of([_wrong(document, each["loc"], each["msg"], file=file.name) for each in found]) from None
    except BadInput as refused:
        raise refused.each(lambda each: _wrong(document, each.field.split("."), each.reason, file=file.name)) from None
    return document


def _wrong(document: dict[str, Any], place: Sequence[int | str], said: str, *, file: str) -> BadInput:
    """One error of a graph in a file, with its place there and the number of its node."""
    field = ".".join(wire.escaped(str(part), 60) for part in place)
    if place[0] == "nodes" and len(place) > 2:
        node = document["nodes"][int(place[1])].get("node")
        field += f" (node {node})" if isinstance(node, int) else ""
    if said == "Field required":
        said = "is missing: each node has a number of its own" if place[-1] == "node" else "is missing"
    return BadInput(f"{file}: {field}", fields.plain(said))


def finish(client: Client, graph: str, instance: str | None, *, caller: Caller, timeout: float | None) -> None:
    """Wait until no node of the graph can run any more, and print it. Raises LeaseholdError unless all succeeded."""
    with graph_progress() as told:
        found = client.graphs.wait(graph, instance=instance, timeout=timeout, told=told)
    readable.print_json(found) if caller.json else _print_graph(found)
    state = GraphState.of(found)
    bad = state.nodes - state.succeeded - state.needless
    if bad:
        first = "" if state.first_failed is None else f"; the first: {output.plain(str(state.first_failed))}"
        retry = f"; `leasehold graph retry {found['id']}` lets it go on" if found["state"] == "stalled" else ""
        raise LeaseholdError(f"{bad:,} of {plural(found['nodes'], 'node')} did not succeed{first}{retry}")


def _title(count: str) -> str:
    """Return the words for a count of nodes."""
    return "blocked for ever" if count == "blocked_forever" else count


def _print_graph(found: Record) -> None:
    callback, first = found.get("callback"), GraphState.of(found).first_failed
    facts: list[tuple[str, Any]] = [
        ("graph", found["id"]),
        ("name", found["name"]),
        ("state", output.state(found["state"])),
        ("instance", found["instance"]),
        ("nodes", f"{found['nodes']:,}, with {plural(found['edges'], 'dependency')}"),
        ("callback", callback and f"if {callback}: {found['callback_outcome'] or 'waits'}"),
        ("missing", ", ".join(map(str, found["missing"][:20]))),
        *((_title(name), readable.figure(found[name]) if found[name] else None) for name in _COUNTS),
        ("first failed", first and output.plain(str(first))),
    ]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        if value not in (None, ""):
            output.line(f"{name:<{width}}  ", value)


def _print_graph_and_nodes(found: Record, *, most: int, all: bool) -> None:
    _print_graph(found)
    page = found["page"]
    if page:
        click.echo()
        _list_nodes(page)
        if len(page) == most and not (all and most == found["nodes"]):
            click.echo(f"more, if there are any: --after {page[-1]['node']}")


def _list_nodes(nodes: list[Record]) -> None:
    table(
        (
            *("node", "state", "job", Column("command", least=16, middle=True), Column("depth", leaves=1)),
            *(Column("waits for", leaves=3), Column("missing", leaves=2), Column("reason", folds=True)),
        ),
        (
            (
                str(each["node"]),
                output.state("blocked for ever" if each["dead_end"] else each["state"]),
                short,
                readable.without_middle(output.plain(output.in_words(each["command"], each.get("arguments"))), 100),
                each["depth"],
                each["waits_for"] or "-",
                ", ".join(map(str, each["missing"])) or "-",
                each["reason"],
            )
            for short, each in zip(readable.short_ids([each["job"] or "-" for each in nodes]), nodes, strict=True)
        ),
    )
