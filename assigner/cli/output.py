"""Shared parts of the operator's commands: JSON, durations, reasons, and options of calls to a gateway."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped

from schema.validation import MAX_REASON, check_text, read_duration

if TYPE_CHECKING:
    from leasehold.client import Client

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def duration(_context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Read an option that is a duration. Returns seconds; raises BadInput."""
    return None if value is None else read_duration(option.opts[-1], value)


def is_version(value: str) -> bool:
    """Return whether a text is the number of a version of the policy."""
    return value.isascii() and value.isdigit() and len(value) <= 10 and 1 <= int(value) < 2**31


def version_number(_context: click.Context, _argument: click.Parameter, value: str | None) -> int | None:
    """Parse an argument that is the number of a version, or is not given. Raises BadInput."""
    if value is None:
        return None
    if not is_version(value):
        raise BadInput("VERSION", f"must be the number of a version, not '{escaped(value, 40)}'")
    return int(value)


def _reason(_context: click.Context, _option: click.Parameter, value: str) -> str:
    return check_text("--reason", value, MAX_REASON)


reason_option = click.option("--reason", default="", callback=_reason, metavar="TEXT", help="Kept in the audit log.")


# Calls to a gateway.


Record = dict[str, Any]


class Caller(Protocol):
    """The options of a command that calls a gateway: which gateway, which token, and how to print the answer.

    A protocol because the class is `bots.cli.caller.Caller`, and this package may not import `bots`.
    """

    @property
    def json(self) -> bool:
        """True if the answer is printed as JSON."""

    def client(self) -> "Client":
        """Return the client of that gateway."""


#: Decorator that adds a caller's options to a command and passes the caller as its first argument.
Calling = Callable[[Callable[..., Any]], Callable[..., Any]]
