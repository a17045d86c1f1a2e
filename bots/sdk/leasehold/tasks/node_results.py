"""What the call of one node of a graph has returned, as an argument of a later one.

In the standard input such an argument is `{"leasehold.result": NUMBER}`, anywhere in `args` and `kwargs`, and `inputs`
lists the numbers. When the call starts, its bot has put the state and the result of each node in the place of `inputs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leasehold.errors import BadInput
from leasehold.transport import Record

#: The only field of the object that stands for a result.
RESULT_OF = "leasehold.result"


@dataclass(frozen=True)
class NodeResult:
    """What the call of a node returns, before there is such a value; None if it does not succeed."""

    node: int


def with_placeholders(value: Any, nodes: set[int]) -> Any:
    """Return the value with an object for each result of a node in its lists and dicts, and note those nodes."""
    if isinstance(value, NodeResult):
        nodes.add(value.node)
        return {RESULT_OF: value.node}
    if type(value) in (list, tuple):
        return [with_placeholders(each, nodes) for each in value]
    if type(value) is dict:
        return {name: with_placeholders(each, nodes) for name, each in value.items()}
    return value


class Inputs:
    """The results that a bot has put into the standard input of a call. fetch: of large values; see LargeResults."""

    def __init__(self, results: Any, fetch: Callable[[Any], Record]) -> None:
        if not isinstance(results, dict):
            raise BadInput("inputs", "are the numbers of nodes still: only a bot of a pool puts their results there")
        self._results, self._fetch = results, fetch
        #: A codec has encoded one of the values that `fill` has met.
        self.typed = False

    def fill(self, value: Any) -> Any:
        """Return JSON with the values in the place of the objects that stand for them. Raises BadInput."""
        if isinstance(value, dict):
            if value.keys() == {RESULT_OF}:
                return self._value(value[RESULT_OF])
            return {name: self.fill(each) for name, each in value.items()}
        return [self.fill(each) for each in value] if isinstance(value, list) else value

    def _value(self, node: Any) -> Any:
        found = self._results.get(str(node))
        if found is None:
            raise BadInput("inputs", f"this node does not depend on node {node}, so that there is no result of it")
        if found["state"] != "succeeded":
            return None
        document = found["result"]
        if isinstance(document, dict) and "kept" in document:
            document = self._fetch(document["kept"])
        if not isinstance(document, dict) or "ok" not in document:
            raise BadInput("inputs", f'node {node} has succeeded without a result of the form {{"ok": VALUE}}')
        self.typed = self.typed or bool(document.get("typed"))
        return document["ok"]
