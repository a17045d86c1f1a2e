"""What the operator's commands say of an instance's share of the pool, and of what all have together."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from schema.accounts import PoolLimits
from schema.errors import BadInput
from schema.limits import check_name, escaped

M = TypeVar("M", bound=PoolLimits)
F = TypeVar("F", bound=Callable[..., Any])

#: What an option is called in an account, if that is another name.
_WORDS = {"weight": "credit_weight", "lock": "locks"}


def _amount(_context: click.Context, option: click.Parameter, value: str | None) -> float | str | None:
    """A number, or `none`."""
    if value is None or value == "none":
        return value
    try:
        return float(value)
    except ValueError:
        raise BadInput(option.opts[0], f"'{escaped(value, 40)}' is neither a number nor 'none'") from None


def _slots_of_locks(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, int] | None:
    """Names of locks, each with the number of its slots."""
    found: dict[str, int] = {}
    for value in values:
        name, _, slots = value.partition("=")
        if not (slots.isascii() and slots.isdigit() and len(slots) <= 10):
            raise BadInput(option.opts[0], f"'{escaped(value, 80)}' is not NAME=SLOTS")
        found[check_name(option.opts[0], name)] = int(slots)
    return found or None


_LIMITS = (
    click.option("--max-concurrent", callback=_amount, metavar="N", help="Jobs that run at once; none = any number."),
    click.option("--budget", callback=_amount, metavar="AMOUNT", help="Within the rolling window; none = any amount."),
)
_SHARE = (
    click.option("--weight", callback=_amount, metavar="NUMBER", help="Beside the others'; 0 = what they leave."),
    click.option("--unit", metavar="NAME", help="What its budget counts: cost, seconds, or what its bots report."),
    *_LIMITS,
    click.option("--slots", callback=_amount, metavar="N", help="Places in which its jobs work; none = any number."),
    click.option("--lock", multiple=True, callback=_slots_of_locks, metavar="NAME=SLOTS", help="Repeatable."),
)


def limit_options(command: F) -> F:
    """The limits of what all may have."""
    for option in reversed(_LIMITS):
        command = option(command)
    return command


def share_options(command: F) -> F:
    """The parts of an instance's share."""
    for option in reversed(_SHARE):
        command = option(command)
    return command


def asked(model: type[M], options: dict[str, Any]) -> M | None:
    """What was given, as the model, None if nothing was. Raises BadInput with the option."""
    given = {
        _WORDS.get(name, name): None if value == "none" else value
        for name, value in options.items()
        if value is not None
    }
    if not given:
        return None
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        word = str(first["loc"][0])
        option = next((name for name, other in _WORDS.items() if other == word), word)
        raise BadInput(f"--{option.replace('_', '-')}", first["msg"].replace("Input should", "must", 1)) from None
