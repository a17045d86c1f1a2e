"""The page of tenants: who uses what of the pool beside what is due, and changes with a preview of their effect."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from leasehold.client import Client
from leasehold.errors import BadInput, LeaseholdError

from bots.console.charts import Chart, epoch
from bots.console.parts import Cell, Table, Typed, node
from bots.console.pool import HISTORY, STRETCHES
from bots.console.settings_tables import MAX_ROWS
from bots.console.view import SLOW, View
from bots.console.words import text
from schema.readable import FIGURES, plural

Record = Mapping[str, Any]

#: Cells of a bar.
BAR = 20
#: Fields that the page changes, with the path of what they are parts of. A field left empty has no value.
QUOTA, SHARE = ("min", "max"), ("weight", "budget", "max_concurrent")
HINTS = {"min": "units", "max": "units; empty: no maximum", "weight": "empty: no share"} | dict.fromkeys(
    ("budget", "max_concurrent"), "empty: any"
)


def show(view: View) -> None:
    """Put usage, shares and fairness on the page, and the form for the instance that the URL names."""
    chosen = view.query.get("instance", ""), view.query.get("cohort", "") or "default"
    history(view)
    Change(view, *chosen)
    node("h2", "Units in use")
    quotas = Table(
        "█ within the minimum, ▓ above it, ░ free below the maximum. Choose an instance to change it.",
        ("cohort", "instance", "in use", "", "minimum", "maximum", "less evictions"),
        empty="No instance has a quota.",
    )
    node("h2", "Shares")
    shares = Table(
        "Due is the part of all weights; the others are parts of what all managed instances have.",
        (
            "instance",
            "weight",
            "due",
            "of running jobs",
            "of the cost used",
            "used",
            "budget",
            "",
            "jobs",
            "jobs at once",
        ),
        empty="No instance has a share: jobs start by priority and age alone.",
    )
    node("h2", "Instances")
    instances = Table(
        f"The first {MAX_ROWS} by name; + means that counting stopped there.",
        ("instance", "pool", "draining", "queued", "running", "units in use"),
        empty="No instance has submitted a job.",
    )

    def read(client: Client) -> tuple[Any, Any, Any]:
        listed = client.call("GET", "/v1/instances", query={"limit": MAX_ROWS})["instances"]
        return client.call("GET", "/v1/quotas")["quotas"], client.call("GET", "/v1/accounts")["accounts"], listed

    async def refresh() -> None:
        found, accounts, listed = await view.ask(read)
        quotas.show([(f"{one['cohort']}/{one['instance']}", quota_cells(one)) for one in found[:MAX_ROWS]])
        shares.show(share_rows(accounts))
        instances.show([(one["name"], instance_cells(one)) for one in listed])

    view.live(refresh, seconds=SLOW)


def history(view: View) -> None:
    """Put the chart of fairness on the page; the URL says how far back it reaches."""
    asked = view.query.get("hours", "24")
    hours = int(asked) if asked in STRETCHES else 24
    with node("nav", kind="acts", aria_label="Stretch of time"):
        for each, name in STRETCHES.items():
            current = "page" if each == str(hours) else None
            node("a", f"last {name}", href=f"/tenants?hours={each}", aria_current=current)
    with node("div", kind="charts"):
        chart = Chart("Fairness: Jain's index of units in use over weight, 1 = equal", {"fairness": "fairness"}, most=1)

    async def refresh() -> None:
        found = await view.ask(lambda client: client.call("GET", "/v1/samples/fairness", query={"hours": hours}))
        end = epoch(found["now"])
        chart.show(found["samples"], start=end - hours * 3600, end=end, zone=view.zone)

    view.live(refresh, seconds=HISTORY)


def bar(used: float, least: float, most: float | None) -> str:
    """Draw what is in use against a minimum and a maximum; without a maximum against what is in use."""
    whole = max(used, least, most or 0)
    if not whole:
        return ""
    cells = [round(BAR * value / whole) for value in (min(used, least), used, whole)]
    return "█" * cells[0] + "▓" * (cells[1] - cells[0]) + "░" * (cells[2] - cells[1])


def quota_cells(one: Record) -> list[Cell]:
    """Return the cells of a quota."""
    used, least, most = one["usage"], one["min_quota"], one["effective_max"]
    told = ", over" if most is not None and used > most else ", below its minimum" if used < least else ""
    link = "/tenants?" + urlencode({"cohort": one["cohort"], "instance": one["instance"]}) + "#change"
    return [
        Cell(text(one["cohort"])),
        Cell(text(one["instance"]), link),
        Cell(f"{used:,}{told}", kind="closed" if told else ""),
        Cell(bar(used, least, most), kind="drawn"),
        Cell(text(least)),
        Cell("none" if one["max_quota"] is None else text(one["max_quota"])),
        Cell("-" if most == one["max_quota"] else text(most)),
    ]


def share_rows(accounts: Sequence[Record]) -> list[tuple[str, list[Cell]]]:
    """Return a row for each managed instance, those with the largest weights first."""
    totals = {name: sum(one[name] or 0 for one in accounts) for name in ("weight", "running", "used")}

    def part(one: Record, name: str) -> Cell:
        return Cell(f"{(one[name] or 0) / totals[name]:.1%}" if totals[name] else "-")

    rows = []
    for one in sorted(accounts, key=lambda one: (-one["weight"], one["name"]))[:MAX_ROWS]:
        limit = one["budget"]
        cells = [
            Cell(text(one["name"]), "/tenants?" + urlencode({"instance": one["name"]}) + "#change"),
            Cell(text(one["weight"])),
            *(part(one, name) for name in ("weight", "running", "used")),
            Cell(f"{text(one['used'] or 0)} {one['unit']}"),
            Cell("any" if limit is None else text(limit)),
            Cell("" if limit is None else bar(one["used"] or 0, 0, limit), kind="drawn"),
            Cell(text(one["running"] or 0)),
            Cell("any" if one["max_concurrent"] is None else text(one["max_concurrent"])),
        ]
        rows.append((one["name"], cells))
    return rows


def instance_cells(one: Record) -> list[Cell]:
    """Return the cells of an instance."""
    return [
        Cell(text(one["name"]), f"/jobs?{urlencode({'instance': one['name']})}"),
        *(Cell(text(one[name])) for name in ("pool", "draining", "queued", "running", "usage")),
    ]


class Change:
    """The form that changes a quota or a share, after a preview of whom it affects."""

    def __init__(self, view: View, instance: str, cohort: str) -> None:
        self._view, self._instance, self._cohort = view, instance, cohort
        node("h2", "Change an instance", id="change")
        with node("form", method="get", action="/tenants#change", aria_label="Instance"), node("div", kind="acts"):
            for name, value in (("instance", instance), ("cohort", cohort)):
                with node("label", f"{name} "):
                    node("input", type="text", name=name, defaultValue=value, required=True, autocomplete="off")
            node("button", "Choose", type="submit")
        self._place = node("div")
        if instance:
            view.once(self._fill)

    async def _fill(self) -> None:
        """Put the fields on the page, with what is set now."""
        found = await self._view.ask(self._read)
        with self._place:
            for title, names, path in (
                (f"Quota of {self._instance} in cohort {self._cohort}", QUOTA, self._path("quotas")),
                (f"Share of {self._instance}", SHARE, self._path("instances")),
            ):
                Part(self._view, title, {name: found.get(name) for name in names}, path)

    def _path(self, kind: str) -> str:
        parts = [self._cohort, self._instance] if kind == "quotas" else [self._instance]
        return "/".join([f"/v1/{kind}", *(quote(part, safe="") for part in parts)])

    def _read(self, client: Client) -> Record:
        """Read what is set, with the names that a change gives."""
        quota: Record = next(
            (
                one
                for one in client.call("GET", "/v1/quotas")["quotas"]
                if (one["cohort"], one["instance"]) == (self._cohort, self._instance)
            ),
            {},
        )
        accounts: list[Record] = client.call("GET", "/v1/accounts")["accounts"]
        share: Record = next((one for one in accounts if one["name"] == self._instance), {})
        return {"min": quota.get("min_quota", 0), "max": quota.get("max_quota"), **share}


class Part:
    """The fields of one thing that may be changed, the preview of the change, and the button that makes it."""

    def __init__(self, view: View, title: str, now: Record, path: str) -> None:
        self._view, self._now, self._path = view, dict(now), path
        # The fields of a page have different names, and there are two parts.
        self._reason = f"reason of {title}"
        node("h2", title)
        with node("div", kind="acts"):
            fields = {name: (name.replace("_", " "), _typed(value)) for name, value in now.items()}
            self._typed = Typed(fields | {self._reason: ("reason", "")}, HINTS | {self._reason: "for the audit"})
            node("button", "Preview", type="button").on("click", self._preview, [])
            view.confirmed("Change", self._question, self._change)
        self._told = node("p", kind="note", aria_live="polite")
        self._table = Table("Who would be affected", ("instance", "cohort", "what", "now", "then"), empty="")

    def _body(self) -> dict[str, Any]:
        """Return the change of what differs. Raises BadInput for what is no number."""
        body: dict[str, Any] = {}
        for name, value in self._now.items():
            given = _number(name, self._typed[name])
            if given != value:
                body[name] = given
        if not body:
            raise LeaseholdError("nothing is changed: the fields are as they are set")
        if body.get("weight", 0) is None:
            body = {"share": False}
        if body.get("min", 0) is None:
            raise BadInput("min", "is not a number; 0 = no minimum")
        return body | ({"reason": self._typed[self._reason]} if self._typed[self._reason] else {})

    async def _preview(self) -> None:
        async def work() -> None:
            await self._affected(self._body())

        await self._view.doing(work)

    async def _affected(self, body: Record) -> Record:
        answer = await self._view.ask(partial(_call, method="POST", path=f"{self._path}/effect", body=body))
        found = answer["affected"]
        self._table.show([(str(place), effect_cells(one)) for place, one in enumerate(found)])
        more = f", and {answer['left_out']:,} figures more" if answer["left_out"] else ""
        self._told.text = f"{plural(len({one['instance'] for one in found}), 'instance')} would be affected{more}."
        return answer

    async def _question(self) -> str:
        body = self._body()
        found = (await self._affected(body))["affected"]
        set_to = ", ".join(
            f"{name.replace('_', ' ')} {_told(value)}" for name, value in body.items() if name != "reason"
        )
        others = {one["instance"] for one in found} - {self._path.rpartition("/")[2]}
        over = [one for one in found if one["field"] == "over" and one["after"]]
        stops = "".join(f" {one['instance']} starts nothing until {_back(one['after'])} back." for one in over)
        told = f"{plural(len(others), 'other instance')} {'is' if len(others) == 1 else 'are'} affected"
        return f"Set {set_to}? {told}: see the list.{stops}"

    async def _change(self) -> None:
        body = self._body()
        await self._view.ask(partial(_call, method="PATCH", path=self._path, body=body))
        self._now |= {"weight": None} if body.get("share") is False else {n: body[n] for n in body if n != "reason"}
        self._table.show([])
        self._told.text = "The change is made."


def effect_cells(one: Record) -> list[Cell]:
    """Return the cells of one figure that would change."""
    shares = one["field"] == "share"
    return [
        Cell(text(one["instance"])),
        Cell(text(one["cohort"])),
        Cell(FIGURES[one["field"]]),
        *(Cell(f"{one[at]:.1%}" if shares and one[at] is not None else _told(one[at])) for at in ("before", "after")),
    ]


def _told(value: object) -> str:
    return "none" if value is None else text(value)


def _back(units: int) -> str:
    return f"{plural(units, 'unit')} {'is' if units == 1 else 'are'}"


def _typed(value: float | None) -> str:
    return "" if value is None else f"{value:.15g}"


def _number(name: str, given: str) -> float | int | None:
    """Return what was typed as a number, None for nothing. Raises BadInput."""
    if not given:
        return None
    try:
        return float(given) if name in ("weight", "budget") else int(given)
    except ValueError:
        raise BadInput(name, f"'{given}' is not a number") from None


def _call(client: Client, *, method: str, path: str, body: Record) -> Record:
    return client.call(method, path, body=dict(body))
