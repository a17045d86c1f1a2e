"""The page of one job: its request and state, why it waits, every move, its attempts and its output."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from leasehold.client import Client, Output
from leasehold.errors import LeaseholdError
from leasehold.states import FINAL
from nicegui import ui

from bots.cli.output import between, evidence, progress, properties, seconds
from bots.console.view import FAST, Cell, Facts, Table, View, node
from bots.console.words import cut, text, time

Record = Mapping[str, Any]

#: The most characters of output on the page: the last ones.
MAX_OUTPUT = 200_000
#: The most pieces of output that one look reads.
MAX_PIECES = 8
GATES = {True: ("open", "open"), False: ("closed", "closed"), None: ("-", "")}


class Written:
    """The output of the newest attempt, as far as it was read. It keeps its end only."""

    def __init__(self, job: str) -> None:
        self._job, self._next, self._attempt, self.final = job, 0, -1, False
        self.data, self.left_out = b"", 0

    def read(self, client: Client) -> None:
        """Read what was written since the last look, at most `MAX_PIECES` pieces."""
        for _ in range(MAX_PIECES):
            piece = client.output(self._job, start=self._next)
            if piece.attempt != self._attempt:
                self.data, self.left_out, self._attempt = b"", 0, piece.attempt
                if self._next:
                    self._next = 0
                    continue
            self._take(piece)
            if not piece.data or piece.final:
                return

    def _take(self, piece: Output) -> None:
        self._next, self.final = piece.next, piece.final
        data = self.data + piece.data
        self.data = data[-MAX_OUTPUT:]
        self.left_out += len(data) - len(self.data)

    def shown(self) -> str:
        """Return the text for the page."""
        told = f"({self.left_out:,} bytes before this are not shown: leasehold logs)\n" if self.left_out else ""
        return told + self.data.decode("utf-8", "replace")


def show(view: View, id: str) -> None:
    """Put the page of the job with this id into `view`."""
    written = Written(id)
    why = node("p")
    with node("div", kind="acts"):
        cancel = cancel_button(view, id)
    facts = Facts()
    node("h2", "What keeps it waiting")
    gates = Table("Each condition on its start", ("gate", "", "evidence"), empty="Nothing: it does not wait.")
    change = node("p", kind="note")
    node("h2", "Attempts")
    attempts = Table(
        "Leases, oldest first", ("fence", "granted", "bot", "by", "strategy", "how it went"), empty="None."
    )
    node("h2", "History")
    events = Table("Moves, oldest first", ("at", "after", "move", "state", "by", "details"), empty="None.")
    node("h2", "Output of the newest attempt")
    output = node("pre", tabindex="0", aria_label="Output")
    node("h2", "Payload")
    payload = node("pre", tabindex="0", aria_label="Payload")

    def read(client: Client) -> tuple[Record, Record]:
        found = client.show(id), client.explain(id)
        if not written.final:
            written.read(client)
        return found

    async def refresh() -> None:
        job, explained = await view.ask(read)
        facts.show(fact_rows(job))
        why.text = explained["sentence"]
        cancel.props.set_bool("disabled", job["state"] in FINAL)
        gates.show(
            [
                (
                    one["gate"],
                    (
                        Cell(one["gate"]),
                        Cell(*GATES[one["open"]][:1], kind=GATES[one["open"]][1]),
                        Cell(one["sentence"]),
                    ),
                )
                for one in explained["gates"]
            ]
        )
        change.text = "It starts when: " + "; ".join(explained["change"]) if explained["change"] else ""
        attempts.show([(str(one["fence"]), attempt(one)) for one in explained["attempts"]])
        events.show(event_rows(job["events"]))
        output.text = written.shown()
        payload.text = cut(json.dumps(job["payload"], ensure_ascii=False, indent=2))

    view.live(refresh, seconds=FAST)


def cancel_button(view: View, id: str) -> ui.element:
    """Put the button that cancels the job on the page."""

    async def question() -> str:
        job = await view.ask(lambda client: client.show(id))
        if job["state"] in FINAL:
            raise LeaseholdError(f"the job is {job['state']} already")
        return f"Cancel the job {id}, which is {job['state']}?"

    async def cancel() -> None:
        await view.ask(lambda client: client.cancel([id]))

    return view.confirmed("Cancel the job", question, cancel, kind="danger")


def fact_rows(job: Record) -> dict[str, tuple[str, str]]:
    """Return what is known of a job, as names and values; what it does not have is left out."""
    result, waiting = job["result"] or {}, job["waiting"]
    command = (job["payload"] or {}).get("command")
    found: dict[str, Any] = {
        "id": job["id"],
        "joined": job["joined"],
        "instance": job["instance"],
        "label": job["label"],
        "command": shlex.join(map(str, command)) if isinstance(command, list) else None,
        "progress": progress(job),
        "reason": job["reason"],
        "exit code": result.get("exit_code"),
        "ran for": None if result.get("seconds") is None else seconds(result["seconds"]),
        "why it waits": waiting and waiting["sentence"],
        "bot": job["bot"],
        "attempts": f"{job['attempts']} of {job['max_attempts']}",
        "priority": job["priority"],
        "units": job["units"],
        "requires": properties(job["properties"]),
        "prefers": properties(job["preferred_properties"]),
        "metadata": properties(job["metadata"]),
        "constraints": job["terms"],
        "graph": job["graph"] and f"node {job['graph']['node']} of {job['graph']['name']}",
        "submitted": time(job["created_at"]),
        "queued": time(job["queued_at"]),
        "not before": job["schedule_after"] and time(job["schedule_after"]),
        "started": time(job["started_at"]),
        "ended": time(job["finished_at"]),
        "timeout": job["timeout_seconds"] and seconds(job["timeout_seconds"]),
        "dead if it waits until": job["queue_deadline"] and time(job["queue_deadline"]),
    }
    shown = {name: (text(value), "") for name, value in found.items() if text(value) != "-"}
    return {"state": (job["state"], f"state-{job['state']}")} | shown


def attempt(one: Record) -> list[Cell]:
    """Return the cells of one lease."""
    return [
        Cell(str(one["fence"])),
        Cell(time(one["granted_at"]), kind="time"),
        *(Cell(text(one[name])) for name in ("bot", "assigner", "strategy", "sentence")),
    ]


def event_rows(events: list[Record]) -> list[tuple[str, list[Cell]]]:
    """Return a row for each move, with the time since the move before."""
    rows, previous = [], None
    for index, event in enumerate(events):
        step = f"{event['from']} → {event['to']}" if event["from"] else f"→ {event['to']}"
        rows.append(
            (
                str(index),
                [
                    Cell(time(event["at"]), kind="time"),
                    Cell(seconds(between(previous, event["at"]))),
                    Cell(text(event["move"])),
                    Cell(step),
                    Cell(text(event["actor"])),
                    Cell(text(evidence(event))),
                ],
            )
        )
        previous = event["at"]
    return rows
