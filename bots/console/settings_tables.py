"""Pages of what operators set, and of what the pool tells of itself: one table for each list of the gateway."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leasehold.client import Client

from bots.cli.output import reads_in_words, seconds
from bots.console.parts import Cell, Facts, Table, node
from bots.console.view import SLOW, View
from bots.console.words import UNLIMITED, ago, text

Record = Mapping[str, Any]

#: The most rows of one table.
MAX_ROWS = 200


@dataclass(frozen=True)
class Source:
    """A list of the gateway, or a single object with fields.

    path: below `/v1`. single: it is one object. empty: what the page says if there is none.
    """

    title: str
    path: str
    empty: str = "None is set."
    single: bool = False


LIMITS = (
    Source("The pool", "limits", single=True),
    Source("Rates of resource classes", "rates"),
    Source("Backpressure", "backpressure"),
    Source("Meters", "meters", empty="None was read."),
    Source("Queue limits of labels", "queue-limits"),
    Source("Queue limits of instances", "instance-queue-limits"),
    Source("Locks", "locks"),
    Source("Classes: jobs at once", "class-limits"),
    Source("Classes: reserves", "class-reserves"),
    Source("Costs of owners", "owner-quotas"),
    Source("Costs of projects", "project-quotas"),
    Source("Reports of usage", "report-ceilings"),
)


#: Headings of fields whose names do not tell what they are; the others are headed by their names.
HEADINGS = {
    "points": "points (higher = sooner)",
    "priority": "priority (lower = sooner)",
    "seconds": "half run at most (s)",
    "seconds_high": "nine of ten (s)",
    "timeout_seconds": "timeout (s)",
}


class Listed:
    """A table whose columns are the fields of the rows that come first."""

    def __init__(self, source: Source) -> None:
        self._source = source
        node("h2", source.title)
        self._place = node("div")
        self._note = node("p", kind="note")
        self._columns: list[str] | None = None
        self._table: Table | None = None
        with self._place:
            self._facts = Facts() if source.single else None

    def read(self, client: Client) -> Any:
        """Ask the gateway for the list, or for the object."""
        found = client.call("GET", f"/v1/{self._source.path}")
        return found if self._source.single else found[self._source.path.replace("-", "_")]

    def show(self, found: Any) -> None:
        """Show what was read."""
        if self._facts is not None:
            self._facts.show({name.replace("_", " "): shown(name, value) for name, value in found.items()})
            return
        rows: Sequence[Record] = found[:MAX_ROWS]
        left_out = f" The first {MAX_ROWS} are shown." if len(found) >= MAX_ROWS else ""
        self._note.text = left_out if rows else self._source.empty
        columns = list(dict.fromkeys(field for row in rows for field in row))
        if rows and columns != self._columns:
            self._columns = columns
            self._place.clear()
            with self._place:
                self._table = Table("", [HEADINGS.get(field, field.replace("_", " ")) for field in columns], empty="")
        if self._table is not None:
            cells = [[shown(field, row.get(field)) for field in columns] for row in rows]
            self._table.show([(str(place), each) for place, each in enumerate(cells)])


def shown(field: str, value: object) -> Cell:
    """Return the cell of a value; a field whose name ends in `_at` or is `until` is a time."""
    if isinstance(value, str) and (field.endswith("_at") or field in ("until", "at")):
        return ago(value)
    if field == "position" and value == UNLIMITED:
        return Cell("last")
    if isinstance(value, dict) and value.keys() == {"used", "most"}:
        used, most = value["used"], value["most"]
        return Cell(f"{text(used)} in use, no limit" if most is None else f"{text(used)} of {text(most)} in use")
    return Cell(text(value))


class Upkeep(Table):
    """The table that says when each duty of upkeep was last done; the page of the pool has it too."""

    def __init__(self) -> None:
        super().__init__("Upkeep", ("duty", "last done", "note"), empty="Upkeep has never run.")

    def show_status(self, status: Record) -> None:
        """Show the duties of a pool's status, and where lists are read if there is a standby for that."""
        rows = [(tick["name"], _duty(tick)) for tick in status["upkeep"]]
        if reads := status.get("reads"):
            rows.append(("reads", [Cell("reads"), Cell(""), Cell(reads_in_words(reads))]))
        self.show(rows)


def _duty(tick: Record) -> list[Cell]:
    grace = "in grace: nothing expires yet" if tick["grace"] else ""
    return [Cell(text(tick["name"])), Cell(f"{seconds(tick['age_seconds'])} ago"), Cell(grace)]


def show_tables(view: View, *, sources: Sequence[Source]) -> None:
    """Put a table for each source on the page."""
    listed = [Listed(source) for source in sources]

    async def refresh() -> None:
        for each in listed:
            each.show(await view.ask(each.read))

    view.live(refresh, seconds=SLOW)


show_limits = partial(show_tables, sources=LIMITS)
