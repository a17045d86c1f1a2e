"""What would start a waiting job: one concrete change for each thing that keeps it from running."""

from collections.abc import Sequence

from assigner.gates import Judged, scarcest
from schema import gates
from schema.evidence import Clause, Evidence
from schema.gates import Gate
from schema.limits import escaped

_OF_BOTS = frozenset(
    gate.name
    for gate in (
        gates.COHORT,
        gates.REQUIREMENTS,
        gates.SERVES,
        gates.HEALTHY,
        gates.UNITS,
        gates.PROBATION,
        gates.ROOM,
    )
)


def changes(found: Evidence, judged: Sequence[Judged]) -> list[str]:
    """The smallest changes that would start the job, all of which it takes; none if nothing stands in its way."""
    closed = [one.gate for one in judged if one.is_open is False]
    if gates.RESERVATION in closed and gates.BACKOFF in closed:
        closed.remove(gates.BACKOFF)  # it rests for as long as the bot is being freed
        closed = [gate for gate in closed if gate is not gates.ROOM]
    if gates.DEPENDENCIES in closed:
        closed.remove(gates.STATE)  # it is queued as soon as they are met
    return [_change(gate, found) for gate in closed]


def _change(gate: Gate, found: Evidence) -> str:
    job, bots = found.job, found.bots
    match gate.name:
        case gates.DEPENDENCIES.name if job["hopeless"] is not None:
            return "nothing will: cancel it, or submit its graph again"
        case gates.DEPENDENCIES.name:
            return f"wait for {job['pending_deps']} of the nodes that it depends on"
        case gates.STATE.name:
            return "release it"
        case gates.BACKOFF.name:
            return f"wait {max(0.0, float(job['rest'])):.1f} s"
        case gates.RESERVATION.name:
            return f"wait at most {round(float(job['reserved_for']), 3):.1f} s for the bot that is being freed for it"
        case gates.DRAIN.name:
            return f"end the drain of instance '{job['instance_name']}'"
        case gates.QUOTA.name:
            return _raise_maximum(found)
        case gates.ASSIGNERS.name if found.pool["at_work"]:
            return f"an assigner that serves instance '{job['instance_name']}' in cohort '{job['cohort_name']}'"
        case gates.ASSIGNERS.name:
            return "end the drain of an assigner, or start one" if found.pool["draining"] else "start an assigner"
        case name if name not in _OF_BOTS:
            return f"wait until {gate.asks}"
        case _ if not bots["matching"]:
            return _bot(found)
        case _ if not bots["serving"]:
            return f"{_bot(found)} that serves instance '{job['instance_name']}'"
        case _ if not bots["healthy"]:
            if bots["leaving"]:
                return "end the drain of a matching bot, or start another"
            return "a matching bot that is healthy again"
        case _ if not bots["large"]:
            return f"a matching bot with {_units(job['units'])}; the largest has {bots['largest']}"
        case _ if not bots["trusted"]:
            return "a success of a matching bot on probation, or the end of that"
        case _:
            missing = job["units"] - bots["roomiest"]
            return f"{missing} more free {'unit' if missing == 1 else 'units'} on a matching bot"


def _raise_maximum(found: Evidence) -> str:
    """Its maximum so that, less the evictions of late, the job fits beside what is used."""
    job = found.job
    needed = job["usage"] + job["units"] + job["evicted_lately"]
    who = f"{job['instance_name']} in cohort {job['cohort_name']}"
    return f"raise the maximum of {who} from {job['max_quota']} to {needed}"


def _bot(found: Evidence) -> str:
    """The bot that is missing, its rarest property first."""
    job = found.job
    clauses: list[Clause] = list(found.clauses)
    if clauses:
        rarest = scarcest(found)
        clauses.remove(rarest)
        clauses.insert(0, rarest)
    parts = [escaped(str(clause), 100) for clause in clauses]
    if job["units"] > 1:
        parts.append(_units(job["units"]))
    bot = "a bot" + (f" with {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "")
    if len(parts) == 1:
        bot += f" with {parts[0]}"
    return bot + (f" in cohort '{job['cohort_name']}'" if job["cohort"] else "")


def _units(units: int) -> str:
    return f"{units} {'unit' if units == 1 else 'units'}"
