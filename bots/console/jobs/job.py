"""The page of one job: what it is, how it ended, its output, acts on it, and below its placement and history."""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlencode

from leasehold.client import Client, Output
from leasehold.errors import BadInput, LeaseholdError
from leasehold.states import FINAL, WAITING, JobState
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bots.cli.output import arguments_of, between, evidence, in_words, properties, seconds
from bots.console.parts import Cell, Facts, Line, Table, Typed, node
from bots.console.view import FAST, View
from bots.console.words import ALL, ago, cut, state, text
from schema.readable import plural, run_time

Record = Mapping[str, Any]

#: The most characters of output on the page: the last ones.
MAX_OUTPUT = 200_000
#: The most pieces of output that one look reads.
MAX_PIECES = 8
#: States from which an operator may submit a copy, and those in which the priority may be changed.
REQUEUEABLE = (JobState.FAILED, JobState.DEAD, JobState.CANCELLED)
MOVABLE = (JobState.QUEUED, JobState.PARKED)
#: Times of a job by their names on the page.
TIMES = {
    "submitted": "created_at",
    "queued": "queued_at",
    "not before": "schedule_after",
    "started": "started_at",
    "ended": "finished_at",
    "dead if it waits until": "queue_deadline",
}
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


class Page:
    """The parts of the page, in the order in which somebody asks for them: what it is, how it ended, its output."""

    def __init__(self, view: View, id: str) -> None:
        self._view, self._id, self._written = view, id, Written(id)
        self._lead = Line()
        self._acts = Acts(view, id)
        self._verdict = node("p", kind="verdict")
        self._waiting = node("section", aria_label="What keeps it waiting")
        with self._waiting:
            node("h2", "What keeps it waiting")
            self._why = node("p")
            self._closed = Table("", ("gate", "is", "evidence"), empty="")
            with node("details") as self._others:
                self._counted = node("summary")
                self._open = Table("", ("gate", "is", "evidence"), empty="")
            self._change = node("p", kind="note")
        node("h2", "Output of the newest attempt")
        with node("div", kind="output", tabindex="0", role="region", aria_label="Output") as self._frame:
            self._output = node("pre")
        self._silent = node("p", "It has written nothing.", "empty")
        node("h2", "Request and placement")
        self._facts = Facts()
        node("h2", "Attempts")
        columns = ("fence", "granted", "bot", "by", "strategy", "how it went")
        self._attempts = Table("", columns, empty="No bot has had it yet.")
        node("h2", "History")
        self._events = Table("", ("at", "after", "move", "state", "by", "details"), empty="Nothing has happened yet.")
        with node("details"):
            node("summary", "Payload")
            self._payload = node("pre", tabindex="0", aria_label="Payload")
        # Nothing is said of a job before it was read, which may find that there is none.
        for part in (self._waiting, self._frame, self._silent):
            part.set_visibility(False)

    def _read(self, client: Client) -> tuple[Record, Record]:
        found = client.show(self._id), client.explain(self._id)
        if not self._written.final:
            self._written.read(client)
        return found

    async def refresh(self) -> None:
        """Read the job, and show it."""
        job, explained = await self._view.ask(self._read)
        self._view.heading.text = command_of(job) or f"Job {job['id']}"
        self._lead.show(lead(job))
        self._acts.fit(job["state"])
        ended = verdict(job)
        self._verdict.text = ended
        self._verdict.classes(replace=f"verdict state-{job['state']}")
        self._facts.show(fact_rows({**job, "forecast": explained.get("forecast")}))
        said = [explained["sentence"], *([minimum["sentence"]] if (minimum := explained.get("preemption")) else [])]
        self._why.text = ". ".join(each[:1].upper() + each[1:] for each in said)
        for table, is_closed in ((self._closed, True), (self._open, False)):
            table.show([(one["gate"], gate(one)) for one in explained["gates"] if (one["open"] is False) is is_closed])
        others = sum(one["open"] is not False for one in explained["gates"])
        self._counted.text = f"{plural(others, 'gate')} {'is' if others == 1 else 'are'} not closed"
        self._others.set_visibility(others > 0)
        self._change.text = "What would start it: " + "; ".join(explained["change"]) if explained["change"] else ""
        self._waiting.set_visibility(job["state"] in WAITING)
        self._attempts.show([(str(one["fence"]), attempt(one)) for one in explained["attempts"]])
        self._events.show(event_rows(job["events"]))
        shown = self._written.shown()
        self._output.text = shown
        self._frame.set_visibility(bool(shown))
        self._silent.set_visibility(not shown)
        self._payload.text = cut(json.dumps(job["payload"], ensure_ascii=False, indent=2))


def show(view: View, id: str) -> None:
    """Put the page of the job with this id into `view`."""
    view.live(Page(view, id).refresh, seconds=FAST)


def lead(job: Record) -> list[Cell]:
    """Return what a job is, beside its command."""
    named = [
        Cell(text(job[name]), f"/jobs?{urlencode({name: job[name]})}") for name in ("label", "instance") if job[name]
    ]
    return [state(job["state"]), *named, ago(job["created_at"])]


def command_of(job: Record) -> str:
    """Return what a job runs, on one line; empty if that is no longer stored."""
    payload = job["payload"] or {}
    command = payload.get("command")
    if not isinstance(command, list) or not command:
        return ""
    return cut(in_words([*map(str, command)], arguments_of(payload)))


