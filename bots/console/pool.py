"""The page of the pool: what waits, runs and ends, who waits longest, bots, rates and upkeep."""

from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.client import Client
from leasehold.states import WAITING

from bots.cli.output import seconds
from bots.console.charts import Chart, begun, epoch, points
from bots.console.operator_pages.health import Alerts
from bots.console.parts import Cell, Table, node
from bots.console.settings_tables import Upkeep
from bots.console.view import FAST, View
from bots.console.words import ALL, ENDED, HELD, count
from schema.readable import plural

Record = Mapping[str, Any]

#: Hours that the charts may show, with their names.
STRETCHES = {"1": "hour", "24": "day", "336": "two weeks", "8760": "year"}
#: Tiles with a line of how the figure went, by the field of the samples.
SPARKS = {"waiting": "waiting", "with bots": "running", "ending": "succeeded", "oldest wait": "oldest_wait"}
#: Seconds between two looks at the samples, of which there is one a minute.
HISTORY = 20.0
#: Seconds of the units in which a pace is told.
PACES = ((1, "/s"), (60, "a minute"), (3600, "an hour"))
#: The most instances in the table, those with the most waiting jobs.
MAX_INSTANCES = 100


class Tiles:
    """Large figures with a name and a line of details each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._parts, self._lines = {}, {}
        with node("div", kind="tiles"):
            for name in names:
                with node("div", kind="tile"):
                    node("div", name, "name")
                    self._parts[name] = (node("div", "…", "value"), node("div", "", "more"))
                    self._lines[name] = node(
                        "svg", kind="spark", viewBox="0 0 100 20", preserveAspectRatio="none", aria_hidden="true"
                    )

    def show(self, figures: Mapping[str, tuple[str, str]]) -> None:
        """Show each name's figure with its details."""
        for name, (value, more) in figures.items():
            self._parts[name][0].text, self._parts[name][1].text = value, more

    def spark(self, name: str, line: Sequence[tuple[float, float]]) -> None:
        """Draw how a figure went, as a line without marks."""
        most = max((value for _, value in line), default=0) or 1
        self._lines[name].clear()
        with self._lines[name]:
            node("polyline", points=" ".join(f"{100 * x:.1f},{19 - 18 * value / most:.1f}" for x, value in line))


def show(view: View) -> None:
    """Put the page into `view`."""
    tiles = Tiles(("waiting", "with bots", "ending", "oldest wait", "units in use", "wait for a bot"))
    if view.is_operator:
        Alerts(view, hidden_if_none=True)
    show_history(view, tiles)
    node("h2", "Jobs by instance")
    jobs = Table(
        "Click a figure for its jobs. A + means that there are more: counting stops at a bound.",
        ("instance", *ALL),
        empty="There are no jobs.",
    )
    node("h2", "Bots and upkeep")
    about = Table("Bots by status", ("status", "bots", "units in use", "units"), empty="There are no bots.")
    upkeep = Upkeep()

    async def refresh() -> None:
        found = await view.ask(Client.status)
        tiles.show(figures(found))
        jobs.show(instance_rows(found))
        about.show(
            [
                (
                    status,
                    (
                        Cell(status, kind=f"state-{status}"),
                        *(Cell(count(each[x])) for x in ("bots", "in_use", "capacity")),
                    ),
                )
                for status, each in found["bots"].items()
            ]
        )
        upkeep.show_status(found)

    view.live(refresh, seconds=FAST)


def show_history(view: View, tiles: Tiles) -> None:
    """Put the charts of pool samples on the page; the URL says how far back they reach."""
    asked = view.query.get("hours", "1")
    hours = int(asked) if asked in STRETCHES else 1
    node("h2", f"The last {STRETCHES[str(hours)]}")
    with node("nav", kind="acts", aria_label="Stretch of time"):
        for each, name in STRETCHES.items():
            node("a", f"last {name}", href=f"/?hours={each}", aria_current="page" if each == str(hours) else None)
    with node("div", kind="charts"):
        charts = (
            Chart("Jobs", {"waiting": "waiting", "running": "with bots"}),
            Chart("Jobs ended per minute", {state.value: state.value for state in ENDED}),
            Chart("Longest wait in the queue", {"oldest_wait": "oldest wait"}, durations=True),
        )

    async def refresh() -> None:
        found = await view.ask(lambda client: client.samples(hours=hours))
        samples, end = found["samples"], epoch(found["now"])
        for chart in charts:
            chart.show(samples, start=end - hours * 3600, end=end, zone=view.zone)
        start = begun(samples, start=end - hours * 3600, end=end)
        for name, field in SPARKS.items():
            tiles.spark(name, points(samples, field, start=start, end=end))

    view.live(refresh, seconds=HISTORY)


def figures(found: Record) -> dict[str, tuple[str, str]]:
    """Return the large figures of a pool's status."""
    jobs, least, rates, waits = found["jobs"], set(found["at_least"]), found["rates"], found["waits"]

    def total(states: Sequence[str]) -> tuple[str, str]:
        there = [state for state in states if jobs.get(state)]
        parts = [f"{count(jobs[state], at_least=state in least)} {state}" for state in there]
        return count(sum(jobs[state] for state in there), at_least=bool(least & set(there))), ", ".join(parts)

    waiting = total(WAITING)
    if found["unmatchable"]:
        none = f"no bot can run {count(found['unmatchable'], at_least='unmatchable' in least)}"
        waiting = (waiting[0], f"{waiting[1]}; {none}")
    ended = ", ".join(f"{pace(rates[state])} {state}" for state in ENDED if rates[state])
    oldest = found["oldest_queued_seconds"]
    return {
        "waiting": waiting,
        "with bots": total(HELD),
        "ending": (pace(rates["finished"]), f"{ended or 'none'} in the last {seconds(rates['span'])}"),
        "oldest wait": (
            "none" if oldest is None else seconds(oldest) + ("+" if "oldest_queued_seconds" in least else ""),
            f"{pace(rates['submitted'])} submitted, {pace(rates['started'])} started",
        ),
        "units in use": (f"{found['in_use']:,}", f"of {found['capacity']:,}"),
        "wait for a bot": (
            seconds(waits["p50"]) if waits["jobs"] else "none",
            f"median; 95 % {seconds(waits['p95'])}, 99 % {seconds(waits['p99'])}, of {plural(waits['jobs'], 'job')}"
            if waits["jobs"]
            else "of 0 jobs",
        ),
    }


def pace(rate: float) -> str:
    """Format a number per second as people count: by the second if it is one or more, else by the minute or hour."""
    size, unit = next((each for each in PACES if rate * each[0] >= 1), PACES[-1])
    told = rate * size
    return f"{told:,.0f} {unit}" if told >= 10 else f"{round(told, 1):g} {unit}" if rate else "0"


def instance_rows(found: Record) -> list[tuple[str, list[Cell]]]:
    """Return a row for each instance; those with the most waiting jobs, if there are too many."""
    least = set(found["at_least"])
    known = found["instances"]
    shown = sorted(known, key=lambda name: -sum(known[name].get(state, 0) for state in WAITING))[:MAX_INSTANCES]
    return [
        (
            name,
            [
                Cell(name, f"/jobs?instance={name}"),
                *(
                    Cell(
                        count(known[name].get(state, 0), at_least=state in least),
                        f"/jobs?instance={name}&state={state}" if known[name].get(state) else None,
                    )
                    for state in ALL
                ),
            ],
        )
        for name in sorted(shown)
    ]
