"""The client's calls on graphs: submit, show, list, retry, cancel, wait."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from leasehold.errors import BadInput, TimedOut
from leasehold.transport import Record, Transport
from leasehold.wire import waited

Records = list[Record]

#: The most nodes, and the most graphs, in one answer.
MAX_NODES, MAX_GRAPHS = 1000, 100


class Graphs:
    """The client's calls on graphs.

    `graph` is an id or a name. A name stands for the newest graph of that name when a call begins. Raises NotFound if
    there is none.
    """

    def __init__(self, transport: Transport, *, key: Callable[[], str], held: float) -> None:
        self._transport, self._key, self._held = transport, key, held

    def submit(self, graph: Mapping[str, Any]) -> Record:
        """Submit a graph, all or nothing; it replaces an unfinished graph of the same name.

        Without a key the client draws a random one, so that no retry can submit the graph twice. Raises BadInput with
        the path in `graph`, also for a cycle; Conflict `key_reused`; QueueFull if too many jobs with a label wait.
        """
        keyed = dict(graph) if graph.get("key") is not None else {**graph, "key": self._key()}
        return self._transport.call("POST", "/v1/graphs", body=keyed, held=self._held)

    def show(
        self,
        graph: str,
        *,
        instance: str | None = None,
        nodes: int = 0,
        state: Sequence[str] = (),
        after: int | None = None,
    ) -> Record:
        """Return one graph with the count of its nodes in each state; `page` holds the first `nodes` (up to 1000).

        state: only nodes in one of these states are in the page. after: only nodes of a higher number.
        """
        return self._show(graph, {"instance": instance, "limit": nodes, "state": list(state) or None, "after": after})

    def nodes(self, graph: str, *, instance: str | None = None, state: Sequence[str] = ()) -> Iterator[Record]:
        """Yield all nodes of a graph, by number; with `state` only those in one of these states."""
        last: int | None = None
        while True:
            found = self.show(graph, instance=instance, nodes=MAX_NODES, state=state, after=last)
            graph, page = found["id"], found["page"]
            yield from page
            if len(page) < MAX_NODES:
                return
            last = page[-1]["node"]

    def list(
        self,
        *,
        instance: str | None = None,
        open: bool | None = None,
        limit: int | None = None,
        before: str | None = None,
    ) -> Records:
        """List graphs, newest first. open: only unfinished ones. limit: up to 100. before: a graph's id."""
        asked = {"instance": instance, "open": "true" if open else None, "limit": limit, "before": before}
        query = {name: value for name, value in asked.items() if value is not None}
        found: Records = self._transport.call("GET", "/v1/graphs", query=query)["graphs"]
        return found

    def retry(
        self, graph: str, *, nodes: Sequence[int] | None = None, instance: str | None = None, key: str | None = None
    ) -> Record:
        """Let a graph go on: what failed, died or was cancelled runs again, or of that only these nodes.

        Nodes that were cancelled because of one of them run again too; succeeded ones stay. The answer lists the new
        jobs in `nodes`. Raises Conflict `node_barred` if a node depends on one that failed and does not run again,
        `graph_replaced` if another graph has taken the place of this one. A repeat with the same key gets the same
        answer. Without a key the client draws a random one, so that its own retries try nothing twice.
        """
        given = {"instance": instance, "nodes": None if nodes is None else list(nodes)}
        body = {"graph": graph} | {name: value for name, value in given.items() if value is not None}
        try:
            return self._transport.call("POST", "/v1/graphs/retry", body=body | {"key": key or self._key()})
        except BadInput as error:
            if key is not None or error.field != "key":
                raise
            return self._transport.call("POST", "/v1/graphs/retry", body=body)  # an older gateway takes none

    def cancel(self, graph: str, *, instance: str | None = None) -> Record:
        """Cancel the waiting jobs of a graph and stop the running ones; `jobs` in the answer counts both."""
        body = {"graph": graph} | ({} if instance is None else {"instance": instance})
        return self._transport.call("POST", "/v1/graphs/cancel", body=body)

    def wait(
        self,
        graph: str,
        *,
        instance: str | None = None,
        timeout: float | None = None,
        told: Callable[[Record], object] | None = None,
    ) -> Record:
        """Wait until no node of the graph can run any more, and return the graph as `show` does.

        told: called with the graph each time that it is looked at, up to once a second. Raises TimedOut after `timeout`
        seconds.
        """
        deadline = time.monotonic() + waited(timeout)
        pause = 0.05
        while True:
            found = self.show(graph, instance=instance)
            graph = found["id"]  # a newer graph may have the name by the next look
            if told is not None:
                told(found)
            if not is_unfinished(found):
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut([found["id"]], timeout or 0.0, look="graph show")
            self._transport.rest(min(left, pause))
            pause = min(1.0, 2 * pause)

    def _show(self, graph: str, query: Mapping[str, Any]) -> Record:
        given = {name: value for name, value in query.items() if value is not None}
        return self._transport.call("GET", _path(graph), query=given)


def is_unfinished(found: Mapping[str, Any]) -> bool:
    """Return True if a node of a shown graph may still start, or has not ended.

    What waits for a failed node may be blocked for ever.
    """
    return bool(found["state"] == "active" or found["queued"] or found["active"])


def _path(graph: str) -> str:
    return f"/v1/graphs/{quote(graph, safe='')}"
