"""The pages of bots: their load by cohort, probation and drains; one bot with its success by label."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from leasehold.client import Client
from nicegui.elements.mixins.text_element import TextElement

from bots.cli.output import expiry, properties, seconds, version
from bots.console.jobs import job_list
from bots.console.parts import Cell, Facts, Table, node
from bots.console.view import SLOW, View
from bots.console.words import HELD, ago, text
from schema.readable import plural

Record = Mapping[str, Any]

#: Bots on one page.
PAGE = 100
#: Jobs on the page of a bot.
JOBS = 10
COLUMNS = (
    "bot",
    "status",
    "host",
    "version",
    "load",
    "leases",
    "success",
    "instance",
    "pool",
    "priority",
    "properties",
    "expires in",
)


def status(bot: Record) -> Cell:
    """Return a bot's status; of an `ok` bot, whether it is draining or on probation."""
    name = bot["status"]
    if name == "ok":
        name = "draining" if bot["draining"] else "probation" if bot["probation"] is not None else "ok"
    return Cell(text(name), kind=f"state-{name}")


def load(in_use: int, capacity: int) -> Cell:
    """Return the cell of units in use, with their share as a bar."""
    return Cell(f"{in_use:,} of {capacity:,}", share=in_use / capacity if capacity else 0)


def show_bots(view: View) -> None:
    """Put the cohorts and the bots after the one that the URL names into `view`."""
    after = view.query.get("after", "")
    cohorts = Table(
        "Cohorts",
        ("cohort", "bots", "idle", "busy", "offline", "on probation", "load", "success", "concentration"),
        empty="There are no bots.",
    )
    node("h2", "Bots")
    versions = node("p", kind="note")
    table = Table("By name", ("cohort", *COLUMNS), empty="There are no bots with later names.")
    with node("nav", kind="acts", aria_label="Pages of the list"):
        node("a", "First page", data_key="f", href="/bots").set_visibility(bool(after))
        following = node("a", "Next page", data_key="n")
        following.set_visibility(False)

    def read(client: Client) -> tuple[Record, Record]:
        return client.status(), client.call("GET", "/v1/bots", query={"limit": PAGE, "after": after})

    async def refresh() -> None:
        found, listed = await view.ask(read)
        bots = listed["bots"]
        versions.text = told_versions(listed.get("versions", ()))
        cohorts.show([(one["cohort"], cohort_cells(one)) for one in found["swarm"]])
        table.show(
            [(bot["name"], bot_cells(bot)) for bot in sorted(bots, key=lambda bot: (bot["cohort"], bot["name"]))]
        )
        following.set_visibility(len(bots) == PAGE)
        if len(bots) == PAGE:
            following.props["href"] = f"/bots?{urlencode({'after': max(bot['name'] for bot in bots)})}"

    view.live(refresh, seconds=SLOW)


def told_versions(versions: Sequence[Record]) -> str:
    """Tell the versions of the bots that have a session, with the number of bots of each if there are several."""
    if len(versions) < 2:
        return "".join(f"Version {version(one['version'])}" for one in versions)
    each = ", ".join(f"{version(one['version'])} ({one['bots']:,})" for one in versions)
    return f"{len(versions)} versions: {each}"


def cohort_cells(one: Record) -> list[Cell]:
    """Return the cells of a cohort's bots."""
    counts = ("total", "idle", "busy", "offline", "on_probation")
    shares = ("avg_load", "avg_success_rate", "concentration")
    return [Cell(text(one["cohort"])), *(Cell(text(one[name])) for name in (*counts, *shares))]


def bot_cells(bot: Record) -> list[Cell]:
    """Return the cells of one bot."""
    return [
        Cell(text(bot["cohort"])),
        Cell(text(bot["name"]), f"/bots/{quote(bot['name'], safe='')}"),
        status(bot),
        Cell(text(bot["host"]), kind="id"),
        Cell(version(bot.get("version"))),
        load(bot["in_use"], bot["capacity"]),
        Cell(text(bot["leases"])),
        Cell(text(bot["success_rate"])),
        Cell(text(bot["instance"] or ("-" if bot["pool"] else "every"))),
        Cell(text(bot["pool"])),
        Cell(text(bot["priority"])),
        Cell(text(properties(bot["properties"]))),
        Cell(expiry(bot["expires_in"])),
    ]


def show_bot(view: View, name: str) -> None:
    """Put the page of one bot into `view`."""
    view.heading.text = name
    with node("section", kind="bar", aria_label="Acts on the bot"), node("div", kind="acts"):
        verbs = {True: "Drain", False: "Undrain"}
        buttons = {draining: _drain_button(view, name, verb, draining=draining) for draining, verb in verbs.items()}
        for button in buttons.values():
            button.set_visibility(False)
        node("a", "Its jobs", href=f"/jobs?{urlencode({'bot': name})}")
    facts = Facts()
    node("h2", "What it runs, and ran last")
    jobs = Table("", job_list.COLUMNS, empty="No job is with it, and none of its last ones is kept.")
    node("h2", "Success by label")
    success = Table(
        "Latest attempts; older ones count less",
        ("label", "successes", "failures", "given back", "success"),
        empty="Nothing was counted.",
    )

    def read(client: Client) -> tuple[Record, list[Record]]:
        query: Record = {"bot": name, "limit": JOBS}
        return client.bot(name), client.call("GET", "/v1/jobs", query=query)["jobs"]

    async def refresh() -> None:
        bot, had = await view.ask(read)
        jobs.show(job_list.rows(sorted(had, key=lambda job: job["state"] not in HELD)))
        shown = status(bot)
        for draining, button in buttons.items():
            button.set_visibility(bot["draining"] != draining)
        known = {
            "process": bot["pid"] and f"{bot['pid']} on {bot['host'] or 'an unknown host'}",
            "version": version(bot.get("version")),
            "cohort": bot["cohort"],
            "leases": bot["leases"],
            "properties": properties(bot["properties"]),
            "exclusive": " ".join(bot["exclusive"]),
            "labels": " ".join(bot["labels"]),
            "expires in": expiry(bot["expires_in"]),
            "probation left": seconds(bot["probation"]),
        }
        facts.show(
            {"status": shown, "load": load(bot["in_use"], bot["capacity"]), "session since": ago(bot["opened_at"])}
            | {key: Cell(text(value)) for key, value in known.items()}
        )
        fields = ("label", "successes", "failures", "returned", "success_rate")
        success.show([(each["label"], [Cell(text(each[field])) for field in fields]) for each in bot["success"]])

    view.live(refresh, seconds=SLOW)


def _drain_button(view: View, name: str, verb: str, *, draining: bool) -> TextElement:
    """Put a button on the page that drains the bot, or the other way round. It is shown where it changes something."""

    async def question() -> str:
        leases = (await view.ask(lambda client: client.bot(name)))["leases"]
        if draining:
            return (
                f"Give {name} no more jobs? Its {plural(leases, 'lease')} {'ends' if leases == 1 else 'end'} as usual."
            )
        return f"Give {name} jobs again?"

    async def act() -> None:
        await view.ask(lambda client: client.drain(name, draining=draining))

    return view.confirmed(verb, question, act)
