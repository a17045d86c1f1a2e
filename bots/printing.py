"""What people see of the pool: tables, and the story of one job."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from schema import limits

Record = Mapping[str, Any]

_COLOURS = {
    "blocked": "magenta",
    "stalled": "red",
    "queued": "cyan",
    "parked": "magenta",
    "deferred": "magenta",
    "leased": "blue",
    "running": "blue",
    "cancelling": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "dead": "red",
    "ok": "green",
    "unhealthy": "red",
    "draining": "yellow",
    "probation": "yellow",
    "gone": "dim",
}


def print_json(value: object) -> None:
    """One JSON document on one line, and nothing else."""
    click.echo(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def terminal() -> bool:
    """Whether somebody watches: progress is drawn only then."""
    return sys.stderr.isatty()


def state(name: object) -> Text:
    """A state in its colour."""
    return Text(str(name), style=_COLOURS.get(str(name), ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table; it is never folded, so that programs can cut it up as well."""
    shown = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=1000)
    console.print(shown, crop=False, overflow="ignore", no_wrap=True, soft_wrap=True)


def line(start: str, value: object) -> None:
    """One line of facts; a state keeps its colour."""
    text = value if isinstance(value, Text) else Text(plain(value))
    Console(highlight=False, markup=False).print(Text(start), text, sep="", soft_wrap=True)


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def properties(values: Mapping[str, Any] | None) -> str:
    """`key=value` pairs, a key with several values several times."""
    found = []
    for key, value in sorted((values or {}).items()):
        found += [f"{key}={each}" for each in ([value] if isinstance(value, str) else value)]
    return " ".join(found) or "-"


def plain(value: object) -> str:
    """Text that cannot write to the terminal: what is not printable is escaped."""
    return limits.printable(str(value))


def _cell(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case True:
            return "yes"
        case False:
            return "no"
        case _:
            return plain(value)
