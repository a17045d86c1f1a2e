"""Durations, times, numbers, ids, tables and help as people read them.

Programs get seconds, ISO 8601 in UTC and whole ids.

A table has each row on one line, whole without a terminal, and as wide as the terminal on one. On a narrow terminal the
columns that may leave do so in their stated order, and the texts that may be cut are. What people copy, such as an id
or a name, is never cut.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from leasehold.errors import LeaseholdError, NotFound, TimedOut
from leasehold.wire import escaped, printable, suggestion

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: The units of durations of a minute and more, the largest first: seconds in one, and the abbreviation.
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
#: What the figures of an instance are, by their names in the answer about the effect of a change.
FIGURES = {
    "min": "minimum, units",
    "max": "maximum, units",
    "effective_max": "maximum less recent evictions, units",
    "room": "may still be given, units",
    "over": "in use above the maximum, units: nothing starts until they are given back",
    "opportunistic": "in use above the minimum, units: others may take them for theirs",
    "reclaimable": "may take from others for its minimum, units",
    "capacity_gap": "of its minimum, could not be had at all, units",
    "weight": "weight",
    "share": "share that is due",
    "budget": "budget",
    "max_concurrent": "jobs at once",
    "slots": "slots",
}


def duration(seconds: float) -> str:
    """Return a duration in at most two units: `<1 ms`, `40 ms`, `1.5 s`, `2 min 5 s`, `3 h`, `4 d 6 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        return "0 s" if seconds == 0 else "<1 ms" if seconds < 0.001 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    size, unit = next(each for each in _UNITS if whole >= each[0])
    smaller, smaller_unit = _UNITS[_UNITS.index((size, unit)) + 1]
    whole = round(whole / smaller) * smaller
    if (size, unit) != _UNITS[0] and whole >= (larger := _UNITS[_UNITS.index((size, unit)) - 1])[0]:
        return f"1 {larger[1]}"  # rounded up to one of the next unit
    rest = whole % size // smaller
    return f"{whole // size:,} {unit}" + (f" {rest} {smaller_unit}" if rest else "")


def run_time(job: Mapping[str, Any]) -> str | None:
    """Return how long a job ran, from its last start to its end, as a list of jobs tells it; None before its end.

    The time that its bot has measured, of the command or the call alone, stands beside it if it reads otherwise.
    """
    measured = (job.get("result") or {}).get("seconds")
    began, ended = job.get("started_at"), job.get("finished_at")
    alone = None if measured is None else duration(measured)
    if began is None or ended is None:
        return alone
    whole = duration((datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds())
    return whole if alone in (None, whole) else f"{whole}, {alone} of it by the clock of its bot"


def moment(time: str | datetime, *, local: bool | None = None) -> str:
    """Return a time: on a terminal with its zone, as `2026-03-01 13:00:00.250 CET`, otherwise in ISO 8601, in UTC.

    time: with a zone, as ISO 8601 or as an object. local: the zone of this machine instead of UTC; None = if standard
    output is a terminal.
    """
    at = datetime.fromisoformat(time) if isinstance(time, str) else time
    if not (sys.stdout.isatty() if local is None else local):
        return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    here = at.astimezone()
    parts = f".{here.microsecond // 1000:03}" if here.microsecond else ""
    return f"{here:%Y-%m-%d %H:%M:%S}{parts} {here:%Z}"


def tick(time: str | datetime) -> str:
    """Return the tick of a schedule with the offset that it is given with, which is that of the schedule's zone.

    On a terminal as `2026-03-01 13:00 +01:00`, otherwise in ISO 8601.
    """
    at = datetime.fromisoformat(time) if isinstance(time, str) else time
    if not sys.stdout.isatty():
        return at.isoformat().replace("+00:00", "Z")
    return f"{at:%Y-%m-%d %H:%M} {at.isoformat()[-6:]}"


def number(value: float, *, digits: int = 6) -> str:
    """Return a number with so many significant digits, without an exponent unless it is far too small or large."""
    text = f"{value:.{digits}g}"
    if "e" not in text or not 1e-9 <= abs(value) < 1e15:
        return text
    return f"{value:.12f}".rstrip("0").rstrip(".")


def figure(value: float, *, digits: int = 12) -> str:
    """Return a quantity as sentences and tables tell it, with so many significant digits: `1,200`, `1,234.5`."""
    if isinstance(value, int):
        return f"{value:,}"
    whole, dot, rest = number(value, digits=digits).partition(".")
    size = whole.lstrip("-")
    return f"{whole[: -len(size)]}{int(size):,}{dot}{rest}" if size.isdecimal() else f"{whole}{dot}{rest}"


def plural(number: float, noun: str) -> str:
    """Return a number of things, such as `1 job`, `1,200 jobs` or `0.5 jobs`."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    told = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{told} {noun if number == 1 else many}"


#: How the standard input of a task's call begins.
_ARGUMENTS = '{"args": ['


def call_arguments(stdin: str, limit: int = 200) -> str:
    """Return the arguments of a task's call as they are written in a call: `7, cents=1250`.

    stdin: the JSON that the call is given, whose arguments are cut in the middle, or its beginning, which ends in `…`.
    """
    try:
        document = json.loads(stdin)
        parts = [_argument(each) for each in document["args"]]
        parts += [f"{name}={_argument(each)}" for name, each in document["kwargs"].items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Its end is unknown, so the text ends where the arguments go on.
        return f"{stdin.removeprefix(_ARGUMENTS)[: limit - 1]}…"
    return without_middle(", ".join(parts), limit)


def _is_result(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["leasehold.result"]


def _argument(value: Any) -> str:
    if _is_result(value):
        return f"the result of node {value['leasehold.result']}"
    if isinstance(value, list) and len(value) > 1 and all(map(_is_result, value)):
        return f"[the results of {len(value)} nodes]"
    return json.dumps(value, ensure_ascii=False)


#: The short form of a job's id: which minute, and how the id ends.
SHORT_ID = re.compile(r"([0-9a-f]{4})-([0-9a-f]{6,12})")
#: What also stands for a job: the newest one of the token, and the one of its jobs that failed last.
LAST, FAILED = "@last", "@failed"
#: What may be given instead of an id, for a refusal.
NAMES_OF_JOBS = f"give the whole id, a short form such as 2c8a-6789ab, {LAST} or {FAILED}"
#: The fewest and the most digits of the end in a short form.
LEAST_END, MOST_END = 6, 12


def is_name_of_job(text: str) -> bool:
    """True for a short form and for a word, which a gateway looks up."""
    return text in (LAST, FAILED) or SHORT_ID.fullmatch(text.lower()) is not None


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return the short forms of jobs' ids, which differ from each other: `2c8a-6789ab`.

    An id begins with its time, of which the first four digits stay the same for 50 days and the next four for 65.5 s.
    The short form is these next four, so that the minute can be looked up, and as many of the last digits as tell the
    jobs of the list apart, at least 6. An id that does not begin with its time, as an old one may not, stays whole.
    """
    for digits in range(LEAST_END, MOST_END + 1):
        found = [f"{each[4:8]}-{each[-digits:]}" if each[14:15] == "7" else each for each in ids]
        if len(set(found)) == len(set(ids)):
            return found
    return list(ids)


# Tables


#: Characters between two columns; the least width of a text that folds beside the others, and its indent below them.
GAP, FOLDED, INDENT = 2, 24, 4

#: Characters that a text keeps if even the columns that stay are together wider than the terminal.
SHORTEST = 8


@dataclass(frozen=True)
class Column:
    """A column of a table.

    leaves: the column with the lowest number leaves first; 0 = it stays. least: characters to which its texts may be
    cut; 0 = they never are. folds: its texts go on in the next line instead; for the last column. middle: what is cut
    out is the middle, because texts that begin alike end differently.
    """

    title: str
    leaves: int = 0
    least: int = 0
    folds: bool = False
    middle: bool = False


#: True while the lines of tables are as wide as the terminal, and never wider.
_ON_A_SCREEN = ContextVar("on_a_screen", default=False)


@contextmanager
def on_a_screen() -> Iterator[None]:
    """Keep each row of a table on one line: what is printed is drawn again in the same place."""
    token = _ON_A_SCREEN.set(True)
    try:
        yield
    finally:
        _ON_A_SCREEN.reset(token)


def table(columns: Sequence[str | Column], rows: Iterable[Sequence[object]], *, empty: str = "There are none.") -> None:
    """Print a plain table. A person at a terminal is told `empty` in the place of one without rows."""
    from rich.console import Console
    from rich.text import Text

    of = [each if isinstance(each, Column) else Column(each) for each in columns]
    cells = [[each if isinstance(each, Text) else Text(cell(each)) for each in row] for row in rows]
    console = Console(highlight=False, markup=False)
    if not cells and console.is_terminal:
        click.echo(empty)
        return
    widths = [_width(column, [row[nth] for row in cells]) for nth, column in enumerate(of)]
    if console.is_terminal:
        of, cells, widths = fitted(of, cells, console.width)
    indent = sum(widths[:-1]) + GAP * (len(of) - 1)
    folds = console.is_terminal and of[-1].folds and not _ON_A_SCREEN.get()
    is_below = folds and console.width - indent < min(FOLDED, widths[-1])
    if is_below:
        indent = INDENT
    titles = [_lines(column.title, width) for column, width in zip(of, widths, strict=True)]
    heads = [
        [Text(lines[nth] if nth < len(lines) else "", style="bold") for lines in titles]
        for nth in range(max(map(len, titles)))
    ]
    for nth, row in enumerate([*heads, *cells]):
        for each, width in zip(row, widths[:-1], strict=False):
            each.pad_right(width + GAP - each.cell_len)
        room = max(console.width - indent, INDENT)
        parts = [*row[-1].wrap(console, room)] if folds else [row[-1]]
        if is_below and (nth == 0 or nth >= len(heads)):
            parts = [Text(), *parts] if row[-1].plain != "-" else [Text()]
        first, *rest = parts or [Text()]
        # A row that is too wide goes on in the next line of the terminal, where it can be copied as one.
        for each in (Text.assemble(*row[:-1], first), *(Text(" " * indent) + each for each in rest)):
            each.rstrip()
            console.print(each, soft_wrap=True)


def print_line(start: "str | Text", value: "str | Text") -> None:
    """Print a line that begins with `start`. On a terminal that is too narrow, it goes on below, between two words."""
    if isinstance(start, str) and isinstance(value, str) and not sys.stdout.isatty():
        click.echo(start + printable(value))  # to import what measures texts takes longer
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    text = value if isinstance(value, Text) else Text(_kept_durations(printable(value)))
    parts = [text]
    if console.is_terminal and not _ON_A_SCREEN.get():
        parts = [*text.wrap(console, max(console.width - len(start), INDENT))] or parts
    for nth, each in enumerate(parts):
        each.rstrip()
        if not isinstance(value, Text):
            each.plain = each.plain.replace(_KEPT, " ")
        begin = start if nth == 0 else " " * len(start)
        console.print((begin if isinstance(begin, Text) else Text(begin)) + each, soft_wrap=True)


#: A command in a sentence, and what stands for its spaces while the sentence is divided.
_COMMAND, _KEPT = re.compile(r"`[^`\n]*`"), "\ue000"
#: A duration, whose numbers stay beside their units.
_DURATION = re.compile(r"(?<!\S)\d[\d.,]* (?:ms|s|min|h|d)\b(?: \d+ (?:s|min|h)\b)?")


def _kept_durations(text: str) -> str:
    return _DURATION.sub(lambda found: found[0].replace(" ", _KEPT), text)


def print_json(value: object) -> None:
    """Print one JSON document on one line, with times in ISO 8601; letters are escaped where they are not UTF-8."""
    escaped = codecs.lookup(sys.stdout.encoding).name != "utf-8"
    click.echo(json.dumps(value, ensure_ascii=escaped, separators=(",", ":"), default=_jsonable))


def _jsonable(value: object) -> object:
    from pydantic_core import to_jsonable_python  # only what prints such values takes the time to import it

    return to_jsonable_python(value)


def tell(text: str) -> None:
    """Print a sentence to standard error. On a terminal that is too narrow, it goes on below, between two words.

    A command in backticks stays on one line if it fits there, so that it can be copied.
    """
    if not sys.stderr.isatty():
        click.echo(text, err=True)  # to import what measures texts takes longer
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False)
    for line in divided(text, console):
        console.print(Text(line), soft_wrap=True)


