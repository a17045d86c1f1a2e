"""The answer of `explain`: why a job runs where it runs, or why it does not run.

For a job that ran: its attempts, the decision behind the latest one, and the receipts of preemption. These are pure
functions of the job's events and leases. Everybody who may see the job sees which bots had it. A tenant's view of a
preemption leaves other tenants out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

from leasehold.states import WAITING, JobState
from leasehold.wire import escaped
from pydantic import BaseModel, Field

from assigner.admission.rules import RULES, Rules
from assigner.explain import gates as explained_gates
from assigner.explain.forecast import StartForecast, foresee
from assigner.explain.minimum import Preemption, explain_minimum
from assigner.preemption.plan import QuotaSettings
from assigner.queries import jobs as job_queries
from schema import predicates
from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.diagnostics import evidence as evidence_reads
from schema.diagnostics.evidence import Evidence, JobEvidence, JobsAhead
from schema.moves.grant import PREFERRED, REQUIRED
from schema.picking import constrained
from schema.postgres.connection import Connection
from schema.readable import duration, plural

Row = Mapping[str, Any]

_HELD_STATES = (JobState.LEASED, JobState.RUNNING, JobState.CANCELLING)
#: Moves whose details are the receipt of a preemption.
RECEIPTS = ("preempt", "preempted")
#: What assigners decide by unless they are configured.
QUOTAS = QuotaSettings()
_PARTS = ("priority", "capacity", "locality", "success", "success_rate", "load")


def attempt_rows(leases: Sequence[Row], events: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each lease of the job, oldest first: its bot, its assigner, and how it ended."""
    grants = {event["fence"]: event for event in events if event["move"] == "grant"}
    endings = dict(_endings(events))
    return [
        {
            "fence": lease["fence"],
            "bot": lease["bot"],
            "assigner": lease["assigner"],
            "strategy": lease["strategy"],
            "policy": lease["policy"],
            "granted_at": lease["granted_at"],
            "started_at": lease["acknowledged_at"],
            "ended_at": lease["ended_at"],
            "decision": _object((grants.get(lease["fence"]) or {}).get("details")),
            "sentence": _ended(lease, endings.get(lease["fence"])),
        }
        for lease in leases
    ]


def _object(details: Any) -> dict[str, Any]:
    """Return the details of an event; none where another version stored something else."""
    return dict(details) if isinstance(details, Mapping) else {}


def receipt_rows(events: Sequence[Row], *, instance: str, everything: bool) -> list[dict[str, Any]]:
    """Return the preemptions that the job gained or suffered."""
    return [
        {
            "move": event["move"],
            "at": event["at"],
            "receipt": event["details"] if everything else visible_receipt(_object(event["details"]), instance),
            "sentence": _preemption(event["move"], _object(event["details"]), instance=instance, everything=everything),
        }
        for event in events
        if event["move"] in RECEIPTS
    ]


def visible_events(events: Sequence[Row], *, instance: str, everything: bool) -> list[Row]:
    """Return the events that a caller may see: without `everything`, receipts leave out other tenants."""
    if everything:
        return list(events)
    return [
        {**event, "details": visible_receipt(_object(event["details"]), instance)}
        if event["move"] in RECEIPTS
        else event
        for event in events
    ]


def visible_receipt(receipt: Row, instance: str) -> dict[str, Any]:
    """Return a receipt of preemption without the bot and without jobs of other tenants."""
    kept = {name: value for name, value in receipt.items() if name not in ("preemptor", "victims", "bot")}
    preemptor = receipt.get("preemptor") or {}
    if preemptor.get("instance") == instance:
        kept["preemptor"] = preemptor
    victims = [each for each in receipt.get("victims") or () if each.get("instance") == instance]
    return {**kept, "victims": victims} if victims else kept


