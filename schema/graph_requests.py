"""The request for a graph of jobs: one model and one set of checks, for callers and for the gateway."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from schema import limits
from schema.errors import BadInput
from schema.limits import Name
from schema.requests import DEFAULT_INSTANCE, MAX_KEY_BYTES, JobRequest, flat_all

MAX_GRAPH_NODES, MAX_GRAPH_EDGES = 10_000, 100_000
MAX_NODE_NO = 2**31 - 1

OnFailure = Literal["block", "run", "cancel"]
OnPhantom = Literal["warn", "reject", "ignore"]
NodeNo = Annotated[int, Field(ge=0, le=MAX_NODE_NO)]

#: Fields of a job that a node takes from its graph.
_OF_THE_GRAPH = ("instance", "key", "dedup_key")


class Parent(BaseModel):
    """A node that another node depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: NodeNo = Field(description="Number of the node.")
    on_failure: OnFailure | None = Field(
        default=None,
        description="What this node does if that one does not succeed. Unset: as the graph says.",
    )

    def normal(self) -> int | dict[str, Any]:
        """The dependency in the form that `moves.submit_graph` takes."""
        return self.node if self.on_failure is None else {"node": self.node, "on_failure": self.on_failure}


def _parent(given: Any) -> Any:
    return {"node": given} if type(given) is int else given


class NodeRequest(JobRequest):
    """One job of a graph. It has no instance, key or dedup_key of its own."""

    node: NodeNo = Field(description="Number of the node, unique in its graph; 0 to 2,147,483,647.")
    after: list[Annotated[Parent, BeforeValidator(_parent, json_schema_input_type=int | Parent)]] = Field(
        default=[],
        max_length=MAX_GRAPH_EDGES,
        fail_fast=True,
        description="Nodes that must end before this one starts: their numbers, or objects with on_failure.",
    )

    def normal(self, *, instance: str = DEFAULT_INSTANCE) -> dict[str, Any]:
        """The node in the form that `moves.submit_graph` takes. Raises BadInput."""
        for field in _OF_THE_GRAPH:
            if getattr(self, field) is not None:
                raise BadInput(field, "belongs to the graph and not to one of its nodes")
        counted = Counter(parent.node for parent in self.after)
        number, times = counted.most_common(1)[0] if counted else (0, 1)
        if times > 1:
            raise BadInput("after", f"names node {number} {times} times")
        found = super().normal(instance=instance) | {"node": self.node}
        for field in _OF_THE_GRAPH:
            found.pop(field, None)
        if "priority" not in self.model_fields_set and self.urgency is None:
            found.pop("priority", None)
        if self.after:
            found["after"] = [parent.normal() for parent in self.after]
        return found


class GraphRequest(BaseModel):
    """Jobs that depend on each other. All of them are accepted, or none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Name = Field(
        description="Name of the graph. An unfinished graph of the same name in the instance is replaced."
    )
    instance: Name | None = Field(
        default=None,
        description="Instance (tenant) that the jobs belong to. Unset: the instance of the token, or `default`.",
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        description="Idempotency key: a submit repeated with the same key and request returns the first graph. "
        "At most 200 bytes.",
    )
    priority: int = Field(
        default=0,
        ge=limits.PRIORITY_MIN,
        le=limits.PRIORITY_MAX,
        description="Priority of the nodes that have none of their own; a lower number is more urgent.",
    )
    on_failure: OnFailure = Field(
        default="block",
        description="What a node does if one that it depends on does not succeed: stay blocked, run, or be cancelled.",
    )
    on_phantom: OnPhantom = Field(
        default="warn",
        description="What happens to a node that depends on a number that no node has: `warn` leaves it blocked for "
        "ever and reports it, `reject` refuses the graph, `ignore` drops the dependency.",
    )
    nodes: list[NodeRequest] = Field(
        min_length=1, max_length=MAX_GRAPH_NODES, fail_fast=True, description="Jobs of the graph, 1 to 10,000."
    )

    _flat = field_validator("nodes", mode="before")(flat_all)

    def normal(self, *, instance: str = DEFAULT_INSTANCE) -> dict[str, Any]:
        """The form that `moves.submit_graph` takes; `instance` is used if the request names none. Raises BadInput."""
        edges = sum(len(node.after) for node in self.nodes)
        if edges > MAX_GRAPH_EDGES:
            raise BadInput("nodes", f"have {edges} dependencies, at most {MAX_GRAPH_EDGES} are allowed")
        request: dict[str, Any] = {
            "name": self.name,
            "instance": self.instance or instance,
            "priority": self.priority,
            "on_failure": self.on_failure,
            "on_phantom": self.on_phantom,
            "nodes": [_placed(index, node) for index, node in enumerate(self.nodes)],
        }
        if self.key is not None:
            request["key"] = limits.check_text("key", self.key, MAX_KEY_BYTES)
        return request


def _placed(index: int, node: NodeRequest) -> dict[str, Any]:
    try:
        return node.normal()
    except BadInput as refused:
        raise BadInput(f"nodes.{index}.{refused.field}", refused.reason) from None
