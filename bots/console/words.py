"""Figures, times and states as the words and cells that all pages show."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from leasehold import wire
from leasehold.states import WAITING, JobState

from bots.console.parts import Cell
from schema import clock

Record = Mapping[str, Any]

#: States of jobs that are with a bot, and of those that have ended, each in the order of a job's life.
HELD = (JobState.LEASED, JobState.RUNNING, JobState.CANCELLING)
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD)
ALL = (*WAITING, *HELD, *ENDED)
#: The number that stands for no limit.
UNLIMITED = 2**31 - 1
#: The most characters of one value; a page is no place for megabytes.
MAX_TEXT = 20_000


def text(value: object) -> str:
    """Format a value for a cell: `-` for nothing, `yes` or `no`, parts with their names, `no limit` for the largest."""
    # Not in `match`: the pattern `{}` stands for any mapping.
    if value is None or value in ("", [], {}):
        return "-"
    match value:
        case True:
            return "yes"
        case False:
            return "no"
        case float():
            return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return "no limit" if value == UNLIMITED else f"{value:,}"
        case dict():
            return cut(", ".join(f"{name.replace('_', ' ')} {_part(each)}" for name, each in value.items()))
        case list():
            return cut(", ".join(map(_part, value)))
        case _:
            return cut(wire.printable(str(value)))


def _part(value: object) -> str:
    """Format a part of a value."""
    if value is None:
        return "none"
    told = text(value)
    return f"({told})" if isinstance(value, dict) and len(value) > 1 else told


def cut(value: str) -> str:
    """Return at most the first `MAX_TEXT` characters."""
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def time(moment: str | None) -> str:
    """Format a time of the database, which is in UTC, to the second."""
    return "-" if moment is None else moment[:19].replace("T", " ") + " UTC"


#: Seconds of the units in which a page tells how long ago something was, the largest first.
UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
#: Seconds up to which something is now.
NOW = 3


def ago(moment: str | None, *, now: float | None = None) -> Cell:
    """Return the cell of a time of the database: `5 min ago`, `in 2 h`. now: seconds since 1970; None = the clock's."""
    if moment is None:
        return Cell("-")
    passed = (clock.wall() if now is None else now) - datetime.fromisoformat(moment).timestamp()
    size, unit = next(each for each in UNITS if abs(passed) >= each[0] or each[0] == 1)
    told = f"{abs(passed) // size:.0f} {unit}"
    return Cell("now" if abs(passed) <= NOW else f"{told} ago" if passed > 0 else f"in {told}", kind="time", at=moment)


def count(number: int, *, at_least: bool = False) -> str:
    """Format a count; `at_least`: counting stopped there."""
    return f"{number:,}{'+' if at_least else ''}"


def state(name: str) -> Cell:
    """Return the cell of a state, in its colour."""
    return Cell(text(name), kind=f"state-{name}" if name.isalpha() else "")


def cells(row: Record, fields: Sequence[str]) -> list[Cell]:
    """Return the cells of some fields of a row."""
    return [Cell(text(row.get(field))) for field in fields]