@contextmanager
def going_on(told: Callable[[], str | None]) -> Iterator[None]:
    """Whatever ends a wait, Ctrl-C or an answer of the server or none, say what goes on without it.

    Errors that name it themselves, because its time is over or because it does not exist, say nothing more.
    told: returns that sentence, None if there is nothing yet. Raises click's Abort after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        if (sentence := told()) is not None:
            tell(f"\n{sentence}")
        raise click.Abort from None
    except (TimedOut, NotFound):
        raise
    except LeaseholdError as error:
        if (sentence := told()) is not None:
            error.add_note(sentence)
        raise


def divided(text: str, console: "Console") -> Iterator[str]:
    """Give the lines of a sentence for a terminal, divided between words. A longer word is left to the terminal."""
    width = max(console.width, INDENT)
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _KEPT) if len(found[0]) <= width - 2 else found[0], text)
    whole = _kept_durations(whole)
    for line in whole.split("\n"):
        yield from (part.rstrip().replace(_KEPT, " ") for part in _lines(line, width))


def without_middle(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters: its beginning and its end, with … in between if it was longer."""
    if len(text) <= limit:
        return text
    end = (limit - 1) // 2
    return text[: limit - 1 - end] + "…" + text[len(text) - end :]


def _lines(title: str, width: int) -> list[str]:
    """Return a title in lines of this width, divided between words. A word that is longer has a line of its own."""
    from rich.cells import cell_len

    first, *words = title.split(" ")
    lines = [first]
    for word in words:
        joined = f"{lines[-1]} {word}"
        if cell_len(joined) <= width or not lines[-1].strip():
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence["Text"]], width: int
) -> tuple[list[Column], list[list["Text"]], list[int]]:
    """Return the columns that stay in this width, their cells, cut where they may be, and their widths.

    Titles of several words take several lines. Texts are cut only as far as it takes, the later columns first. Columns
    without a value leave before any text is cut, others before a text has less than its least. If none is left to
    leave, the texts that may be cut have less.
    """
    natural = [_width(column, [row[nth] for row in rows]) for nth, column in enumerate(columns)]
    narrowest = []
    for nth, (column, whole) in enumerate(zip(columns, natural, strict=True)):
        word = max(map(len, column.title.split(" ")))
        if column.least:
            narrowest.append(min(whole, max(column.least, word)))
        elif column.folds:
            narrowest.append(min(whole, width // 3))
        else:
            narrowest.append(max([word, *(row[nth].cell_len for row in rows)]))
    kept = list(range(len(columns)))
    leaving = sorted((nth for nth in kept if columns[nth].leaves), key=lambda nth: columns[nth].leaves)
    if sum(natural) + GAP * (len(columns) - 1) > width:
        empty = [nth for nth in leaving if all(row[nth].plain == "-" for row in rows)]
        kept, leaving = ([nth for nth in each if nth not in empty] for each in (kept, leaving))
    while leaving and sum(narrowest[nth] + GAP for nth in kept) - GAP > width:
        kept.remove(leaving.pop(0))
    too_wide = sum(narrowest[nth] + GAP for nth in kept) - GAP - width
    for nth in reversed(kept):
        if columns[nth].least and too_wide > 0:
            less = min(too_wide, max(0, narrowest[nth] - max(SHORTEST, len(columns[nth].title))))
            narrowest[nth] -= less
            too_wide -= less
    spare = max(0, width + GAP - sum(narrowest[nth] + GAP for nth in kept))
    limits = {nth: narrowest[nth] for nth in kept}
    for enough in (FOLDED, width):  # each text has its first words before one has all of them
        for nth in kept:
            more = min(spare, max(0, min(natural[nth], enough) - limits[nth]))
            limits[nth] += more
            spare -= more
    cells = []
    for row in rows:
        cells.append([row[nth].copy() for nth in kept])
        for nth, each in zip(kept, cells[-1], strict=True):
            if columns[nth].middle and each.cell_len == len(each) > limits[nth]:
                each.plain = without_middle(each.plain, limits[nth])
            elif not columns[nth].folds:
                each.truncate(limits[nth], overflow="ellipsis")
    return (
        [columns[nth] for nth in kept],
        cells,
        [natural[nth] if columns[nth].folds else limits[nth] for nth in kept],
    )


def _width(column: Column, cells: Iterable["Text"]) -> int:
    return max([len(column.title), *(each.cell_len for each in cells)])


def cell(value: object) -> str:
    """Return a value as a table shows it, without characters that could control the terminal.

    A number is a quantity, with separators; a number that names something, such as a process, is given as text.
    """
    match value:
        case None | "" | []:
            return "-"
        case True:
            return "yes"
        case False:
            return "no"
        case int() | float():
            return figure(value)
        case list():
            return printable(" ".join(map(str, value)))
        case _:
            return printable(str(value))


# Help


class Group(click.Group):
    """A group of commands: its help has whole sentences, and a word that is none of them is told with the nearest."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with the first sentence of each."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(300)) for name, each in found.items() if each])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names. Raises UsageError."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            path = f"{ctx.command_path} {escaped(name, 40)}".partition(" ")[2]
            hint = suggestion(name, self.list_commands(ctx)) or f": `{ctx.command_path} --help` lists them"
            raise click.UsageError(f"there is no command '{path}'{hint}", ctx)
        return super().resolve_command(ctx, args)
