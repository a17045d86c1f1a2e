"""`leasehold explain`: why a job runs where it runs, or why it does not run, from the gateway's answer."""

import click
from rich.text import Text

from bots import printing
from bots.caller import Caller, caller_options
from bots.printing import Record, table

_MARKS = {True: ("open", "green"), False: ("closed", "red"), None: ("-", "dim")}


@click.command()
@click.argument("id")
@caller_options
def explain(caller: Caller, /, id: str) -> None:
    """Tell why a job runs where it runs, or why it does not run and what would start it."""
    with caller.client() as client:
        found = client.explain(id)
    printing.print_json(found) if caller.json else tell(found)


def tell(found: Record) -> None:
    """One sentence, then what it rests on: gates, order, changes, attempts and receipts."""
    printing.line("job     ", found["id"])
    printing.line("state   ", printing.state(found["state"]))
    printing.line("cohort  ", f"{found['cohort']}, instance {found['instance']}")
    printing.line("why     ", found["sentence"])
    if found["gates"]:
        click.echo()
        table(
            ("gate", "", "evidence"), ((gate["gate"], _mark(gate["open"]), gate["sentence"]) for gate in found["gates"])
        )
    if found["order"] is not None:
        click.echo()
        order = found["order"]
        printing.line("ahead   ", f"{_jobs(order['in_queue'])} like it, {_jobs(order['in_instance'])} of its instance")
    for nth, change in enumerate(found["change"]):
        printing.line("starts  " if nth == 0 else "  and   ", change)
    if found["attempts"]:
        click.echo()
        table(
            ("fence", "granted", "bot", "by", "strategy", "how it went"),
            (
                (each["fence"], each["granted_at"], each["bot"], each["assigner"], each["strategy"], each["sentence"])
                for each in found["attempts"]
            ),
        )
    for receipt in found["receipts"]:
        printing.line(f"{printing.plain(receipt['at'])}  ", receipt["sentence"])


def _mark(is_open: bool | None) -> Text:
    word, colour = _MARKS[is_open]
    return Text(word, style=colour)


def _jobs(count: Record) -> str:
    number = f"{count['jobs']:,}"
    return f"more than {number} jobs" if count["more"] else f"{number} {'job' if count['jobs'] == 1 else 'jobs'}"
