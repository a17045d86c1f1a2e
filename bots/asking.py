"""What a job asks for beside a place, as options of `submit`: one row for each field of the request."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from schema.limits import escaped

F = TypeVar("F", bound=Callable[..., Any])


def _amounts(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, int] | None:
    found = {}
    for value in values:
        kind, _, amount = value.partition("=")
        if not (amount.isascii() and amount.isdigit() and len(amount) <= 15):
            raise click.BadParameter(f"'{escaped(value, 60)}' is not KIND=AMOUNT, such as cpu_milli=500")
        found[kind] = int(amount)
    return found or None


#: Option, field of the request, keywords of the option.
_ASKED: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("--lock", "locks", {"multiple": True, "metavar": "NAME", "help": "It has this for itself; repeatable."}),
    ("--estimated-cost", "estimated_cost", {"type": float, "metavar": "COST", "help": "Of its instance's budget [1]."}),
    ("--job-class", "job_class", {"metavar": "NAME", "help": "Its kind: the points, and windows, of that class."}),
    ("--project", "project", {"metavar": "NAME", "help": "What it belongs to; with a class 10 points more."}),
    ("--owner", "owner", {"metavar": "NAME", "help": "Whose quota it uses."}),
    ("--user-priority", "user_priority", {"type": int, "metavar": "0-10", "help": "With a class, each 5 points more."}),
    ("--service-level", "service_level", {"metavar": "NAME", "help": "Sets its priority and its timeout."}),
    ("--urgency", "urgency", {"type": int, "metavar": "POINTS", "help": "HIGHER = sooner: the priority 100 - POINTS."}),
    ("--deadline", "deadline_seconds", {"type": float, "metavar": "SECONDS", "help": "When it should have ended."}),
    ("--estimated-seconds", "estimated_seconds", {"type": float, "metavar": "SECONDS", "help": "Of run time."}),
    (
        "--preferred-hour",
        "preferred_hours",
        {"type": click.IntRange(0, 23), "multiple": True, "help": "It starts within this hour of a day; repeatable."},
    ),
    ("--preferred-zone", "preferred_zone", {"metavar": "ZONE", "help": "The time zone of such hours [UTC]."}),
    (
        "--resource",
        "resources",
        {"callback": _amounts, "multiple": True, "metavar": "KIND=AMOUNT", "help": "It takes this; repeatable."},
    ),
    ("--batch-key", "batch_key", {"metavar": "NAME", "help": "Jobs with the same one go to one bot together."}),
)
#: The parameters that the options give.
NAMES = tuple(option.removeprefix("--").replace("-", "_") for option, _, _ in _ASKED)


def asking(command: F) -> F:
    """Add the options to a command."""
    for option, _, keywords in reversed(_ASKED):
        command = click.option(option, **keywords)(command)
    return command


def asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the request; None where nothing was given."""
    given = ((field, options[name]) for name, (_, field, _) in zip(NAMES, _ASKED, strict=True))
    return {field: list(value) or None if isinstance(value, tuple) else value for field, value in given}