def placement_sentence(attempt: Mapping[str, Any]) -> str:
    """Return one sentence on the rule by which the attempt went to its bot."""
    decision, strategy = attempt["decision"], attempt["strategy"]
    where = f"bot '{attempt['bot']}'" if attempt["bot"] else "its bot"
    if strategy == "proactive":
        return f"{where} asked for more work when it had finished something, and this was the most urgent it may have"
    if strategy == "preemption":
        return f"{where} was freed for it by a preemption"
    if "candidates" not in decision:
        return f"{where} was chosen by the strategy '{escaped(strategy, 63)}'"
    score = decision.get("score") or {}
    parts = ", ".join(f"{part} {score[part] + 0.0:+g}" for part in _PARTS if isinstance(score.get(part), int | float))
    best = ""
    if "total" in score:
        best = f" with {score['total']:g} point{'' if score['total'] == 1 else 's'} ({parts})"
    which = {PREFERRED: " with what it prefers", REQUIRED: ", as none with what it prefers had room"}
    kind = which.get(decision.get("phase", ""), "")
    found = f"{where} was the best of {plural(decision['candidates'], 'candidate')}{kind}{best}"
    match decision.get("round"):
        case 0:
            return f"{found}, of all that were free, after a sample had left it without one"
        case int() as number if number > 1:
            return f"{found}, in round {number}, after the samples before it had left it without one"
        case _:
            return found


def _endings(events: Iterable[Row]) -> Iterable[tuple[int, Row]]:
    """Yield the fence of each grant with the event that ended its lease."""
    fence: int | None = None
    for event in events:
        if event["move"] == "grant":
            fence = event["fence"]
        elif fence is not None and event["from"] in _HELD_STATES and event["to"] not in _HELD_STATES:
            yield fence, event
            fence = None


def _ended(lease: Row, ending: Row | None) -> str:
    if lease["ended_at"] is None:
        if lease["state"] == "cancelling":
            return f"is asked to stop ({lease['stop_reason']})"
        return "runs" if lease["acknowledged_at"] else "waits for its bot to begin"
    details = (ending or {}).get("details") or {}
    told = {
        "succeeded": "succeeded",
        "failed": "failed",
        "error": "could not be run",
        "stopped": "was stopped",
        "released": "was given back by its bot",
        "lost": "was lost with its bot",
    }.get(str(details.get("verdict")), "ended")
    if lease["stop_reason"]:
        told += f" after it was asked to stop ({lease['stop_reason']})"
    if details.get("exit_code") is not None and details.get("verdict") == "failed":
        told += f" with exit {details['exit_code']}"
    if details.get("reason"):
        told += f": {escaped(str(details['reason']))}"
    return told + (", and it was queued again" if ending is not None and ending["to"] == JobState.QUEUED else "")


def _preemption(move: str, receipt: Row, *, instance: str, everything: bool) -> str:
    preemptor, victims = receipt.get("preemptor") or {}, receipt.get("victims") or []
    below = f"below its minimum of {preemptor.get('min_quota')} with {plural(preemptor.get('usage') or 0, 'unit')}"
    rule = f"by the rule {receipt.get('rule')}"
    if move == "preempted":
        if not everything and preemptor.get("instance") != instance:
            return f"it was asked to stop for a job of an instance below its minimum, {rule}"
        who = f"job {preemptor.get('job')} of instance '{preemptor.get('instance')}'"
        return f"it was asked to stop for {who}, which was {below}, {rule}"
    where = f" on bot '{receipt.get('bot')}'" if everything else ""
    freed = sum(each.get("units", 0) for each in victims)
    jobs = f"{plural(len(victims), 'job')} {'was' if len(victims) == 1 else 'were'} asked to stop"
    told = f"{jobs}{where} for it" if everything else "room was made for it"
    waited = duration(float(preemptor.get("waited_seconds") or 0))
    numbers = f", {plural(freed, 'unit')}" if everything else ""
    return f"{told}{numbers}, {rule}: its instance was {below}, and it had waited {waited}"


#: Gates that the end of a job closes, so they do not tell why it waited.
_OF_THE_END = (predicates.STATE.name, predicates.QUEUE_DEADLINE.name)


class GateAnswer(BaseModel):
    """One hard condition on a waiting job."""

    gate: str
    asks: str = Field(description="the condition")
    open: bool | None = Field(description="null: no bot passed the earlier gates, so this one was not asked")
    sentence: str
    evidence: dict[str, Any]


