"""What callers may do with graphs of jobs. A part of the client."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from bots.transport import Record, Transport

Records = list[Record]

#: Nodes, and graphs, in one answer.
MAX_NODES, MAX_GRAPHS = 1000, 100


class Graphs:
    """The calls. A graph is named by its id, or by its name, of several the newest; NotFound if there is none."""

    def __init__(self, transport: Transport, *, key: Callable[[], str], held: float) -> None:
        self._transport, self._key, self._held = transport, key, held

    def submit(self, graph: Mapping[str, Any]) -> Record:
        """Submit a graph, all or nothing; an unfinished one of its name is replaced.

        Without a key it gets a random one, so that no retry can submit it twice. Raises BadInput with the place in
        `graph`, also for a circle; Conflict `key_reused`, and QueueFull if a label has no room for its jobs.
        """
        keyed = dict(graph) if graph.get("key") is not None else {**graph, "key": self._key()}
        return self._transport.call("POST", "/v1/graphs", body=keyed, held=self._held)

    def show(self, graph: str, *, instance: str | None = None, nodes: int = 0) -> Record:
        """One graph, how many of its nodes are in which state, and as `page` the first `nodes` (up to 1000) of them."""
        return self._show(graph, {"instance": instance, "limit": nodes})

    def nodes(self, graph: str, *, instance: str | None = None) -> Iterator[Record]:
        """All nodes of a graph, by number."""
        last = -1
        while True:
            page = self._show(graph, {"instance": instance, "limit": MAX_NODES, "after": last})["page"]
            yield from page
            if len(page) < MAX_NODES:
                return
            last = page[-1]["node"]

    def list(self, **filters: str | int | bool | None) -> Records:
        """Graphs, newest first. Filters: instance, open (not over yet), limit (up to 100), before (a graph's id)."""
        query = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in filters.items()
            if value is not None
        }
        found: Records = self._transport.call("GET", "/v1/graphs", query=query)["graphs"]
        return found

    def cancel(self, graph: str, *, instance: str | None = None) -> Record:
        """Cancel what waits in a graph and stop what runs; `jobs` is how many that were."""
        body = {"graph": graph} | ({} if instance is None else {"instance": instance})
        return self._transport.call("POST", "/v1/graphs/cancel", body=body)

    def _show(self, graph: str, query: Mapping[str, str | int | None]) -> Record:
        given = {name: value for name, value in query.items() if value is not None}
        return self._transport.call("GET", _path(graph), query=given)


def _path(graph: str) -> str:
    return f"/v1/graphs/{quote(graph, safe='')}"