def verdict(job: Record) -> str:
    """Return one sentence on how a job ended otherwise than well, or on what it says of its progress."""
    result, progress = job["result"] or {}, job.get("progress")
    share, doing = (f"{progress['share']:.0%}", text(progress["text"] or "")) if progress else ("", "")
    if job["state"] in FINAL - {JobState.SUCCEEDED}:
        code = result.get("exit_code")
        told = [
            f"exit code {code}" if code is not None and f"exit code {code}" not in (job["reason"] or "") else "",
            job["reason"] or "",
            f"after {seconds(result['seconds'])}" if result.get("seconds") is not None else "",
            f"at {share}{f' ({doing})' if doing else ''}" if progress else "",
        ]
        return f"{job['state'].capitalize()}: {', '.join(filter(None, told)) or 'no reason was told'}"
    if progress and job["state"] in (JobState.RUNNING, JobState.CANCELLING):
        return f"{share} done{': ' if doing else ''}{doing}"
    return ""


def gate(one: Record) -> tuple[Cell, ...]:
    """Return the cells of one condition on the start."""
    told, kind = GATES[one["open"]]
    return Cell(one["gate"]), Cell(told, kind=kind), Cell(one["sentence"])


class Acts:
    """The buttons of what may be done to the job. Only those that would change something now are shown."""

    def __init__(self, view: View, id: str) -> None:
        self._view, self._id = view, id
        self._buttons: list[tuple[Collection[str], TextElement]] = []
        with node("section", kind="bar", aria_label="Acts on the job"):
            with node("div", kind="acts"):
                if view.is_operator:
                    self._add("Retry", REQUEUEABLE, "Submit a copy of the job?", self._retry, kind="main")
                    self._add("Hold", (JobState.QUEUED,), "Hold the job until it is released?", self._each("hold"))
                    self._add("Release", (JobState.PARKED,), "Return the job to the queue?", self._each("release"))
                unfinished = tuple(state for state in ALL if state not in FINAL)
                self._add("Cancel the job", unfinished, "", self._cancel, kind="danger")
                self._add("Set priority", MOVABLE, "", self._prioritise)
            with node("div", kind="fields") as self._fields:
                hints = {"priority": "lower is sooner", "reason": "for the history"}
                self._typed = Typed({name: (name, "") for name in hints}, hints)
        self.fit("")

    def _add(
        self,
        name: str,
        states: Collection[str],
        question: str,
        act: Callable[[], Awaitable[None]],
        *,
        kind: str = "",
    ) -> None:
        async def ask() -> str:
            job = await self._view.ask(lambda client: client.show(self._id))
            if job["state"] not in states:
                raise LeaseholdError(f"the job is {job['state']} already")
            if name == "Set priority":
                return f"Change the priority from {job['priority']} to {self._priority()}?"
            return question or f"{name.removesuffix(' the job')} the job {self._id}, which is {job['state']}?"

        self._buttons.append((states, self._view.confirmed(name, ask, act, kind=kind)))

    def fit(self, state: str) -> None:
        """Show the buttons that can change a job in this state."""
        for states, button in self._buttons:
            button.set_visibility(state in states)
        self._fields.set_visibility(state in MOVABLE)

    def _priority(self) -> int:
        try:
            return int(self._typed["priority"])
        except ValueError:
            raise BadInput("priority", "is not a number") from None

    @property
    def _reason(self) -> str | None:
        return self._typed["reason"] or None

    def _each(self, verb: str) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            await self._view.ask(lambda client: getattr(client.backlog, verb)([self._id], reason=self._reason))

        return act

    async def _retry(self) -> None:
        (done,) = await self._view.ask(lambda client: client.backlog.requeue([self._id], reason=self._reason))
        if done["job"] is None:
            raise LeaseholdError(done.get("why") or "the job was left as it is")
        ui.navigate.to(f"/jobs/{done['job']}")

    async def _prioritise(self) -> None:
        priority = self._priority()
        await self._view.ask(lambda client: client.backlog.prioritise([self._id], priority, reason=self._reason))

    async def _cancel(self) -> None:
        await self._view.ask(lambda client: client.cancel([self._id]))


def fact_rows(job: Record) -> dict[str, Cell]:
    """Return what is known of a job, as names and values; what it does not have is left out."""
    waiting, graph = job["waiting"], job["graph"]
    times = {name: job[field] for name, field in TIMES.items() if job[field]}
    found: dict[str, Any] = {
        "id": job["id"],
        "joined": job["joined"],
        "why it waits": waiting and waiting["sentence"],
        "forecast": job.get("forecast") and job["forecast"]["sentence"],
        "ran for": run_time(job),
        "bot": job["bot"],
        "attempts": f"{job['attempts']} of {job['max_attempts']}",
        "priority": job["priority"],
        "units": job["units"],
        "requires": properties(job["properties"]),
        "prefers": properties(job["preferred_properties"]),
        "metadata": properties(job["metadata"]),
        "constraints": job["terms"],
        "timeout": job["timeout_seconds"] and seconds(job["timeout_seconds"]),
    }
    shown = {name: Cell(text(value)) for name, value in found.items() if text(value) != "-"}
    if graph:
        shown["graph"] = Cell(f"node {graph['node']} of {text(graph['name'])}", f"/graphs/{graph['id']}")
    return shown | {name: ago(moment) for name, moment in times.items()}


def attempt(one: Record) -> list[Cell]:
    """Return the cells of one lease."""
    return [
        Cell(str(one["fence"])),
        ago(one["granted_at"]),
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
                    ago(event["at"]),
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
