"""The gates of one waiting job, each with evidence and a sentence, and what would start the job.

Most are pure functions of what `schema.diagnostics.evidence` has read. A gate on bots looks at the bots that passed the
gates before it. Once no bot is left, the gates that follow are neither open nor closed.

One module because the gates are one list, in the order in which they are asked.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from leasehold.wire import escaped

from assigner.admission import rules as admission_rules
from assigner.admission.checkers import FAILURES
from assigner.admission.gates import GATES
from assigner.admission.rules import Rules
from assigner.admission.state import AdmissionState
from assigner.placement import resources
from schema import predicates
from schema.accounting import rates
from schema.diagnostics.evidence import MAX_BOTS_COUNTED, NAMES, Clause, Evidence, JobEvidence, NodeEvidence
from schema.fleet.kinds import TASK
from schema.picking import constrained
from schema.picking.constrained import ConstrainedQueue, QueueHead
from schema.postgres.connection import Connection
from schema.predicates import Predicate
from schema.readable import duration, plural
from schema.timing import DEAD_AFTER


@dataclass(frozen=True)
class GateVerdict:
    """The result of one gate, `name`, and what it asks for. `remedy`: the smallest change that would open it.

    `is_open` is None if no bot passed the gates before it.
    """

    name: str
    requirement: str
    is_open: bool | None
    sentence: str
    evidence: Mapping[str, Any]
    remedy: str = ""


def judge_gates(found: Evidence, asked: Sequence[GateVerdict] = ()) -> list[GateVerdict]:
    """Return every gate of the job, in the order in which they are asked. `asked`: the gates on its constraints."""
    judged = [*judge_job(found.job), *asked]
    is_any_left = True
    for judge in (_cohort, _requirements, _instance, _healthy, _units, _probation, _room):
        verdict = judge(found)
        if not is_any_left:
            verdict = replace(verdict, is_open=None, sentence="no bot is left to ask it of", evidence={})
        judged.append(verdict)
        is_any_left = verdict.is_open is True
    if found.pool.known or found.pool.silence is not None:
        judged.append(_assigners(found))
    return [*judged, _queue_deadline(found.job)]


def judge_job(job: JobEvidence) -> list[GateVerdict]:
    """Return the gates on the job itself, its instance and its quota, which no bot can open."""
    before = [] if job.node is None else [_dependencies(job, job.node)]
    return [*before, _state(job), _pause(job), _backoff(job), _drain(job), _quota(job)]


def _dependencies(job: JobEvidence, node: NodeEvidence) -> GateVerdict:
    name = f"node {node.node_no} of graph '{node.graph_name}'"
    facts: dict[str, Any] = {"graph": str(node.graph), "name": node.graph_name, "node": node.node_no}
    if _open(job, predicates.DEPENDENCIES):
        return _verdict(job, predicates.DEPENDENCIES, f"{name} waits for no other node", **facts)
    unmet, missing = node.unmet, node.missing
    told = [f"node {one['node']} is {one['state']}" for one in unmet]
    if missing:
        told.append(f"no node has the number {', '.join(map(str, missing[:NAMES]))}")
    left = node.pending_deps - len(unmet) - len(missing)
    told += [f"and {left} more"] if left > 0 else []
    sentence = f"{name} waits for {plural(node.pending_deps, 'node')}: {', '.join(told)}"
    if node.hopeless is not None:
        because = "" if node.hopeless == node.node_no else f", because of node {node.hopeless}"
        sentence = f"BLOCKED_FOREVER: {sentence}; it can never run{because}"
    parents = [one | {"job": None if one["job"] is None else str(one["job"])} for one in unmet]
    remedy = f"wait for {node.pending_deps} of the nodes that it depends on"
    if node.hopeless is not None:
        remedy = "nothing will: cancel it, or submit its graph again"
    return _verdict(
        job,
        predicates.DEPENDENCIES,
        sentence,
        remedy=remedy,
        **facts,
        waits_for=node.pending_deps,
        parents=parents,
        missing=list(missing),
        blocked_forever=node.hopeless is not None,
    )


def _state(job: JobEvidence) -> GateVerdict:
    why = f" ({escaped(job.reason)})" if job.reason else ""
    sentence = "it waits in the queue" if _open(job, predicates.STATE) else f"it is {job.state}{why}"
    return _verdict(job, predicates.STATE, sentence, remedy="release it", state=job.state, reason=job.reason)


def _pause(job: JobEvidence) -> GateVerdict:
    what = f"{job.paused} '{escaped(job.paused_name or '', 127)}'"
    why = f": {escaped(job.pause_reason)}" if job.pause_reason else ""
    sentence = "neither its label nor its task is paused" if job.paused is None else f"{what} is paused{why}"
    remedy = f"resume {what}"
    since = None if job.paused_at is None else job.paused_at.astimezone(UTC).isoformat()
    facts = {"paused": job.paused, "name": job.paused_name, "reason": job.pause_reason, "since": since}
    return _verdict(job, predicates.PAUSE, sentence, remedy=remedy, **facts)


def _backoff(job: JobEvidence) -> GateVerdict:
    rest = None if job.rest is None else max(0.0, round(float(job.rest), 3))
    looks = f"{plural(job.considered, 'look')} without a place"
    if job.starts_in > 0:
        starts_in, at = round(float(job.starts_in), 3), job.queued_at.astimezone(UTC)
        sentence = f"it starts at {at:%Y-%m-%d %H:%M:%S} UTC at the earliest, in {duration(starts_in)}"
        # A queue that rests is woken by a bot with room: only the job itself surely waits.
        facts = {"rest_seconds": starts_in, "considered": 0, "attempts": job.attempts, "starts_at": at.isoformat()}
        return _verdict(job, predicates.BACKOFF, sentence, remedy=f"wait {duration(starts_in)}", **facts)
    if _open(job, predicates.BACKOFF):
        sentence = "it does not rest" if not job.considered else f"its rest after {looks} is over"
    else:
        after = looks if job.considered else f"{plural(job.attempts, 'attempt')}"
        why = f": {escaped(job.reason)}" if job.reason else ""
        sentence = f"it rests for another {duration(rest or 0)} after {after}{why}{_insisting(job)}"
    return _verdict(
        job,
        predicates.BACKOFF,
        sentence,
        remedy="" if rest is None else f"wait {duration(rest)}",
        rest_seconds=rest,
        considered=job.considered,
        attempts=job.attempts,
        reason=job.reason,
    )


def _drain(job: JobEvidence) -> GateVerdict:
    name = job.instance_name
    left = None if job.drain_left is None else round(float(job.drain_left), 3)
    sentence = f"instance '{name}' " + (
        "starts jobs" if _open(job, predicates.DRAIN) else "is drained: it starts nothing"
    )
    if job.drain_reason and not _open(job, predicates.DRAIN):
        sentence += f" ({escaped(job.drain_reason)})"
    remedy = f"end the drain of instance '{name}'"
    return _verdict(job, predicates.DRAIN, sentence, remedy=remedy, instance=name, deadline_seconds=left)


def _quota(job: JobEvidence) -> GateVerdict:
    where = f"'{job.instance_name}' in cohort '{job.cohort_name}'"
    quota = job.quota
    if quota is None:
        return _verdict(job, predicates.QUOTA, f"{where} has no quota: any number of units", units=job.units)
    usage, units, limit = quota.usage, job.units, quota.effective_max
    numbers = asdict(quota) | {"units": units, "evicted_lately": job.evicted_lately}
    if limit is None or quota.max_quota is None:
        return _verdict(job, predicates.QUOTA, f"{where} uses {plural(usage, 'unit')} and has no maximum", **numbers)
    lowered = quota.max_quota - limit
    of = f"{limit}"
    if lowered:
        while_others = "" if job.literal_cooldown else ", while others wait"
        of += f" (its maximum {quota.max_quota} less {lowered} lately evicted{while_others})"
    elif job.evicted_lately and quota.max_quota > quota.min_quota:
        of += f" (nobody else waits, so the {job.evicted_lately} lately evicted take nothing off it)"
    sign = "<=" if _open(job, predicates.QUOTA) else ">"
    sentence = f"{where} uses {usage} of {of}, this job needs {units}: {usage} + {units} {sign} {limit}"
    needed = usage + units + job.evicted_lately
    who = f"{job.instance_name} in cohort {job.cohort_name}"
    remedy = f"raise the maximum of {who} from {quota.max_quota} to {needed}"
    return _verdict(job, predicates.QUOTA, sentence, remedy=remedy, **numbers)


def _cohort(found: Evidence) -> GateVerdict:
    job, cohort = found.job, found.cohort
    label = f"label '{escaped(job.label, 64)}'"
    belongs = f"its {label} belongs" if job.label else "without a label it belongs"
    if job.label and job.label not in (job.cohort_labels or ()):
        belongs = f"no cohort has its {label}, so it belongs"
    bots = f"with {cohort.healthy} of {plural(cohort.present, 'bot')} healthy" if cohort.present else "which has no bot"
    if cohort.leaving:
        bots += f", {cohort.leaving} draining or closing"
    if cohort.more:
        bots += " among those looked at"
    return _on_bots(
        found,
        predicates.COHORT,
        cohort.healthy > 0,
        f"{belongs} to cohort '{job.cohort_name}', {bots}",
        {
            "label": job.label,
            "cohort": job.cohort_name,
            "present": cohort.present,
            "healthy": cohort.healthy,
        },
    )


def _requirements(found: Evidence) -> GateVerdict:
    bots, wanted = found.bots, _wanted(found)
    evidence: dict[str, Any] = {"requirements": found.job.properties, "matching": bots.matching, "more": bots.more}
    is_open = bots.matching > 0
    kept = ""
    if found.exclusive.bots:
        evidence |= {"exclusive_bots": found.exclusive.bots, "exclusive": found.exclusive.names}
        others = plural(found.exclusive.bots, "further bot" if is_open else "bot")
        names = escaped(", ".join(found.exclusive.names), 300)
        verb = "is" if found.exclusive.bots == 1 else "are"
        kept = f"; {others} offering it {verb} kept for jobs that ask for {names}"
    if not wanted:
        return _on_bots(found, predicates.REQUIREMENTS, is_open, f"it requires nothing of a bot{kept}", evidence)
    matching = f"{counted_bots(found, bots.matching, 'bot')}"
    verb = "offers" if bots.matching <= 1 else "offer"
    sentence = f"{matching if is_open else 'no bot'} of cohort '{found.job.cohort_name}' {verb} {wanted}"
    if not is_open and (task := next((each for each in found.clauses if each.name == TASK and each.others), None)):
        evidence["task"] = task.value
        rest = f"{plural(task.others, 'bot')} of cohort '{found.job.cohort_name}' with all the rest"
        sentence = f"no bot has imported the task '{escaped(task.value, 200)}'; {rest}"
    elif found.clauses:
        scarce = scarcest(found)
        evidence["clauses"] = [
            {"clause": str(clause), "bots": clause.alone, "bots_with_all_others": clause.others}
            for clause in found.clauses
        ]
        evidence["scarcest"] = str(scarce)
        if len(found.clauses) > 1:
            sentence += f"; {_offer(scarce.alone)} {_escaped(scarce)}, and {_offer(scarce.others)} all the rest"
    sentence += kept
    sentence += _insisting(found.job)
    if found.job.insists:
        evidence["prefer_seconds_left"] = _prefer_left(found.job)
    return _on_bots(found, predicates.REQUIREMENTS, is_open, sentence, evidence)


def _offer(bots: int) -> str:
    return "no bot offers" if not bots else f"{plural(bots, 'bot')} {'offers' if bots == 1 else 'offer'}"


def _insisting(job: JobEvidence) -> str:
    return f"; it insists on what it prefers for another {duration(_prefer_left(job))}" if job.insists else ""


def _prefer_left(job: JobEvidence) -> float:
    return max(0.0, round(float(job.prefer_left or 0), 3))


def _instance(found: Evidence) -> GateVerdict:
    bots, name = found.bots, found.job.instance_name
    elsewhere = bots.matching - bots.serving
    matching = counted_bots(found, bots.matching, "matching bot")
    if bots.serving:
        sentence = f"{bots.serving} of {matching} for instance '{name}'"
        sentence += f", {elsewhere} only for other instances or pools" if elsewhere else ""
    else:
        sentence = f"no matching bot serves instance '{name}', but other instances or pools: {matching}"
    evidence = {"instance": name, "pool": found.job.pool, "serving": bots.serving, "elsewhere": elsewhere}
    return _on_bots(found, predicates.SERVES, bots.serving > 0, sentence, evidence)


def _healthy(found: Evidence) -> GateVerdict:
    bots = found.bots
    if bots.healthy:
        told = [f"{bots.healthy} of {counted_bots(found, bots.serving, 'matching bot')} healthy and taking work"]
    else:
        told = ["no matching bot is healthy and takes work"]
    if bots.leaving or bots.unhealthy:
        told.append(f"{bots.leaving} draining or closing, {bots.unhealthy} unhealthy")
    if bots.new:
        told.append(f"{bots.new} that {'has' if bots.new == 1 else 'have'} not synced yet")
    sentence = told[0] + (", " if bots.healthy else ": ") * (len(told) > 1) + ", ".join(told[1:])
    evidence = {"healthy": bots.healthy, "draining": bots.leaving, "unhealthy": bots.unhealthy, "not_synced": bots.new}
    return _on_bots(found, predicates.HEALTHY, bots.healthy > 0, sentence, evidence)


def _units(found: Evidence) -> GateVerdict:
    bots, units = found.bots, found.job.units
    healthy = counted_bots(found, bots.healthy, "healthy matching bot")
    sentence = f"{bots.large} of {healthy} with {plural(units, 'unit')}"
    if not bots.large:
        sentence = f"no healthy matching bot has {plural(units, 'unit')}: the largest has {bots.largest}"
    evidence = {"units": units, "large_enough": bots.large, "largest": bots.largest}
    return _on_bots(found, predicates.UNITS, bots.large > 0, sentence, evidence)


def _probation(found: Evidence) -> GateVerdict:
    bots = found.bots
    busy = bots.large - bots.trusted
    if not busy:
        sentence = "no such bot is on probation with a lease"
    elif bots.trusted:
        such = counted_bots(found, bots.large, "such bot")
        sentence = f"{busy} of {such} on probation with the one lease that it may have"
    else:
        such = counted_bots(found, busy, "such bot")
        sentence = f"{such} {'is' if busy == 1 else 'are'} on probation, with the one lease that each may have"
    return _on_bots(found, predicates.PROBATION, bots.trusted > 0, sentence, {"on_probation_with_lease": busy})


def _room(found: Evidence) -> GateVerdict:
    bots, units = found.bots, found.job.units
    sentence = f"{counted_bots(found, bots.able, 'bot')} with room for it now" if bots.able else _full(found)
    evidence: dict[str, Any] = {
        "free_bots": bots.able,
        "units": units,
        "most_free_units": bots.roomiest,
        "bots": bots.names,
    }
    if bots.kept:
        evidence |= {"kept_units": bots.kept, "kept_seconds": _kept_seconds(found)}
        sentence += f"; {plural(bots.kept, 'unit')} kept for its instance, for at most {duration(_kept_seconds(found))}"
    if bots.kept_for_others and not bots.able:
        evidence["kept_for_others"] = bots.kept_for_others
        sentence += f"; {plural(bots.kept_for_others, 'unit')} kept for other instances"
    if bots.of_other_cohorts and not bots.able:
        evidence["units_of_other_cohorts"] = bots.of_other_cohorts
        held = plural(bots.of_other_cohorts, "unit")
        sentence += f"; {held} held by jobs that started while their bot was in another cohort"
    return _on_bots(found, predicates.ROOM, bots.able > 0, sentence, evidence)


def _full(found: Evidence) -> str:
    """Say that no bot has room, and how much the one has that has most. Units that are kept for others are not free."""
    bots, units = found.bots, found.job.units
    if bots.trusted == 1 and not bots.more:
        has = plural(bots.roomiest, "free unit") if bots.roomiest > 0 else "no free unit"
        return f"the only bot that could run it has {has}" + (f", and it takes {units}" if units > 1 else "")
    all_of = f"none of the {bots.trusted} bots that could run it has"
    if bots.more:
        all_of = f"none of at least {plural(bots.trusted, 'bot')} that could run it has"
    if bots.roomiest <= 0:
        return f"{all_of} a free unit" + (f", and it takes {units}" if units > 1 else "")
    return f"{all_of} more than {plural(bots.roomiest, 'free unit')}, and it takes {units}"


def _kept_seconds(found: Evidence) -> float:
    return max(0.0, round(float(found.bots.kept_seconds or 0), 3))


def _assigners(found: Evidence) -> GateVerdict:
    pool, job = found.pool, found.job
    silence = None if pool.silence is None else round(float(pool.silence), 1)
    elsewhere = pool.at_work - pool.working
    where = f"instance '{job.instance_name}' in cohort '{job.cohort_name}'"
    evidence = {
        "working": pool.working,
        "elsewhere": elsewhere,
        "draining": pool.draining,
        "upkeep_seconds_ago": silence,
    }
    if pool.known:
        is_open = pool.working > 0
        sentence = f"{plural(pool.working, 'assigner')} at work"
        if elsewhere:
            sentence += f" for {where}, {elsewhere} only for others"
        if pool.draining:
            sentence += f", {pool.draining} draining"
    else:
        is_open = silence is not None and silence <= DEAD_AFTER
        sentence = f"the last sign of life of an assigner process is {duration(silence or 0)} old"
    if pool.at_work:
        remedy = f"an assigner that serves {where}"
    else:
        remedy = "end the drain of an assigner, or start one" if pool.draining else "start an assigner"
    gate = predicates.ASSIGNERS
    return GateVerdict(gate.name, gate.requirement, is_open, sentence, evidence, remedy)


def _queue_deadline(job: JobEvidence) -> GateVerdict:
    patience = job.patience
    if patience is None:
        return _verdict(job, predicates.QUEUE_DEADLINE, "it may wait for ever")
    left = round(float(patience), 3)
    sentence = (
        f"it may wait for another {duration(left)}" if left > 0 else "its time to wait is over: it will be given up"
    )
    return _verdict(job, predicates.QUEUE_DEADLINE, sentence, left_seconds=left)


def scarcest(found: Evidence) -> Clause:
    """Return the clause of the requirements that leaves the fewest bots.

    Among clauses that equally few bots offer, it is the one without which the most bots match.
    """
    return min(found.clauses, key=lambda clause: (clause.alone, -clause.others))


def _open(job: JobEvidence, gate: Predicate) -> bool:
    return gate.name in job.open_gates


def _verdict(job: JobEvidence, gate: Predicate, sentence: str, *, remedy: str = "", **evidence: Any) -> GateVerdict:
    """The verdict of a gate on the job itself, which the database has judged."""
    remedy = remedy or f"wait until {gate.requirement}"
    return GateVerdict(gate.name, gate.requirement, _open(job, gate), sentence, evidence, remedy)


def _on_bots(
    found: Evidence, gate: Predicate, is_open: bool, sentence: str, evidence: Mapping[str, Any]
) -> GateVerdict:
    """The verdict of a gate on bots; what is missing is a bot that passes all of them."""
    return GateVerdict(gate.name, gate.requirement, is_open, sentence, evidence, "" if is_open else _missing_bot(found))


def _wanted(found: Evidence) -> str:
    properties = found.job.properties
    return escaped(", ".join(f"{name}={value}" for name, values in sorted(properties.items()) for value in values), 300)


def _escaped(clause: Clause) -> str:
    return escaped(str(clause), 100)


def counted_bots(found: Evidence, number: int, noun: str) -> str:
    """Format a number of matching bots, with "at least" if not all of them were counted."""
    return ("at least " if found.bots.more else "") + plural(number, noun)


# Gates of constrained jobs: those that the assigner cycle asks.


def judge_constraints(connection: Connection, job_id: int, rules: Rules) -> list[GateVerdict]:
    """Return the gates on the constraints of the job; none if it is no constrained job.

    The checkers are asked as an assigner asks them. The pauses of an assigner are missing, which only it knows.
    """
    found = constrained.job(connection, job_id)
    if found is None:
        return []
    head, now = found
    admission_state = _admission_state(connection, [head.queue], now, rules)
    if (used := rates.resource_of(head.queue.constraints)) is not None:
        admission_state.refused.update(rules.checkers.ask_limits([used]).refused)
    with suppress(*FAILURES):  # the assigners go on then, too
        rules.checkers.add_pressure(admission_state.advice)
    return _judge_head(head, admission_state)


def judge_each_constraints(
    connection: Connection, job_ids: Sequence[int], rules: Rules
) -> Mapping[int, list[GateVerdict]]:
    """Return the same of each of these jobs that is constrained. Checkers are not asked: a list must not wait for them.

    The state of counters is read once for all of them.
    """
    found = {job_id: one for job_id in job_ids if (one := constrained.job(connection, job_id)) is not None}
    if not found:
        return {}
    queues = {head.queue.id: head.queue for head, _ in found.values()}
    admission_state = _admission_state(connection, [*queues.values()], max(now for _, now in found.values()), rules)
    return {job_id: _judge_head(head, admission_state) for job_id, (head, _) in found.items()}


def _admission_state(
    connection: Connection, queues: Sequence[ConstrainedQueue], now: datetime, rules: Rules
) -> AdmissionState:
    missing = {queue.id: resources.lacking(connection, queue, look=MAX_BOTS_COUNTED) for queue in queues}
    lacking = {queue: name for queue, name in missing.items() if name is not None}
    return admission_rules.read_admission_state(connection, queues, now=now, rules=rules, lacking=lacking)


def _judge_head(head: QueueHead, admission_state: AdmissionState) -> list[GateVerdict]:
    judged = []
    for gate in GATES:
        why = gate.closed_for_queue(head.queue, admission_state) or gate.closed_for_job(head, admission_state)
        used = [admission_state.of(name) for name in (*gate.charges(head.queue), *gate.tokens(head.queue))]
        is_shut = why is not None and any(counter.most == 0 for counter in used)
        remedy = "raise the limit, which is 0" if is_shut else f"wait until {gate.requirement}"
        opens_in = None if why is None else gate.opens_in(head.queue, admission_state)
        known = {"opens_in_seconds": opens_in, "per_second": gate.pace(head.queue, admission_state)}
        evidence = {name: value for name, value in known.items() if value is not None}
        judged.append(GateVerdict(gate.name, gate.requirement, why is None, why or gate.requirement, evidence, remedy))
    return judged


# The cause in the few words of a list


def in_few_words(judged: Sequence[GateVerdict]) -> str | None:
    """Return why a job waits, by the first closed gate in the order of causes; None if every gate is open."""
    cause = next(iter(by_cause(judged)), None)
    if cause is None:
        return None
    match cause.name:
        case predicates.COHORT.name:
            return "no bot of its cohort takes work" if cause.evidence["present"] else "no bot in its cohort"
        case predicates.BACKOFF.name:
            return f"looked at again in {duration(cause.evidence['rest_seconds'] or 0)}"
        case predicates.HEALTHY.name if cause.evidence["draining"]:
            return "each such bot is drained or leaves"
        case name:
            return _FEW_WORDS.get(name, cause.sentence)


_FEW_WORDS = {
    predicates.QUOTA.name: "its quota is used up",
    predicates.REQUIREMENTS.name: "no such bot",
    predicates.SERVES.name: "each such bot is for others",
    predicates.HEALTHY.name: "no such bot is healthy",
    predicates.UNITS.name: "no such bot is large enough",
    predicates.PROBATION.name: "each such bot is on probation",
    predicates.ROOM.name: "no bot has room",
    predicates.ASSIGNERS.name: "no assigner is at work",
}


# What would start a waiting job: one concrete change for each closed gate.


def changes(judged: Sequence[GateVerdict]) -> list[str]:
    """Return the smallest changes that together would start the job; none if every gate is open."""
    closed = {one.name: one.remedy for one in by_cause(judged)}
    if predicates.DEPENDENCIES.name in closed:
        del closed[predicates.STATE.name]  # the job is queued as soon as its dependencies are met
    if _OF_BOTS & closed.keys() and _rests_for_want_of_a_place(judged):
        del closed[predicates.BACKOFF.name]  # the bot that makes the change wakes the queue
    return list(closed.values())


#: The gates on bots, in their order.
_OF_BOTS = {
    gate.name
    for gate in (
        predicates.COHORT, predicates.REQUIREMENTS, predicates.SERVES, predicates.HEALTHY, predicates.UNITS,
        predicates.PROBATION, predicates.ROOM,
    )
}  # fmt: skip


def by_cause(judged: Sequence[GateVerdict]) -> list[GateVerdict]:
    """Return the closed gates in the order in which they are asked, but a rest behind what it follows from.

    A job rests because no place was found for it. If another gate is closed now, that is the cause, and the rest only
    says when the job is looked at again. After an attempt, the rest itself is the cause.
    """
    closed = [one for one in judged if one.is_open is False]
    if not _rests_for_want_of_a_place(closed):
        return closed
    rest = [one for one in closed if one.name == predicates.BACKOFF.name]
    return [one for one in closed if one not in rest] + rest


def _rests_for_want_of_a_place(judged: Sequence[GateVerdict]) -> bool:
    return any(
        one.name == predicates.BACKOFF.name and one.is_open is False and one.evidence["considered"] for one in judged
    )


def _missing_bot(found: Evidence) -> str:
    """Describe the bot that is missing, or what is missing on the bots that come nearest."""
    job, bots = found.job, found.bots
    if not bots.matching:
        return _bot(found)
    if not bots.serving:
        return f"{_bot(found)} that serves instance '{job.instance_name}'"
    if not bots.healthy:
        if bots.leaving:
            return "end the drain of a matching bot, or start another"
        return "a matching bot that is healthy again"
    if not bots.large:
        return f"a matching bot with {_units_text(job.units)}; the largest has {bots.largest}"
    if not bots.trusted:
        return "a success of a matching bot on probation, or the end of that"
    if bots.kept:
        return f"wait at most {duration(_kept_seconds(found))} for what is being freed for its instance"
    missing = job.units - bots.roomiest
    return f"{missing} more free {'unit' if missing == 1 else 'units'} on a matching bot"


def _bot(found: Evidence) -> str:
    """Describe the missing bot, its rarest property first."""
    job = found.job
    clauses: list[Clause] = list(found.clauses)
    if clauses:
        rarest = scarcest(found)
        clauses.remove(rarest)
        clauses.insert(0, rarest)
    parts = [escaped(str(clause), 100) for clause in clauses]
    if job.units > 1:
        parts.append(_units_text(job.units))
    bot = "a bot" + (f" with {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "")
    if len(parts) == 1:
        bot += f" with {parts[0]}"
    return bot + (f" in cohort '{job.cohort_name}'" if job.cohort else "")


def _units_text(units: int) -> str:
    return f"{units} {'unit' if units == 1 else 'units'}"
