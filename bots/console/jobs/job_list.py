"""The page of jobs: a filter, kept in the URL, and pages of the jobs that pass it, with acts on them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.client import Client
from leasehold.errors import BadInput, NotFound
from nicegui import ui
from starlette.responses import RedirectResponse, Response

from bots.cli.caller import whole_id
from bots.cli.output import in_words, seconds
from bots.console.jobs.acts import Acts
from bots.console.jobs.searched import JOB_ID, ORDERS, Lists, Tabs, address, asked, form, written
from bots.console.parts import Cell, Table, node
from bots.console.view import RARE, SLOW, View
from bots.console.words import ago, state, text
from schema import readable

Record = Mapping[str, Any]

#: Jobs on one page.
PAGE = 50
#: The most calls that fill one page. In each call the gateway looks at a bounded number of jobs, and few may pass.
LOOKS = 12
COLUMNS = ("job", "state", "instance", "label", "submitted", "waited", "ran", "priority", "attempts", "bot", "why")


def show(view: View) -> Response | None:
    """Put the page for the query of the URL into `view`; a search leads to the page whose URL has its filter.

    The id of a job leads to its page. One in short has to be looked up, so this page is shown until it is found.
    """
    search, cursor = view.query.get("q"), view.query.get("cursor")
    where, refused = asked(view.query), None
    if search is not None:
        try:
            if JOB_ID.fullmatch(search.strip().lower()):
                return RedirectResponse(f"/jobs/{search.strip().lower()}", 303)
            if not readable.is_name_of_job(search.strip()):
                return RedirectResponse(address(written(search, view.zone)), 303)
        except BadInput as error:
            refused = error
    form(where, search)
    tabs, lists = Tabs(where), Lists(where)
    acts = Acts(view, {name: value for name, value in where.items() if name not in ORDERS})
    table = Table("", COLUMNS, empty="No job passes the filter on this page.", on_choice=lambda: acts.chosen_are(table))
    searched = node("p", kind="note")
    with node("nav", kind="acts", aria_label="Pages of the list"):
        node("a", "First page", data_key="f", href=address(where)).set_visibility(cursor is not None)
        following = node("a", "Next page", data_key="n", href=None)
        following.set_visibility(False)

    # Counts of all jobs take the database longer than the jobs of a page, which a person waits for.
    has_looked = asyncio.Event()

    async def refresh() -> None:
        try:
            await refresh_jobs()
        finally:
            has_looked.set()

    async def refresh_jobs() -> None:
        if refused is not None:
            raise refused
        found = await view.ask(lambda client: read(client, where, cursor))
        table.show(rows(found["jobs"]))
        acts.chosen_are(table)
        lists.show("label", {job["label"] for job in found["jobs"]} - {""})
        searched.text = "More jobs may pass the filter: the next page continues the search." if sparse(found) else ""
        following.set_visibility(found["next"] is not None)
        if found["next"] is not None:
            following.props["href"] = address(where, cursor=found["next"])

    async def refresh_lists() -> None:
        await has_looked.wait()
        found = await view.ask(Client.status)
        tabs.show(found)
        lists.show("instance", found["instances"])
        lists.show("label", await view.ask(known_labels))
        if view.is_operator:
            lists.show("bot", [bot["name"] for bot in await view.ask(Client.bots)])

    async def find() -> None:
        id = await view.ask(lambda client: whole_id(client, (search or "").strip()))
        ui.navigate.to(f"/jobs/{id}")

    if search is not None and refused is None:
        view.once(find)
    view.live(refresh, seconds=SLOW)
    view.live(refresh_lists, seconds=RARE)
    return None


def read(client: Client, where: Record, cursor: str | None) -> Record:
    """Read a page of jobs, in several calls if few of those at which one looks pass the filter."""
    jobs: list[Record] = []
    following = cursor
    for _ in range(LOOKS):
        query: dict[str, Any] = {**where, "limit": PAGE - len(jobs)} | ({"cursor": following} if following else {})
        found = client.call("GET", "/v1/jobs", query=query)
        jobs, following = jobs + found["jobs"], found["next"]
        if following is None or len(jobs) >= PAGE:
            break
    return {"jobs": jobs, "next": following}


def sparse(found: Record) -> bool:
    """True if a page is not full although there may be more: so few jobs passed the filter that the search stopped."""
    return found["next"] is not None and len(found["jobs"]) < PAGE


def rows(jobs: Sequence[Record]) -> list[tuple[str, list[Cell]]]:
    """Return a row for each job, with what it runs, and its id in short below."""
    shorts = readable.short_ids([job["id"] for job in jobs])
    return [(job["id"], row(job, short)) for job, short in zip(jobs, shorts, strict=True)]


def row(job: Record, short: str) -> list[Cell]:
    """Return the cells of one job."""
    command = text(in_words(job["command"], job.get("arguments"))) if job["command"] else "(no longer stored)"
    return [
        Cell(command, f"/jobs/{job['id']}", "command", more=short, title=job["id"]),
        state(job["state"]),
        Cell(text(job["instance"])),
        Cell(text(job["label"])),
        ago(job["created_at"]),
        Cell(seconds(job["waited_seconds"])),
        Cell(seconds(job["ran_seconds"])),
        Cell(text(job["priority"])),
        Cell(f"{job['attempts']} of {job['max_attempts']}"),
        Cell(text(job["bot"]), kind="id"),
        Cell(text(job["why"]), kind="long"),
    ]


def known_labels(client: Client) -> list[str]:
    """Return the labels of waiting jobs; none from a gateway that is too old to list them."""
    try:
        return list(client.call("GET", "/v1/labels")["labels"])
    except NotFound:
        return []
