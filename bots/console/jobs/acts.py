"""Acts on chosen jobs, or on all that pass the filter: counted, confirmed, done in steps that can be stopped."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from leasehold.client import Client
from leasehold.errors import BadInput, LeaseholdError
from leasehold.states import FINAL, JobState
from nicegui import ui

from bots.console.parts import Table, Typed, node
from bots.console.view import View
from bots.console.words import ALL, count
from schema.validation import PRIORITY_MAX, PRIORITY_MIN

Record = Mapping[str, Any]

#: The most jobs that are counted before an act, how many one call counts, and the most calls: in each, the gateway
#: looks at a bounded number of jobs.
MAX_COUNTED, COUNTED_AT_ONCE, MAX_CALLS = 5000, 1000, 60


@dataclass(frozen=True)
class Act:
    """What may be done to the jobs that pass a filter.

    verb: its word on the page, and in the path of its route. states: those in which it changes a job.
    """

    verb: str
    states: tuple[JobState, ...]
    told: str
    of_operators: bool = True
    reasoned: bool = True
    kind: str = ""


ACTS = (
    Act(
        "cancel",
        tuple(state for state in ALL if state not in FINAL | {JobState.CANCELLING}),
        "Waiting jobs end at once, running ones when their bots have stopped them.",
        of_operators=False,
        reasoned=False,
        kind="danger",
    ),
    Act("hold", (JobState.QUEUED,), "They wait aside until they are released."),
    Act("release", (JobState.PARKED,), "They return to the queue with the age that they had."),
    Act(
        "requeue",
        (JobState.PARKED, JobState.FAILED, JobState.DEAD, JobState.CANCELLED),
        "Held jobs return to the queue; of each one that ended, a copy is submitted.",
    ),
    Act("priority", (JobState.QUEUED, JobState.PARKED), "Lower numbers start sooner.", of_operators=False),
)


class Acts:
    """The buttons of the acts, what is typed for them, and how far the one that runs has come.

    They act on the rows that are chosen, or on every job that passes the filter if none is. They stay in sight.
    """

    def __init__(self, view: View, where: Record) -> None:
        self._view, self._where = view, where
        self._stopped = True
        self._chosen: list[str] = []
        #: The body of the calls for which the person was asked.
        self._asked: Record = {}
        with node("section", kind="bar", aria_label="Acts on jobs"):
            with node("div", kind="acts"):
                self._scope = node("strong")
                for act in ACTS:
                    if view.is_operator or not act.of_operators:
                        view.confirmed(
                            act.verb.capitalize(), partial(self._question, act), partial(self._do, act), kind=act.kind
                        )
                self._stop = node("button", "Stop", type="button").on("click", self._stop_it, [])
                self._told = node("span", aria_live="polite")
            with node("div", kind="fields"):
                hints = {"priority": "lower is sooner", "reason": "for the history"}
                self._typed = Typed({name: (name, "") for name in hints}, hints)
            self._stop.set_visibility(False)
        self._tell_scope()

    def chosen_are(self, table: Table) -> None:
        """Act on the chosen rows of a table."""
        self._chosen = table.chosen
        self._tell_scope()

    def _tell_scope(self) -> None:
        every = "All that pass the filter" if self._where else "Choose jobs, or filter them"
        self._scope.text = f"{count(len(self._chosen))} chosen" if self._chosen else every

    def _stop_it(self) -> None:
        self._stopped = True

    def _request(self, act: Act) -> dict[str, Any]:
        """Return the body of the calls. Raises BadInput for a priority that is none."""
        if not self._chosen and not self._where:
            raise LeaseholdError("choose jobs, or filter them: an act never applies to all jobs of the pool")
        body: dict[str, Any] = {"ids": self._chosen} if self._chosen else {"where": dict(self._where)}
        if act.reasoned and self._typed["reason"]:
            body["reason"] = self._typed["reason"]
        if act.verb == "requeue":
            body["key"] = secrets.token_hex(16)
        if act.verb == "priority":
            try:
                body["priority"] = int(self._typed["priority"])
            except ValueError:
                raise BadInput("priority", "is not a number") from None
            if not PRIORITY_MIN <= body["priority"] <= PRIORITY_MAX:
                raise BadInput("priority", f"is not between {PRIORITY_MIN} and {PRIORITY_MAX}")
        return body

    async def _question(self, act: Act) -> str:
        self._asked = request = self._request(act)
        to = f" to {request['priority']}" if "priority" in request else ""
        if self._chosen:
            number = len(self._chosen)
            return f"{act.verb.capitalize()} {number} chosen {'job' if number == 1 else 'jobs'}{to}? {act.told}"
        states = [*map(str, act.states)]
        if "state" in self._where:
            states = [state for state in states if state in self._where["state"]]
        if not states:
            raise LeaseholdError(f"the filter names no state in which a job can be changed by: {act.verb}")
        found, is_all = await self._view.ask(partial(counted, where={**self._where, "state": states}))
        if not found and is_all:
            raise LeaseholdError(f"no job that passes the filter can be changed by: {act.verb}")
        jobs = f"{count(found, at_least=not is_all)} {'job' if found == 1 else 'jobs'}"
        return f"{act.verb.capitalize()} {jobs}{to}? {act.told}"

    async def _do(self, act: Act) -> None:
        """Act on the jobs, some hundred in a transaction, until there are no more, or the person stops or goes away."""
        if not self._stopped:
            raise LeaseholdError("another act is not over yet")
        request, done, page = dict(self._asked), 0, ui.context.client
        self._stopped = False
        self._stop.set_visibility(True)
        try:
            while not self._stopped and not page.is_deleted:
                answer = await self._view.ask(partial(_step, path=f"/v1/jobs/{act.verb}", request=request))
                done += sum(job["changed"] for job in answer["jobs"])
                self._told.text = f"{act.verb}: {count(done)} changed so far"
                if answer.get("next") is None:
                    break
                request["cursor"] = answer["next"]
            else:
                self._told.text = f"{act.verb}: stopped; {count(done)} are changed and stay so"
                return
            self._told.text = f"{act.verb}: {count(done)} changed"
        except LeaseholdError as error:
            self._told.text = f"{act.verb}: {count(done)} were changed before it failed"
            raise error
        finally:
            self._stopped = True
            self._stop.set_visibility(False)


def _step(client: Client, *, path: str, request: dict[str, Any]) -> Record:
    return client.call("POST", path, body=request, held=30.0)


def counted(client: Client, *, where: Record) -> tuple[int, bool]:
    """Count the jobs that pass a filter, up to `MAX_COUNTED` and within `MAX_CALLS`; tell whether these are all."""
    found, cursor = 0, None
    for _ in range(MAX_CALLS):
        query: dict[str, Any] = {**where, "limit": COUNTED_AT_ONCE} | ({"cursor": cursor} if cursor else {})
        page = client.call("GET", "/v1/jobs", query=query)
        found, cursor = found + len(page["jobs"]), page["next"]
        if cursor is None or found >= MAX_COUNTED:
            break
    return found, cursor is None