class Count(BaseModel):
    """A number of jobs; with `more` a lower bound."""

    jobs: int
    more: bool


class Order(BaseModel):
    """Ready jobs that come before this one, by priority, age and id."""

    in_queue: Count = Field(description="jobs of the same cohort, instance and requirements")
    in_instance: Count = Field(description="jobs of the same cohort and instance")


class Attempt(BaseModel):
    """One lease of the job."""

    fence: int
    bot: str | None = Field(description="bot that has or had the job")
    assigner: str
    strategy: str
    policy: int | None = Field(description="version by which the process worked that decided; unset = none yet")
    granted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    decision: dict[str, Any] = Field(description="record of the choice: candidates, score and its parts, round")
    sentence: str


class Receipt(BaseModel):
    """A preemption that the job gained or suffered."""

    move: str
    at: datetime
    receipt: dict[str, Any]
    sentence: str


class Explained(BaseModel):
    """Why a job runs where it runs, or why it does not run."""

    state: str
    instance: str
    cohort: str
    label: str
    priority: int
    units: int
    sentence: str
    forecast: StartForecast | None = Field(default=None, description="of a waiting job: when it will start")
    change: list[str] = Field(description="the smallest changes that together would start a waiting job")
    gates: list[GateAnswer] = Field(description="gates of a waiting job")
    order: Order | None = Field(description="jobs before a waiting job")
    preemption: Preemption | None = Field(
        default=None, description="of a job that waits for room alone, and whose instance is below its minimum"
    )
    attempts: list[Attempt] = Field(description="the newest attempts, oldest first")
    receipts: list[Receipt]


class Explanation(Explained):
    """Why a job runs where it runs, or why it does not run.

    A cancelled submission shows only that it is cancelled.
    """

    id: UUID


def explain(
    connection: Connection,
    public_id: str,
    *,
    instances: Sequence[str] | None,
    quotas: QuotaSettings = QUOTAS,
    sync: float = 1.0,
    rules: Rules = RULES,
) -> Explanation | None:
    """Explain the job of one submission; None if there is no job that the caller may see.

    instances: the caller's instances; None = an operator. Only operators see other tenants, and the names of bots that
        did not have the job.
    quotas, rules: what the assigners decide by. sync: the bots' sync period, in seconds.
    """
    cooldown = quotas.of_evictions
    row_id = job_queries.job_row_id(connection, public_id, instances=instances)
    if row_id is None:
        return None
    job = evidence_reads.job(connection, row_id, cooldown=cooldown)
    withdrawn = job_queries.withdrawn_reason(connection, public_id, instances=instances)
    if withdrawn is not None:
        facts = _facts(public_id, job, state=JobState.CANCELLED)
        return Explanation(
            **facts, sentence=f"it is {withdrawn}", change=[], gates=[], order=None, attempts=[], receipts=[]
        )
    everything = instances is None
    events = connection.execute(job_queries.EVENTS, {"job_id": row_id, "limit": job_queries.MAX_EVENTS})
    history = [dict(event) for event in events.mappings()]
    tried = attempt_rows(evidence_reads.leases(connection, row_id), history)
    waiting = _Waiting.of(connection, job, everything=everything, rules=rules) if job.state in WAITING else None
    found, judged, kind = (waiting.found, waiting.judged, waiting.kind) if waiting else (None, (), None)
    change = [] if found is None else explained_gates.changes(judged)
    stopped = None
    if job.state == JobState.QUEUED and [one.name for one in judged if one.is_open is False] == [predicates.ROOM.name]:
        stopped = explain_minimum(connection, row_id, quotas, sync=sync, everything=everything)
    foreseen = None if found is None else foresee(connection, row_id, judged, cooldown=cooldown, rules=rules)
    return Explanation(
        **_facts(public_id, job, state=job.state),
        sentence=_past_sentence(job, tried) if found is None else _waiting_sentence(found, judged, kind=kind),
        forecast=None if foreseen is None else StartForecast.of(foreseen.forecast),
        change=change,
        gates=[_gate_answer(one, everything=everything) for one in judged],
        order=None if found is None else Order(in_queue=_count(found.in_queue), in_instance=_count(found.in_instance)),
        preemption=stopped,
        attempts=[Attempt.model_validate(one) for one in tried],
        receipts=[
            Receipt.model_validate(one)
            for one in receipt_rows(history, instance=job.instance_name, everything=everything)
        ],
    )


