"""The page of the pool's health: alerts with what to do, checks, invariants, processes, upkeep and the audit."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from leasehold.calls.operators import Alert, AuditRow, Check, Gateway, Invariants
from leasehold.client import Client

from bots.cli.output import seconds
from bots.console.parts import Cell, Facts, Table, node
from bots.console.settings_tables import Upkeep
from bots.console.view import RARE, SLOW, View
from bots.console.words import ago, text

Record = Mapping[str, Any]

#: Seconds of the report.
REPORTED = 3600
#: Rows of the audit on one page.
PAGE = 50
#: Seconds that a check of the invariants may take.
INVARIANT_SECONDS = 30.0
#: CSS classes of severities and verdicts.
KINDS = {
    "critical": "state-dead", "warning": "state-draining", "info": "state-running",
    "bad": "state-dead", "unknown": "state-draining", "ok": "state-ok",
}  # fmt: skip


#: Pages that show what an alert is about, by its name without the prefix; in braces, parts of its subject.
PLACES = {
    "BotsAreFull": "/bots",
    "BotsFailOften": "/bots",
    "BotsOnProbation": "/bots",
    "WorkIsConcentrated": "/bots",
    "JobsWaitLong": "/jobs?state=queued&sort=queued&order=asc",
    "BacklogGrows": "/jobs?state=queued&sort=submitted&order=desc",
    "JobsThatNobodyCanRun": "/jobs?unmatchable=true",
    "JobsAreParked": "/jobs?state=parked",
    "NodesAreBlockedForEver": "/graphs?open=1",
    "MinimumCannotBeMet": "/jobs?state=queued&cohort={cohort}&instance={instance}",
    "MinimumIsNotMet": "/jobs?state=queued&cohort={cohort}&instance={instance}",
    "InstanceAtMaximum": "/jobs?state=running&state=leased&cohort={cohort}&instance={instance}",
    "EvictionsRepeat": "/preemptions",
    "ConfigurationIsRefused": "/policy",
    "SchedulesFail": "/schedules",
    "SchedulesAreHeldUp": "/schedules",
}


class Alerts:
    """The list of what is wrong now; the page of the pool has it too, and there it is hidden while nothing is."""

    def __init__(self, view: View, *, hidden_if_none: bool = False) -> None:
        self._view, self._hidden_if_none = view, hidden_if_none
        with node("section", aria_label="Alerts") as self._place:
            node("h2", "Alerts")
            columns = ("severity", "what is wrong", "what to do", "alert")
            self._table = Table("Now, by the rules for Prometheus", columns, empty="Nothing is wrong.")
        self._place.set_visibility(not hidden_if_none)
        view.live(self._refresh, seconds=SLOW * 2)

    async def _refresh(self) -> None:
        found = await self._view.ask(lambda client: client.operators.alerts())
        self._table.show([(f"{number} {each['name']}", _alert(each)) for number, each in enumerate(found)])
        self._place.set_visibility(bool(found) or not self._hidden_if_none)


def _alert(alert: Alert) -> list[Cell]:
    return [
        Cell(alert["severity"], kind=KINDS[alert["severity"]]),
        Cell(text(alert["summary"]), place(alert)),
        Cell(text(alert["action"])),
        Cell(alert["name"], kind="id"),
    ]


def place(alert: Alert) -> str | None:
    """Return the path of the page with what an alert is about; None if no page has it."""
    path = PLACES.get(alert["name"].removeprefix("Leasehold"))
    cohort, _, instance = alert["subject"].partition("/")
    if path is None or ("{" in path and not instance):  # the last of many says only how many more there are
        return path and "/tenants"
    return path.format(cohort=quote(cohort, safe=""), instance=quote(instance, safe=""))


def show_health(view: View) -> None:
    """Put the page into `view`; the URL names the row of the audit before which its list begins."""
    Alerts(view)
    _show_processes(view)
    _show_checks(view)
    _show_invariants(view)
    _show_report(view)
    _show_audit(view)


def _show_processes(view: View) -> None:
    node("h2", "Processes")
    columns = ("process", "name", "state", "last seen", "since", "what it says")
    table = Table("Of the last day", columns, empty="No assigner process and no gateway has run.")

    def read(client: Client) -> tuple[Sequence[Record], Sequence[Gateway]]:
        return client.call("GET", "/v1/assigners")["assigners"], client.operators.gateways()

    async def refresh() -> None:
        assigners, gateways = await view.ask(read)
        rows = [(f"assigner {each['name']}", _process("assigner", each, "")) for each in assigners]
        rows += [(f"gateway {each['name']}", _process("gateway", each, _figures(each))) for each in gateways]
        table.show(rows)

    view.live(refresh, seconds=SLOW)


def _process(kind: str, process: Mapping[str, Any], told: str) -> list[Cell]:
    state = process["state"]
    colour = {"running": "state-ok", "dead": "state-dead"}.get(state, "state-draining")
    return [
        Cell(kind),
        Cell(text(process["name"])),
        Cell(text(state), kind=colour),
        ago(process["stopped_at"] or process["seen_at"]),
        ago(process["started_at"]),
        Cell(told),
    ]


def _figures(gateway: Gateway) -> str:
    figures = {"queue": 0.0, "requests": 0.0, "failed": 0.0, "connections_refused": 0.0} | gateway["figures"]
    heard = "" if figures.get("wakeups_connected", 1) else "; no wake-ups arrive"
    refused = figures["connections_refused"]
    return (
        f"{gateway['url']}: {figures['queue']:,.0f} in work, {figures['requests']:,.0f} requests in 5 min, "
        f"{figures['failed']:,.0f} failed{heard}" + (f"; {refused:,.0f} connections refused" if refused else "")
    )


def _show_checks(view: View) -> None:
    node("h2", "Checks of the database")
    table = Table("As leasehold db doctor", ("check", "verdict", "found", "what to do"), empty="Not checked yet.")

    async def refresh() -> None:
        found = await view.ask(lambda client: client.operators.doctor())
        table.show([(each["name"], _check(each)) for each in found])

    view.live(refresh, seconds=RARE)


def _check(check: Check) -> list[Cell]:
    verdict = check["verdict"]
    return [
        Cell(text(check["name"]), kind="id"),
        Cell(verdict, kind=KINDS[verdict]),
        Cell(text(check["found"])),
        Cell(check["remedy"] or ""),
    ]


def _show_invariants(view: View) -> None:
    node("h2", "Invariants")
    node("p", "As leasehold db verify: it reads whole tables, and so it is done only when you ask for it.", "note")
    with node("div", kind="acts", aria_live="polite"):
        button = node("button", "Check the invariants", type="button")
        told = node("span")
    place = node("div")
    with place:
        table = Table("What breaks an invariant", ("invariant", "rows", "what they are", "the first of them"), empty="")
    place.set_visibility(False)

    async def check() -> None:
        told.text = "checking …"
        button.props["disabled"] = True
        try:
            found = await view.ask(lambda client: client.operators.invariants(seconds=INVARIANT_SECONDS))
            told.text = verdict(found)
            broken = [each for each in found["invariants"] if each["rows"]]
            cells = [
                (each["id"], [Cell(each["id"]), *(Cell(text(one)) for one in (each["rows"], each["title"])),
                              Cell(text(", ".join(each["sample"])))])
                for each in broken
            ]  # fmt: skip
            table.show(cells)
            place.set_visibility(bool(broken))
        except BaseException:
            told.text = ""
            raise
        finally:
            button.props.pop("disabled")
            button.update()

    async def clicked() -> None:
        await view.doing(check)

    button.on("click", clicked, [])


def verdict(found: Invariants) -> str:
    """Return one sentence on a check of the invariants."""
    took = seconds(found["seconds"])
    if not found["finished"]:
        return f"Nothing is known: the check did not end within {took}. Run leasehold db verify, which has no limit."
    broken = sum(each["rows"] > 0 for each in found["invariants"])
    if not broken:
        return f"All {len(found['invariants'])} invariants hold ({took})."
    return f"{broken} of {len(found['invariants'])} invariants are broken ({took}). That is a defect."


def _show_report(view: View) -> None:
    upkeep = Upkeep()
    node("h2", "The last hour")
    facts = Facts()

    def read(client: Client) -> tuple[Record, Record]:
        return client.status(), client.call("GET", "/v1/report", query={"window": REPORTED})

    async def refresh() -> None:
        status, report = await view.ask(read)
        upkeep.show_status(status)
        names = ("ended", "succeeded", "failed")
        ended, succeeded, failed = (sum(one[name] for one in report["instances"]) for name in names)
        cancelled = ended - succeeded - failed
        facts.show(
            {
                "throughput": Cell(f"{report['throughput']:,.3g} jobs ended per second"),
                "ended": Cell(
                    f"{ended:,}: {succeeded:,} succeeded, {failed:,} failed or dead, {cancelled:,} cancelled"
                ),
                "efficiency": Cell(text(report["efficiency"]) + ", units in use over units of healthy bots"),
                "fairness": Cell(text(report["fairness"]) + ", Jain's index over instances: 1 = equal"),
            }
        )

    view.live(refresh, seconds=RARE)


def _show_audit(view: View) -> None:
    given = view.query.get("before", "")
    before = int(given) if given.isascii() and given.isdigit() and 0 < int(given) < 2**63 else None
    node("h2", "Audit")
    table = Table(
        "What operators did and read, newest first", ("at", "who", "what", "of", "details"), empty="There is nothing."
    )
    with node("nav", kind="acts", aria_label="Pages of the audit"):
        node("a", "Newest", href="/health#audit")
        following = node("a", "Older", id="audit")
        following.set_visibility(False)

    def read(client: Client) -> list[AuditRow]:
        query = {"limit": PAGE} | ({} if before is None else {"before": before})
        found: list[AuditRow] = client.call("GET", "/v1/audit", query=query)["audit"]
        return found

    async def refresh() -> None:
        found = await view.ask(read)
        table.show([(str(row["id"]), audit_cells(row)) for row in found])
        following.set_visibility(len(found) == PAGE)
        if len(found) == PAGE:
            following.props["href"] = f"/health?{urlencode({'before': found[-1]['id']})}#audit"

    view.live(refresh, seconds=SLOW)


def audit_cells(row: AuditRow) -> list[Cell]:
    """Return the cells of a row of the audit."""
    return [
        ago(row["at"]),
        Cell(text(row["actor"]), kind="id"),
        Cell(text(row["action"]), kind="id"),
        Cell(text(row["subject"])),
        Cell(text(row["details"])),
    ]
