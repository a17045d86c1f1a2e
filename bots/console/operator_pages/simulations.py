"""Simulations: the reports that operators have kept, as a part of the page of policy, and one report with its charts.

A chart shows one instance, with a line for what really happened and for each policy, so that these are seen together.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

from leasehold.client import Client
from leasehold.errors import NotFound

from bots.console.charts import Chart
from bots.console.jobs.searched import JOB_ID
from bots.console.parts import Cell, Table, node
from bots.console.view import SLOW, View
from bots.console.words import ago, text

Report = Mapping[str, Any]

EMPTY = (
    "No report is kept. leasehold simulate --title TEXT lets the past happen again under another configuration, and "
    "keeps what it finds."
)
#: Reports in the list.
MOST_REPORTS = 20
#: Lines of one chart, which are as many as there are colours. What really happened and its replay come first.
MOST_LINES = 5
#: Kinds of charts, with their titles; whether their values are seconds.
KINDS = (("waits", "95 % of the waits of jobs that start then", True), ("units", "units in use", False))
#: The name of a line for the instances that have none of their own.
OTHERS = "others"
#: Begins a figure that is no other than in the replay.
SAME = "= "


def show_reports(view: View) -> None:
    """Put the list of the newest reports into `view`."""
    node("h2", "Simulations")
    table = Table("What other settings would have done, newest first", ("report", "kept", "number"), empty=EMPTY)

    async def refresh() -> None:
        found = await view.ask(lambda client: client.operators.simulations(limit=MOST_REPORTS))
        table.show(
            [
                (
                    str(each["id"]),
                    [
                        Cell(text(each["title"]), f"/simulations/{each['id']}"),
                        ago(each["made_at"]),
                        Cell(text(each["id"])),
                    ],
                )
                for each in found
            ]
        )

    view.live(refresh, seconds=SLOW)


def show_simulation(view: View, id: str) -> None:
    """Put one report into `view`. It never changes, so it is read once."""
    place = node("div")
    shown: list[tuple[Chart, Sequence[Mapping[str, Any]]]] = []
    report: dict[str, Any] = {}
    drawn_in: tzinfo | None = None

    def read(client: Client) -> Any:
        if not id.isdecimal():
            raise NotFound(f"simulation {id} is not kept")
        return client.operators.simulation(int(id))

    async def refresh() -> None:
        nonlocal drawn_in
        if not report:
            found = await view.ask(read)
            report.update(found["report"])
            view.heading.text = text(found["title"])
            with place:
                for line in report["head"]:
                    node("p", text(line), "note")
                _show_tables(report)
                node("h2", "Over time")
                node("p", left_out(report), "note")
                with node("div", kind="charts"):
                    shown.extend(charts(report))
        # The reader's zone is known soon after the page is there.
        if view.zone != drawn_in:
            drawn_in = view.zone
            for chart, samples in shown:
                chart.show(samples, start=report["since"], end=report["until"], zone=drawn_in)

    view.live(refresh, seconds=SLOW * 4)


def _show_tables(report: Report) -> None:
    Table("", report["columns"], empty="").show(
        [(str(number), [_figure(each) for each in row]) for number, row in enumerate(report["rows"])]
    )
    for name, jobs in report["losers"].items():
        node("h2", f"Jobs that lose most under {name}")
        rows = [(job, [_job(job), *(Cell(text(each)) for each in others)]) for job, *others in jobs]
        Table("", ("job", "instance", "before", "then"), empty="").show(rows)


def _job(name: str) -> Cell:
    # A job of a trace or of a generated load is none of the pool, and has no page.
    return Cell(text(name), f"/jobs/{name}" if JOB_ID.fullmatch(name) else None, "id")


def left_out(report: Report) -> str:
    """Return what the charts of a report do not show; empty if they show all."""
    runs = [*report["charts"]][MOST_LINES:]
    said = [f"Not drawn: {', '.join(runs)}."] if runs else []
    if any(OTHERS in lines for kinds in report["charts"].values() for lines in kinds.values()):
        said.append("The instances with the most work have charts of their own; the others are together.")
    return " ".join(said)


def _figure(told: str) -> Cell:
    return Cell(text(told), kind="note" if told.startswith(SAME) else "")


def charts(report: Report) -> list[tuple[Chart, Sequence[Mapping[str, Any]]]]:
    """Put the charts of a report on the page, still empty, and return each with its samples."""
    runs = [*report["charts"]][:MOST_LINES]
    colours = {name: number for number, name in enumerate(runs)}
    names = sorted({name for run in runs for kind, _, _ in KINDS for name in report["charts"][run][kind]})
    return [
        (
            Chart(f"{name}: {title}", {run: run for run in runs}, durations=is_time, colours=colours),
            samples_of(report, runs, kind, name),
        )
        for name in names
        for kind, title, is_time in KINDS
    ]


def samples_of(report: Report, runs: Sequence[str], kind: str, name: str) -> list[dict[str, Any]]:
    """Return the points of one chart as samples: each has a value of each run that has one then."""
    lines = {run: report["charts"][run][kind].get(name, ()) for run in runs}
    count = max(map(len, lines.values()), default=0)
    size = (report["until"] - report["since"]) / max(1, count)
    found = []
    for part in range(count):
        at = datetime.fromtimestamp(report["since"] + (part + 1) * size, UTC).isoformat()
        values = {run: line[part] for run, line in lines.items() if part < len(line) and line[part] is not None}
        found.append({"at": at, "span": size, **values})
    return found
