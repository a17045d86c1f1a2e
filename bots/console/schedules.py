"""The page of schedules: when each one is due, how its last job went, and pause, resume and run now for chosen ones."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from leasehold.client import Client
from leasehold.errors import LeaseholdError

from bots.console.parts import Cell, Table, node
from bots.console.view import SLOW, View
from bots.console.words import ago, text

Record = Mapping[str, Any]

#: Schedules on the page.
PAGE = 500
COLUMNS = ("schedule", "instance", "when", "state", "next", "last", "last job", "left out", "problem")
EMPTY = "There is no schedule. leasehold schedule add NAME '0 3 * * *' -- COMMAND makes one."


class Page:
    """The table of schedules, and the acts on the chosen ones."""

    def __init__(self, view: View) -> None:
        self._view = view
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
