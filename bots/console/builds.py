"""The page of builds: what each has asked of the farm door, how much was there already, and what still runs."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from leasehold.client import Client
from leasehold.errors import NotFound

from bots.cli.output import seconds
from bots.console.parts import Cell, Table, node
from bots.console.pool import Tiles
from bots.console.view import SLOW, View
from bots.console.words import ago, count, text
from schema.readable import plural

Record = Mapping[str, Any]

#: Builds on the page.
PAGE = 50
#: The most characters of an invocation that a row shows.
SHORT = 8
COLUMNS = (
    *("build", "state", "instance", "done", "cached", "shared", "run", "waiting", "running", "failed"),
    *("waited", "bots", "began", "took"),
)
EMPTY = (
    "No build has used the pool. Start a door: leasehold farm. How Bazel, recc and others reach it tells: leasehold "
    "farm clients. A build is listed from its first action on."
)


def show(view: View) -> None:
    """Put the page into `view`."""
    tiles = Tiles(("builds that run", "actions", "from the cache", "longest wait"))
    node("h2", "Newest builds")
    table = Table("", COLUMNS, empty=EMPTY)
    more = node("p", kind="note")

    async def refresh() -> None:
        found = await view.ask(read)
        tiles.show(figures(found))
        table.show([(f"{one['instance']}/{one['invocation']}", cells(one)) for one in found])
        more.text = f"The newest {PAGE} are shown." if len(found) >= PAGE else ""

    view.live(refresh, seconds=SLOW)


def read(client: Client) -> Sequence[Record]:
    """Read the newest builds; none from a gateway that is too old to list them."""
    try:
        found: Sequence[Record] = client.call("GET", "/v1/builds", query={"limit": PAGE})["builds"]
    except NotFound:
        return ()
    return found


def asked(one: Record) -> int:
    """Return how many actions a build has asked for."""
    return int(one["cached"] + one["joined"] + one["made"])


def figures(found: Sequence[Record]) -> dict[str, tuple[str, str]]:
    """Return the large figures of some builds."""
    running = [one for one in found if unfinished(one)]
    actions, cached = (sum(map(each, found)) for each in (asked, lambda one: one["cached"]))
    waits = [one["longest_wait"] for one in found if one["longest_wait"] is not None]
    return {
        "builds that run": (count(len(running)), f"of the newest {len(found):,}" if found else ""),
        "actions": (count(actions), f"{sum(one['made'] for one in found):,} of them run" if found else ""),
        "from the cache": (
            f"{share(cached, actions):.0%}" if actions else "-",
            plural(cached, "action") if found else "",
        ),
        "longest wait": (seconds(max(waits, default=None)), "for a bot" if waits else ""),
    }


def share(part: int, whole: int) -> float:
    """Return a part of a whole, from 0 to 1."""
    return part / whole if whole else 0.0


def unfinished(one: Record) -> int:
    """Return how many jobs of a build are not over."""
    return int(one["waiting"] + one["running"])


def cells(one: Record) -> list[Cell]:
    """Return the cells of one build. Its figures lead to the jobs that they count."""
    of = {"instance": one["instance"], "metadata": f"invocation={one['invocation']}"}
    actions, left = asked(one), unfinished(one)

    def jobs(figure: int, *states: str) -> Cell:
        link = f"/jobs?{urlencode({**of, 'state': states}, doseq=True)}" if figure else None
        return Cell(count(figure, at_least=one["more"]), link)

    done = share(max(0, actions - left), actions)
    return [
        Cell(
            text(one["tool"] or "a client"),
            f"/jobs?{urlencode(of)}",
            "id",
            more=short(one["invocation"]),
            title=one["invocation"],
        ),
        state(one),
        Cell(text(one["instance"])),
        Cell(f"{max(0, actions - left):,} of {actions:,}", share=done),
        Cell(f"{one['cached']:,}", title=f"{share(one['cached'], actions):.0%} of its actions"),
        Cell(f"{one['joined']:,}"),
        Cell(f"{one['made']:,}"),
        jobs(one["waiting"], "queued", "parked"),
        jobs(one["running"], "leased", "running", "cancelling"),
        jobs(one["failed"], "failed", "dead"),
        Cell(seconds(one["longest_wait"]), title="the longest wait of a job for its first start"),
        Cell(f"{one['bots']:,}"),
        ago(one["began_at"]),
        Cell(seconds(one["seconds"])),
    ]


def state(one: Record) -> Cell:
    """Return how a build stands: it runs while jobs of it are unfinished, else the worst end counts."""
    if unfinished(one):
        return Cell("running", kind="state-running")
    if one["failed"]:
        return Cell("has failures", kind="state-failed")
    return Cell("cancelled", kind="state-cancelled") if one["cancelled"] else Cell("done", kind="state-succeeded")


def short(invocation: str) -> str:
    """Return the beginning of an invocation."""
    told = text(invocation)
    return told if len(told) <= SHORT else f"{told[:SHORT]}…"