def why_it_waited(connection: Connection, public_id: str) -> str | None:
    """Return what would keep a job waiting that has just ended without a start, as its tenant is told; None if nothing.

    public_id: that of any submission of the job. The caller has to check who may see it. Gates of constraints, such as
    locks and rates, are left out.
    """
    row_id = job_queries.job_row_id(connection, public_id, instances=None)
    if row_id is None:
        return None
    found = evidence_reads.gather(
        connection, evidence_reads.job(connection, row_id, cooldown=EVICTION_COOLDOWN), everything=False
    )
    judged = [one for one in explained_gates.judge_gates(found) if one.name not in _OF_THE_END]
    closed = explained_gates.by_cause(judged)
    return closed[0].sentence if closed else None


def why_it_waits(
    connection: Connection, job_id: int, *, with_forecast: bool, everything: bool, cooldown: Cooldown, rules: Rules
) -> tuple[str, StartForecast | None]:
    """Return the sentence in which `explain` tells why a waiting job does not run, and its forecast if it is asked for.
    Raises as `explain`."""
    job = evidence_reads.job(connection, job_id, cooldown=cooldown)
    waiting = _Waiting.of(connection, job, everything=everything, rules=rules)
    told = None
    if with_forecast:
        told = StartForecast.of(foresee(connection, job_id, waiting.judged, cooldown=cooldown, rules=rules).forecast)
    return _waiting_sentence(waiting.found, waiting.judged, kind=waiting.kind), told


@dataclass(frozen=True)
class _Waiting:
    """What is found of a waiting job, and the gates judged by it. kind: see `_waiting_sentence`."""

    found: Evidence
    judged: Sequence[explained_gates.GateVerdict]
    kind: str | None

    @classmethod
    def of(cls, connection: Connection, job: JobEvidence, *, everything: bool, rules: Rules) -> Self:
        found = evidence_reads.gather(connection, job, everything=everything)
        constraints = explained_gates.judge_constraints(connection, job.row_id, rules)
        judged = explained_gates.judge_gates(found, constraints)
        return cls(found, judged, rules.ordering.chosen_kind if constraints else None)


#: Of the jobs of one list that nothing of their own holds up: the most whose constraints are judged, and the most
#: queues for which bots are counted.
MAX_JUDGED, MAX_QUEUES_JUDGED = 200, 20
ITS_TURN, NOT_JUDGED = "its turn", "a bot, a limit or its turn"


def why_in_few_words(
    connection: Connection, rows: Sequence[Row], *, everything: bool, cooldown: Cooldown, rules: Rules
) -> list[str | None]:
    """Return why each job of a list waits, from the facts of `assigner.queries.jobs.listed`; its reason if it is over.

    What these facts leave open is judged by the gates of `explain`: quota and bots once for all jobs of a queue, which
    are alike in this, constraints for each job. External checkers are not asked.
    """
    asked = [row for row in rows if in_few_words(row) == ITS_TURN][:MAX_JUDGED]
    first = {row["queue"]: row["row_id"] for row in reversed(asked)}
    queues = [*dict.fromkeys(row["queue"] for row in asked)][:MAX_QUEUES_JUDGED]
    jobs = evidence_reads.jobs(connection, [first[queue] for queue in queues], cooldown=cooldown) if queues else []
    gathered = evidence_reads.gather_briefly(connection, jobs, everything=everything) if jobs else []
    found = {job.queue: evidence for job, evidence in zip(jobs, gathered, strict=True)}
    asked = [row for row in asked if row["queue"] in found]
    constrained_jobs = [row["row_id"] for row in asked if row["constrained"]]
    own = explained_gates.judge_each_constraints(connection, constrained_jobs, rules)
    judged = {
        row["row_id"]: explained_gates.judge_gates(found[row["queue"]], own.get(row["row_id"], ())) for row in asked
    }
    whys = {row_id: explained_gates.in_few_words(each) or ITS_TURN for row_id, each in judged.items()}
    return [whys.get(row["row_id"], why) for row, why in zip(rows, by_facts_alone(rows), strict=True)]


