"""What the call of one node of a graph has returned, as an argument of a later one.

In the standard input such an argument is `{"leasehold.result": NUMBER}`, anywhere in `args` and `kwargs`, and `inputs`
lists the numbers. The bot of the call reads the state and the result of each node before the start. They come to the
task beside the standard input, which a submitter writes and which therefore can name nodes only.
"""

from collections.abc import Callable, Mapping
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
    """Return the value with an object for each result of a node in its lists and dicts, and note those nodes.

    Raises ValueError for a dict that would be taken for such an object.
    """
    if isinstance(value, NodeResult):
        nodes.add(value.node)
        return {RESULT_OF: value.node}
    if type(value) in (list, tuple):
        return [with_placeholders(each, nodes) for each in value]
    if type(value) is dict:
        if value.keys() == {RESULT_OF}:
            raise ValueError(f"a dict with the key '{RESULT_OF}' alone stands for the result of a node")
        return {name: with_placeholders(each, nodes) for name, each in value.items()}
    return value


def numbers_of(asked: Any) -> list[int]:
    """Return the numbers of the field `inputs` of a standard input, each once. Raises BadInput."""
    if not isinstance(asked, list) or any(type(each) is not int for each in asked):
        raise BadInput("inputs", "lists the numbers of nodes")
    return sorted(set(asked))


class Inputs:
    """The results that a call takes.

    results: as a bot has read them, by the number of the node. fetch: see `LargeResults`.
    """

    def __init__(self, results: Mapping[str, Any], fetch: Callable[[Any], Record]) -> None:
        self._results, self._fetch = results, fetch
        self._documents: dict[int, Any] = {}
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
        if type(node) is not int:
            raise BadInput("inputs", f"'{RESULT_OF}' is the number of a node")
        if node not in self._documents:
            self._documents[node] = self._document(node)
        document = self._documents[node]
        if document is None:
            return None
        self.typed = self.typed or bool(document.get("typed"))
        return document["ok"]

    def _document(self, node: int) -> Any:
        found = self._results.get(str(node))
        if found is None:
            raise BadInput("inputs", f"this node does not depend on node {node}, or that is no longer stored")
        if found["state"] != "succeeded":
            return None
        document = found["result"]
        if isinstance(document, dict) and "kept" in document:
            document = self._fetch(document["kept"])
        if not isinstance(document, dict) or "ok" not in document:
            raise BadInput("inputs", f'node {node} has succeeded without a result of the form {{"ok": VALUE}}')
        return document
