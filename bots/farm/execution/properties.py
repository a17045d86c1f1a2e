"""Where an action may run: what its platform's properties mean for its job, by the policy of the settings. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leasehold.errors import BadInput
from leasehold.wire import escaped

from bots.farm.settings import PropertyPolicy

#: The label of jobs whose action names none.
LABEL = "farm"


@dataclass(frozen=True)
class Placement:
    """What a job asks for. required, preferred: properties of its bot. The rest is as in a request of a job."""

    required: Mapping[str, Sequence[str]] = field(default_factory=dict)
    preferred: Mapping[str, Sequence[str]] = field(default_factory=dict)
    label: str = LABEL
    units: int = 1
    resources: Mapping[str, int] = field(default_factory=dict)


def placement(asked: Mapping[str, Sequence[str]], policy: PropertyPolicy) -> Placement:
    """Return what the job of an action with these properties asks for. Raises BadInput that names a property."""
    required, preferred, resources = dict[str, Sequence[str]](), dict[str, Sequence[str]](), dict[str, int]()
    label, units = LABEL, 1
    for name, values in asked.items():
        if name in policy.wildcard:
            continue
        if name in policy.preferred:
            preferred[name] = values
        elif name == policy.label:
            label = _only(name, values)
        elif name == policy.units:
            units = _amount(name, values, 1)
        elif (resource := policy.resources.get(name)) is not None:
            resources[resource.kind] = resources.get(resource.kind, 0) + _amount(name, values, resource.times)
        elif name in policy.match or policy.unknown == "match":
            required[name] = values
        elif policy.unknown == "refuse":
            raise BadInput(_field(name), "is not a property that this farm knows")
    return Placement(required, preferred, label, units, resources)


def asked(platform: Any) -> dict[str, list[str]]:
    """Return the properties of a platform. One that is named several times has several values, all of them required."""
    found: dict[str, list[str]] = {}
    for each in platform.properties:
        found.setdefault(each.name, []).append(each.value)
    return found


def _field(name: str) -> str:
    return f"platform.properties.{escaped(name, 60)}"


def _only(name: str, values: Sequence[str]) -> str:
    if len(values) != 1:
        raise BadInput(_field(name), "must have one value")
    return values[0]


def _amount(name: str, values: Sequence[str], times: float) -> int:
    """The number that a property has as its value, in the unit of what it stands for, rounded up."""
    text = _only(name, values)
    try:
        found = float(text)
        if not 0 < found < 1e12:
            raise ValueError
    except ValueError:
        raise BadInput(_field(name), f"'{escaped(text, 40)}' is not a number above 0") from None
    return math.ceil(found * times)