def by_facts_alone(rows: Sequence[Row]) -> list[str | None]:
    """Return as `why_in_few_words` what the facts tell alone, without any judgement."""
    return [NOT_JUDGED if why == ITS_TURN else why for why in map(in_few_words, rows)]


def in_few_words(row: Row) -> str | None:
    """Return what the facts of `listed` alone tell: what holds a job itself up, or else that it is its turn."""
    match row["state"]:
        case JobState.BLOCKED:
            return "other nodes of its graph"
        case JobState.PARKED:
            return str(row["reason"] or "held")
        case JobState.DEFERRED:
            return "too many jobs wait"
        case JobState.QUEUED if row["paused"] is not None:
            what = f"{row['paused']} '{row['paused_name']}' is paused"
            return f"{what}: {row['pause_reason']}" if row["pause_reason"] else what
        case JobState.QUEUED if row["starts_in"] > 0:
            at = f"{row['queued_at'].astimezone(UTC):{'%H:%M' if row['starts_in'] < 86_400 else '%Y-%m-%d %H:%M'}}"
            return f"starts in {duration(row['starts_in'])}, at {at} UTC"
        case JobState.QUEUED if (row["retry_seconds"] or 0) > 0:
            begun = "tried again" if row["attempts"] else "may start"
            return f"{begun} in {duration(row['retry_seconds'])}"
        case JobState.QUEUED if row["draining"]:
            return "its instance is drained" + (f": {row['drain_reason']}" if row["drain_reason"] else "")
        case JobState.QUEUED:
            return ITS_TURN
        case _:
            return str(row["reason"]) if row["reason"] else None


def _facts(public_id: str, job: JobEvidence, *, state: str) -> dict[str, Any]:
    return {
        "id": UUID(public_id),
        "state": state,
        "instance": job.instance_name,
        "cohort": job.cohort_name,
        "label": job.label,
        "priority": job.priority,
        "units": job.units,
    }


def _waiting_sentence(found: Evidence, judged: Sequence[explained_gates.GateVerdict], *, kind: str | None) -> str:
    """kind: the order that chooses among the first jobs of a queue; None = they start as they are counted here."""
    closed = explained_gates.by_cause(judged)
    if closed:
        last = closed[-1].evidence
        rest = last.get("rest_seconds") if len(closed) > 1 and last.get("considered") else None
        again = f"; it is looked at again in {duration(rest)}, or when a bot comes that could run it" if rest else ""
        return f"it does not run because {closed[0].sentence}{again}"
    room = f"{explained_gates.counted_bots(found, found.bots.able, 'bot')} with room"
    order = f"{_ahead(found.in_queue)} before it in its queue, {_ahead(found.in_instance)} in its instance and cohort"
    if kind is not None:
        window = f"at most the first {constrained.WINDOW:,} jobs of a queue"
        order += f" by priority and age; the order {kind} chooses among {window}"
    return f"nothing stands in its way: {room}, and {order}"


def _ahead(order: JobsAhead) -> str:
    return f"more than {order.jobs:,} jobs" if order.more else plural(order.jobs, "job")


def _past_sentence(job: JobEvidence, tried: Sequence[Mapping[str, Any]]) -> str:
    if not tried:
        return f"it is {job.state} and never ran" + (f": {job.reason}" if job.reason else "")
    last = tried[-1]
    verb = "runs" if last["ended_at"] is None else "ran"
    return f"it {verb} there because {placement_sentence(last)}"


def _gate_answer(one: explained_gates.GateVerdict, *, everything: bool) -> GateAnswer:
    shown = {name: value for name, value in one.evidence.items() if everything or name not in ("bot", "bots")}
    return GateAnswer(gate=one.name, asks=one.requirement, open=one.is_open, sentence=one.sentence, evidence=shown)


def _count(order: JobsAhead) -> Count:
    return Count(jobs=order.jobs, more=order.more)
