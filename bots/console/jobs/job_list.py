"""The page of jobs: the filter of `leasehold list`, kept in the URL, and pages of the jobs that pass it."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from leasehold.client import Client
from starlette.datastructures import QueryParams

from bots.cli.output import between, seconds
from bots.console.jobs.acts import Acts
from bots.console.view import SLOW, Cell, Table, View, node
from bots.console.words import ALL, state, text, time
from schema.filters import Direction, JobFilter, Sort

Record = Mapping[str, Any]

#: Jobs on one page.
PAGE = 50
#: The most calls that fill one page. In each call the gateway looks at a bounded number of jobs, and few may pass.
LOOKS = 12
#: Fields of the filter that a request may have several times.
SEVERAL = ("state", "metadata", "properties")
HINTS = {"metadata": "KEY=VALUE", "properties": "KEY=VALUE"} | {
    name: "2026-03-01T12:00:00Z" for name in JobFilter.model_fields if name.endswith(("_after", "_before"))
}
ORDERS = {"sort": [each.value for each in Sort], "order": [each.value for each in Direction]}
COLUMNS = ("job", "state", "instance", "label", "priority", "attempts", "bot", "submitted", "waited", "ran", "reason")


def asked(query: QueryParams) -> dict[str, Any]:
    """Return what the URL says of the filter and the order, as the gateway takes it; empty fields say nothing."""
    found: dict[str, Any] = {}
    for name in (*JobFilter.model_fields, *ORDERS):
        given = [value for value in query.getlist(name) if value.strip()]
        if given:
            found[name] = given if name in SEVERAL else given[-1]
    return found


def address(filters: Record, **more: str) -> str:
    """Return the path of the page with this filter."""
    query = urlencode({**filters, **more}, doseq=True)
    return f"/jobs?{query}" if query else "/jobs"


def show(view: View) -> None:
    """Put the page for the query of the URL into `view`."""
    where, cursor = asked(view.query), view.query.get("cursor")
    form(where)
    table = Table("Times are UTC", COLUMNS, empty="No job passes the filter on this page.")
    searched = node("p", kind="note")
    with node("nav", kind="acts", aria_label="Pages of the list"):
        node("a", "First page", data_key="f", href=address(where))
        following = node("a", "Next page", data_key="n", href=None)
        following.set_visibility(False)

    def read(client: Client) -> Record:
        jobs: list[Record] = []
        following = cursor
        for _ in range(LOOKS):
            query: dict[str, Any] = {**where, "limit": PAGE - len(jobs)} | ({"cursor": following} if following else {})
            found = client.call("GET", "/v1/jobs", query=query)
            jobs, following = jobs + found["jobs"], found["next"]
            if following is None or len(jobs) >= PAGE:
                break
        return {"jobs": jobs, "next": following}

    async def refresh() -> None:
        found = await view.ask(read)
        table.show([(job["id"], row(job)) for job in found["jobs"]])
        searched.text = "More jobs may pass the filter: the next page continues the search." if sparse(found) else ""
        following.set_visibility(found["next"] is not None)
        if found["next"] is not None:
            following.props["href"] = address(where, cursor=found["next"])

    view.live(refresh, seconds=SLOW)
    Acts(view, {name: value for name, value in where.items() if name not in ORDERS})


def sparse(found: Record) -> bool:
    """True if a page is not full although there may be more: so few jobs passed the filter that the search stopped."""
    return found["next"] is not None and len(found["jobs"]) < PAGE


def row(job: Record) -> list[Cell]:
    """Return the cells of one job."""
    waited = between(job["created_at"], job["started_at"])
    return [
        Cell(job["id"], f"/jobs/{job['id']}", "id"),
        state(job["state"]),
        Cell(text(job["instance"])),
        Cell(text(job["label"])),
        Cell(text(job["priority"])),
        Cell(f"{job['attempts']} of {job['max_attempts']}"),
        Cell(text(job["bot"])),
        Cell(time(job["created_at"]), kind="time"),
        Cell(seconds(waited)),
        Cell(seconds(between(job["started_at"], job["finished_at"]))),
        Cell(text(job["reason"])),
    ]


def form(where: Record) -> None:
    """Put the form of the filter on the page. It is sent as the URL of the page."""
    with node("form", method="get", action="/jobs", aria_label="Filter"):
        with node("fieldset", kind="acts"):
            node("legend", "State")
            for name in ALL:
                with node("label"):
                    node(
                        "input",
                        type="checkbox",
                        name="state",
                        value=name,
                        defaultChecked=name in where.get("state", ()),
                    )
                    node("span", f" {name}", f"state-{name}")
        with node("div", kind="filter"):
            for field in JobFilter.model_fields:
                if field != "state":
                    _inputs(field, where.get(field))
            for field, values in ORDERS.items():
                with node("label", field):
                    with node("select", name=field):
                        node("option", "as usual", value="")
                        for value in values:
                            node("option", value, value=value, defaultSelected=where.get(field) == value)
            with node("div", kind="go"):
                node("button", "Filter", type="submit")
                node("a", "No filter", href="/jobs")


def _inputs(field: str, given: Any) -> None:
    """Put one input on the page for each value that a field has, and one more where it may have several."""
    values = given if isinstance(given, list) else [given or ""]
    kind = "number" if field.endswith("_priority") else "text"
    for value in [*values, ""] if field in SEVERAL and given else values:
        with node("label", field.replace("_", " ").removeprefix("job ")):
            node(
                "input",
                type=kind,
                name=field,
                defaultValue=value,
                placeholder=HINTS.get(field),
                title=JobFilter.model_fields[field].description,
                autocomplete="off",
            )
