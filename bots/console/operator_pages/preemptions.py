"""The page of preemptions: which jobs were evicted for whose minimum, by which rule, and with which numbers."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from leasehold.client import Client

from bots.cli.output import evidence
from bots.console.parts import Cell, Table, node
from bots.console.view import SLOW, View
from bots.console.words import ago, text

Record = Mapping[str, Any]

#: Evicted jobs on one page.
PAGE = 50


def show(view: View) -> None:
    """Put the preemptions before the one that the URL names into `view`."""
    before = view.query.get("before", "")
    columns = ("at", "evicted job", "of", "on bot", "for the minimum of", "cohort", "rule", "receipt")
    table = Table("Evicted jobs, newest first", columns, empty="There are none.")
    with node("nav", kind="acts", aria_label="Pages of the list"):
        node("a", "First page", data_key="f", href="/preemptions")
        following = node("a", "Next page", data_key="n")
        following.set_visibility(False)

    def read(client: Client) -> list[Record]:
        query: dict[str, Any] = {"limit": PAGE} | ({"before": before} if before else {})
        found: list[Record] = client.call("GET", "/v1/preemptions", query=query)["preemptions"]
        return found

    async def refresh() -> None:
        found = await view.ask(read)
        table.show([(str(one["id"]), cells(one)) for one in found])
        following.set_visibility(len(found) == PAGE)
        if len(found) == PAGE:
            following.props["href"] = f"/preemptions?{urlencode({'before': found[-1]['id']})}"

    view.live(refresh, seconds=SLOW)


def cells(one: Record) -> list[Cell]:
    """Return the cells of one evicted job."""
    return [
        ago(one["at"]),
        Cell(one["job"] or "deleted", one["job"] and f"/jobs/{one['job']}", "id"),
        *(Cell(text(one[name])) for name in ("instance", "bot", "preemptor_instance", "cohort", "rule")),
        Cell(text(evidence({"move": "preempt", "details": one["receipt"]}))),
    ]
