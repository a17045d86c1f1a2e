"""The page of schedules: when each is due and how its last job went; run, pause and resume them, or make one."""

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from leasehold.client import Client
from leasehold.errors import BadInput, LeaseholdError
from leasehold.wire import load_zone

from bots.console.parts import Cell, Table, Typed, node
from bots.console.view import SLOW, View
from bots.console.words import ago, text

Record = Mapping[str, Any]

#: Schedules on the page.
PAGE = 500
#: The most characters of a field of a new schedule.
MAX_FIELD = 4000
#: Fields of a new schedule, each with what stands there at first and an example.
FIELDS = {
    "name": ("", "nightly"),
    "cron": ("", "0 3 * * *"),
    "time zone": ("UTC", "Europe/Berlin"),
    "instance": ("", "of the token, or default"),
    "overlap": ("", "allow, or skip while the last job runs"),
    "catch up": ("", "missed ticks: skip (the newest), all or none"),
    "most of all": ("", "10"),
    "oldest seconds of skip": ("", "86400"),
    "command": ("", "make nightly"),
}
#: Those that are terms of the schedule, as the gateway calls them.
TERMS = {
    "zone": "time zone",
    "overlap": "overlap",
    "catch_up": "catch up",
    "catch_up_most": "most of all",
    "catch_up_seconds": "oldest seconds of skip",
}
NUMBERS = ("catch_up_most", "catch_up_seconds")
COLUMNS = ("schedule", "instance", "when", "state", "next", "last", "last job", "left out", "problem")
EMPTY = "There is no schedule. + schedule above makes one."


class NewSchedule:
    """The form that makes a schedule: it shows the next instants, and tells errors as the command does."""

    def __init__(self, view: View) -> None:
        self._view = view
        with node("details"):
            node("summary", "+ schedule")
            with node("div", kind="acts"):
                labels = {name: (name, value) for name, (value, _) in FIELDS.items()}
                self._typed = Typed(labels, {name: hint for name, (_, hint) in FIELDS.items()}, most=MAX_FIELD)
                node("button", "Preview", type="button").on("click", self._preview, [])
                view.confirmed("Make the schedule", self._question, self._make)
            self._told = node("p", kind="note", aria_live="polite")
            self._ticks = Table("The next instants", ("in the zone of the schedule", "from now"), empty="")

    def _call(self, verb: str, client: Client) -> Record:
        """Make the schedule (`put`), or tell when it would be due (`plan`). Raises BadInput."""
        try:
            command = shlex.split(self._typed["command"])
        except ValueError:
            raise BadInput("command", "a quotation mark is not closed") from None
        for field in ("name", "cron", "command"):
            if not self._typed[field]:
                raise BadInput(field, "is needed")
        call = client.schedules.put if verb == "put" else client.schedules.plan
        terms: dict[str, str | int | None] = {term: self._typed[field] or None for term, field in TERMS.items()}
        for term in NUMBERS:
            given = self._typed[TERMS[term]]
            if given and not given.isdecimal():
                raise BadInput(TERMS[term], "is no whole number")
            terms[term] = int(given) if given else None
        instance = self._typed["instance"] or None
        try:
            return call(self._typed["name"], self._typed["cron"], {"command": command}, **terms, instance=instance)
        except BadInput as refused:
            field = refused.field.removeprefix("job.")
            raise BadInput(TERMS.get(field, field), refused.reason) from None

    async def _plan(self) -> Record:
        found = await self._view.ask(partial(self._call, "plan"))
        zone = load_zone(self._typed["time zone"] or "UTC")
        ticks = [(at, datetime.fromisoformat(at).astimezone(zone)) for at in found["ticks"]]
        self._ticks.show([(at, [Cell(f"{local:%a %Y-%m-%d %H:%M %Z}"), ago(at)]) for at, local in ticks])
        exists = f"It replaces the schedule of this name in {found['instance']}." if found["exists"] else ""
        self._told.text = exists or f"It is new in {found['instance']}."
        return found

    async def _preview(self) -> None:
        async def work() -> None:
            await self._plan()

        await self._view.doing(work)

    async def _question(self) -> str:
        found = await self._plan()
        verb = "Replace" if found["exists"] else "Make"
        return f"{verb} the schedule {found['name']} of {found['instance']}? See when it is due first."

    async def _make(self) -> None:
        done = await self._view.ask(partial(self._call, "put"))
        self._ticks.show([])
        self._told.text = f"{done['name']} is {'made' if done['created'] else 'set'}."


class Page:
    """The table of schedules, and the acts on the chosen ones."""

    def __init__(self, view: View) -> None:
        self._view = view
        NewSchedule(view)
        with node("section", kind="bar", aria_label="Acts on schedules"), node("div", kind="acts"):
            self._scope = node("strong", "Choose schedules")
            for name, verb in (("Run now", run), ("Pause", partial(enable, enabled=False)), ("Resume", enable)):
                view.confirmed(name, self._question(name), self._act(verb))
        self._table = Table("", COLUMNS, empty=EMPTY, on_choice=self._choice)
        self._more = node("p", kind="note")

    def _choice(self) -> None:
        number = len(self._table.chosen)
        self._scope.text = f"{number} chosen" if number else "Choose schedules"

    def _question(self, name: str) -> Callable[[], Awaitable[str]]:
        async def question() -> str:
            if not self._table.chosen:
                raise LeaseholdError("choose schedules first")
            return f"{name}: {', '.join(key.partition('/')[2] for key in self._table.chosen)}?"

        return question

    def _act(self, verb: Callable[..., None]) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            for instance, _, name in [key.partition("/") for key in self._table.chosen]:
                await self._view.ask(partial(verb, instance=instance, name=name))

        return act

    async def refresh(self) -> None:
        """Read the schedules, and show them."""
        found = await self._view.ask(read)
        self._table.show([(f"{one['instance']}/{one['name']}", cells(one)) for one in found])
        self._more.text = f"The first {PAGE} are shown." if len(found) >= PAGE else ""
        self._choice()


def read(client: Client) -> Sequence[Record]:
    """Read the schedules, by instance and name."""
    found: Sequence[Record] = client.call("GET", "/v1/schedules", query={"limit": PAGE})["schedules"]
    return found


def show(view: View) -> None:
    """Put the page into `view`."""
    view.live(Page(view).refresh, seconds=SLOW)


def run(client: Client, instance: str, name: str) -> None:
    """Submit the job of a schedule now."""
    client.schedules.run_now(name, instance=instance)


def enable(client: Client, instance: str, name: str, *, enabled: bool = True) -> None:
    """Let a schedule have ticks, or none."""
    client.schedules.enable(name, enabled=enabled, instance=instance)


def cells(one: Record) -> list[Cell]:
    """Return the cells of one schedule."""
    link = one["last_job"] and f"/jobs/{one['last_job']}"
    problem = f"{one['failures']:,} refusals: {one['last_error']}" if one["last_error"] else ""
    return [
        Cell(text(one["name"]), more=f"of {one['declared_by']}" if one["declared_by"] else ""),
        Cell(text(one["instance"])),
        Cell(f"{one['cron']} {one['zone']}", kind="id"),
        Cell("on", kind="state-ok") if one["enabled"] else Cell("paused", kind="state-parked"),
        ago(one["next_tick"]),
        ago(one["last_tick"]),
        Cell(text(one["last_state"]), link, f"state-{one['last_state']}" if one["last_state"] else ""),
        Cell(text(one["left_out"])),
        Cell(problem or "-", kind="long"),
    ]
