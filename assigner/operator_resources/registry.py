"""Every operator resource, in the order of documents and tests."""

from typing import Any

from assigner.operator_resources import limits, pauses, priorities, submit_limits, tenancy
from assigner.operator_resources.declaration import Resource

RESOURCES: tuple[Resource[Any], ...] = (
    *tenancy.RESOURCES,
    *limits.RESOURCES,
    *submit_limits.RESOURCES,
    *priorities.RESOURCES,
    *pauses.RESOURCES,
)


def resource(name: str) -> Resource[Any]:
    """Return the resource whose command is called `name`."""
    return next(each for each in RESOURCES if each.name == name)
