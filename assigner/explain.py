"""`explain`: why a job runs where it runs, or why it does not run."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import BaseModel, Field
from sqlalchemy import Connection

from assigner import asked, attempts, gates, queries, remedies
from assigner.books import RULES, Rules
from schema import evidence
from schema.evidence import Ahead, Evidence
from schema.states import JobState

_WAITING = (JobState.BLOCKED, JobState.QUEUED, JobState.PARKED, JobState.DEFERRED)


class GateAnswer(BaseModel):
    """One hard condition on a waiting job."""

    gate: str
    asks: str = Field(description="what has to be so")
    open: bool | None = Field(description="null: an earlier gate has left no bot to ask this one of")
    sentence: str
    evidence: dict[str, Any]


class Count(BaseModel):
    """Jobs; with `more` at least so many."""

    jobs: int
    more: bool


class Order(BaseModel):
    """Ready jobs that come before this one, by priority, age and id."""

    in_queue: Count = Field(description="of the same cohort, instance and requirements")
    in_instance: Count = Field(description="of the same cohort and instance")


class Attempt(BaseModel):
    """One lease of the job."""

    fence: int
    bot: str | None = Field(description="that has or had the job")
    assigner: str
    strategy: str
    granted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    decision: dict[str, Any] = Field(description="what was kept of the choice: candidates, score and its parts, round")
    sentence: str


class Receipt(BaseModel):
    """A preemption that the job gained or suffered."""

    move: str
    at: datetime
    receipt: dict[str, Any]
    sentence: str


class Explanation(BaseModel):
    """Why a job runs where it runs, or why it does not run. Of a submission that was cancelled only that is told."""

    id: UUID
    state: str
    instance: str
    cohort: str
    label: str
    priority: int
    units: int
    sentence: str
    change: list[str] = Field(description="the smallest changes that would start a waiting job: it takes all of them")
    gates: list[GateAnswer] = Field(description="of a waiting job")
    order: Order | None = Field(description="of a waiting job")
    attempts: list[Attempt] = Field(description="the newest, oldest first")
    receipts: list[Receipt]


def explain(
    connection: Connection,
    public_id: str,
    *,
    instances: Sequence[str] | None,
    cooldown: float,
    rules: Rules = RULES,
) -> Explanation | None:
    """The answer for the job of one submission, None if there is none to see.

    `instances` are the caller's, None for an operator, who alone is told of other tenants, and by name of bots that
    did not have the job. `cooldown` is that of evictions, in seconds; `rules` are those that the assigners go by.
    """
    row_id = queries.row_of(connection, public_id, instances=instances)
    if row_id is None:
        return None
    job = evidence.job(connection, row_id, cooldown=cooldown)
    withdrawn = queries.withdrawn(connection, public_id, instances=instances)
    if withdrawn is not None:
        facts = _facts(public_id, job, state=JobState.CANCELLED)
        return Explanation(
            **facts, sentence=f"it is {withdrawn}", change=[], gates=[], order=None, attempts=[], receipts=[]
        )
    everything = instances is None
    events = connection.execute(queries.EVENTS, {"job_id": row_id, "limit": queries.MAX_EVENTS})
    history = [dict(event) for event in events.mappings()]
    tried = attempts.attempts(evidence.leases(connection, row_id), history)
    found = evidence.gather(connection, job, everything=everything) if job["state"] in _WAITING else None
    judged = [] if found is None else gates.judge(found, asked.judge(connection, row_id, rules))
    change = [] if found is None else remedies.changes(found, judged)
    return Explanation(
        **_facts(public_id, job, state=job["state"]),
        sentence=_past(job, tried) if found is None else _waits(found, judged),
        change=change,
        gates=[_answer(one, everything=everything) for one in judged],
        order=None if found is None else Order(in_queue=_count(found.in_queue), in_instance=_count(found.in_instance)),
        attempts=[Attempt.model_validate(one) for one in tried],
        receipts=[
            Receipt.model_validate(one)
            for one in attempts.receipts(history, instance=job["instance_name"], everything=everything)
        ],
    )


def held_up(connection: Connection, job_id: int, *, cooldown: float) -> str | None:
    """Why a waiting job would not run whatever bots there are; None if it would."""
    judged = gates.of_job(evidence.job(connection, job_id, cooldown=cooldown))
    return next((one.sentence for one in judged if one.is_open is False), None)


def _facts(public_id: str, job: Mapping[str, Any], *, state: str) -> dict[str, Any]:
    return {
        "id": UUID(public_id),
        "state": state,
        "instance": job["instance_name"],
        "cohort": job["cohort_name"],
        **{name: job[name] for name in ("label", "priority", "units")},
    }


def _waits(found: Evidence, judged: Sequence[gates.Judged]) -> str:
    closed = next((one for one in judged if one.is_open is False), None)
    if closed is not None:
        return f"it does not run because {closed.sentence}"
    room = f"{gates.some(found, found.bots['able'], 'bot')} with room"
    order = f"{_ahead(found.in_queue)} before it in its queue, {_ahead(found.in_instance)} in its instance and cohort"
    return f"nothing stands in its way: {room}, and {order}"


def _ahead(order: Ahead) -> str:
    return f"more than {order.jobs:,} jobs" if order.more else _plural(order.jobs, "job")


def _past(job: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> str:
    if not tried:
        return f"it is {job['state']} and never ran" + (f": {job['reason']}" if job["reason"] else "")
    last = tried[-1]
    verb = "runs" if last["ended_at"] is None else "ran"
    return f"it {verb} there because {attempts.why_there(last)}"


def _answer(one: gates.Judged, *, everything: bool) -> GateAnswer:
    shown = {name: value for name, value in one.evidence.items() if everything or name not in ("bot", "bots")}
    return GateAnswer(gate=one.gate.name, asks=one.gate.asks, open=one.is_open, sentence=one.sentence, evidence=shown)


def _count(order: Ahead) -> Count:
    return Count(jobs=order.jobs, more=order.more)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
