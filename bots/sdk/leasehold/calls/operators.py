"""The client's calls of operators: what is wrong, what is in force, and what other weights would choose."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypedDict, cast
from urllib.parse import quote

from leasehold import wire
from leasehold.errors import NotFound
from leasehold.transport import Transport

#: Rows in one answer of the audit.
PAGE = 500


class Alert(TypedDict):
    """Something that is wrong now. subject: a cohort, cohort/instance or process; empty = the pool."""

    name: str
    severity: Literal["critical", "warning", "info"]
    subject: str
    summary: str
    action: str


class Check(TypedDict):
    """A check of the database. remedy: what to do; None if nothing needs doing."""

    name: str
    verdict: Literal["ok", "unknown", "warning", "bad"]
    found: str
    remedy: str | None
    figures: dict[str, Any]


class Invariant(TypedDict):
    """A safety invariant. title: what breaks it. rows: how many do; sample: the first of their ids."""

    id: str
    title: str
    rows: int
    sample: list[str]


class Invariants(TypedDict):
    """A check of all invariants. finished: False = the time was over, and nothing is known."""

    finished: bool
    seconds: float
    invariants: list[Invariant]


class Gateway(TypedDict):
    """A gateway process of the last day. state: running, stopped or dead. Times are ISO 8601."""

    name: str
    url: str
    state: str
    started_at: str
    seen_at: str
    stopped_at: str | None
    figures: dict[str, float]


class AuditRow(TypedDict):
    """What an actor did or read."""

    id: int
    at: str
    actor: str
    action: str
    subject: str
    details: dict[str, Any] | None


class SettingsInForce(TypedDict):
    """Settings that some processes have alike. error: why the file as it is now was refused."""

    kind: Literal["assigner", "gateway"]
    processes: list[str]
    file: str | None
    error: str | None
    changed_at: str
    settings: dict[str, Any]


class PolicyVersion(TypedDict):
    """A version of what decides: who made it and why, and how many values differ from the version before it."""

    id: int
    made_at: str
    author: str
    reason: str
    changed: int
    drafted: bool
    in_force: bool


class Simulation(TypedDict):
    """A report of a simulation that was kept under a title. made_at: ISO 8601."""

    id: int
    made_at: str
    title: str


class SimulationReport(Simulation):
    """A report with its content, as `GET /v1/simulations/{id}` tells it."""

    report: dict[str, Any]


class Canary(TypedDict):
    """The trial of a version on some cohorts or instances (`kind`). outcome: None while it runs; why: how it ended."""

    policy: int
    kind: Literal["cohort", "instance"]
    names: list[str]
    reached: list[str]
    step: int
    steps: list[int]
    step_at: str
    ended_at: str | None
    outcome: str | None
    why: str | None
    guards: list[dict[str, Any]]


class Decision(TypedDict):
    """A sampled decision: the job, the bot that it went to, and the number of candidates."""

    id: int
    at: str
    assigner: str
    job: str
    bot: str
    strategy: str
    candidates: int


class Terms(TypedDict):
    """The weighted terms of a score and their sum."""

    total: float
    priority: float
    capacity: float
    locality: float
    success: float


class Scored(TypedDict):
    """A candidate with its scores in force and as tried."""

    bot: str
    priority: int
    free_units: int
    capacity: int
    hit: bool
    success_rate: float | None
    in_force: Terms
    tried: Terms


class Scores(TypedDict):
    """A sampled decision made again. chosen: the bot as tried; None if a sample does not tell."""

    decision: Decision
    by_weights: bool
    in_force: dict[str, float]
    tried: dict[str, float]
    capacity_term: str
    load_power: float
    chosen: str | None
    candidates: list[Scored]


class Pause(TypedDict):
    """What starts no further job. kind: label, task, instance or schedule. instance: * = the jobs of all instances.

    at: since when, unset if it was drained or disabled without being noted.
    """

    kind: str
    name: str
    instance: str
    reason: str
    actor: str
    at: str | None


class Operators:
    """The client's calls on the health of the pool and on its settings. They need the token of an operator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def alerts(self) -> list[Alert]:
        """List what is wrong now and what to do, the most severe first."""
        return cast(list[Alert], self._transport.call("GET", "/v1/alerts")["alerts"])

    def doctor(self) -> list[Check]:
        """Check the database as `leasehold db doctor` does."""
        return cast(list[Check], self._transport.call("GET", "/v1/doctor", held=60.0)["checks"])

    def invariants(self, *, seconds: float = 10.0) -> Invariants:
        """Check the invariants as `leasehold db verify` does, for at most `seconds` (up to 60)."""
        answer = self._transport.call("GET", "/v1/invariants", query={"seconds": seconds}, held=seconds + 10.0)
        return cast(Invariants, answer)

    def gateways(self) -> list[Gateway]:
        """List the gateway processes of the last day, by name."""
        found: list[Gateway] = []
        while True:
            query: dict[str, str | int] = {"limit": wire.MAX_LIST} | ({"after": found[-1]["name"]} if found else {})
            page = cast(list[Gateway], self._transport.call("GET", "/v1/gateways", query=query)["gateways"])
            found += page
            if len(page) < wire.MAX_LIST:
                return found

    def audit(self, *, before: int | None = None) -> Iterator[AuditRow]:
        """Yield rows of the audit, newest first; `before`: only those with a lower id. They are read page by page."""
        while True:
            query = {"limit": PAGE} | ({} if before is None else {"before": before})
            page = cast(list[AuditRow], self._transport.call("GET", "/v1/audit", query=query)["audit"])
            yield from page
            if len(page) < PAGE:
                return
            before = page[-1]["id"]

    def pauses(self) -> list[Pause]:
        """List what is paused, by kind and name."""
        return cast(list[Pause], self._transport.call("GET", "/v1/pauses")["pauses"])

    def pause(self, kind: str, name: str, *, instance: str = "*", reason: str = "") -> None:
        """Start no further job of a label, task, instance or schedule; running ones go on.

        instance: of a label or a task, only its jobs, * = all; a schedule needs it. reason: everybody sees it who sees
        a job that waits for it. Raises BadInput, NotFound.
        """
        self._transport.call("PUT", _path_of_pause(kind, name, instance), body={"reason": reason})

    def resume(self, kind: str, name: str, *, instance: str = "*", reason: str = "") -> None:
        """Let jobs start again that `pause` has kept. Raises NotFound for what is not paused."""
        self._transport.call("DELETE", _path_of_pause(kind, name, instance), query={"reason": reason})

    def settings(self) -> list[SettingsInForce]:
        """List the settings that live processes use; several of a kind mean that its processes do not agree."""
        return cast(list[SettingsInForce], self._transport.call("GET", "/v1/settings")["settings"])

    def policies(self, *, limit: int = 20) -> list[PolicyVersion]:
        """List up to `limit` (200) versions of the policy, newest first."""
        found = self._transport.call("GET", "/v1/policies", query={"limit": limit})
        return cast(list[PolicyVersion], found["policies"])

    def simulations(self, *, limit: int = 100) -> list[Simulation]:
        """List up to `limit` (100) reports of `leasehold simulate --title`, newest first."""
        found = self._transport.call("GET", "/v1/simulations", query={"limit": limit})
        return cast(list[Simulation], found["simulations"])

    def simulation(self, id: int) -> SimulationReport:
        """Return a report with its content. Raises NotFound."""
        return cast(SimulationReport, self._transport.call("GET", f"/v1/simulations/{id}"))

    def canary(self) -> Canary | None:
        """Return the trial of a version that is running, or else the last one; None if there never was one."""
        with suppress(NotFound):
            return cast(Canary, self._transport.call("GET", "/v1/policies/canary"))
        return None

    def decisions(self, *, before: int | None = None, limit: int = 20) -> list[Decision]:
        """List up to `limit` (200) sampled decisions, newest first; `before`: only those with a lower id."""
        query = {"limit": limit} | ({} if before is None else {"before": before})
        return cast(list[Decision], self._transport.call("GET", "/v1/decisions", query=query)["decisions"])

    def scores(
        self,
        decision: int | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        capacity_term: str | None = None,
        load_power: float | None = None,
    ) -> Scores:
        """Score the candidates of a sampled decision again, and let the strategy choose; the best come first.

        decision: its id; None = the newest. What is not given is as it was for the decision. Raises NotFound, BadInput.
        """
        given = {"decision": decision, "capacity_term": capacity_term, "load_power": load_power}
        body = {"weights": dict(weights or {})} | {name: value for name, value in given.items() if value is not None}
        return cast(Scores, self._transport.call("POST", "/v1/scores", body=body))


def _path_of_pause(kind: str, name: str, instance: str) -> str:
    parts = (quote(part, safe="/*" if part is name else "*").replace(".", "%2E") for part in (kind, instance, name))
    return f"/v1/pauses/{'/'.join(parts)}"
