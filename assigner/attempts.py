"""Why a job ran where it ran: its attempts, the decision behind the latest, and the receipts of preemption.

Pure functions of the job's events and leases. The bots that had the job are told to everybody who sees it; what is
told of preemptions to a tenant leaves out other tenants.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from schema.limits import escaped
from schema.states import JobState

Row = Mapping[str, Any]

_HELD = (JobState.LEASED, JobState.RUNNING, JobState.CANCELLING)
#: Moves whose details are the receipt of a preemption.
RECEIPTS = ("preempt", "preempted")
_PARTS = ("priority", "capacity", "locality", "success", "success_rate", "load")


def attempts(leases: Sequence[Row], events: Sequence[Row]) -> list[dict[str, Any]]:
    """Each lease of the job, oldest first: where, by whom, and how it ended."""
    grants = {event["fence"]: event for event in events if event["move"] == "grant"}
    endings = dict(_endings(events))
    return [
        {
            "fence": lease["fence"],
            "bot": lease["bot"],
            "assigner": lease["assigner"],
            "strategy": lease["strategy"],
            "granted_at": lease["granted_at"],
            "started_at": lease["acknowledged_at"],
            "ended_at": lease["ended_at"],
            "decision": dict((grants.get(lease["fence"]) or {}).get("details") or {}),
            "sentence": _ended(lease, endings.get(lease["fence"])),
        }
        for lease in leases
    ]


def receipts(events: Sequence[Row], *, instance: str, everything: bool) -> list[dict[str, Any]]:
    """What the job was preempted for, and what it preempted."""
    return [
        {
            "move": event["move"],
            "at": event["at"],
            "receipt": event["details"] if everything else own_part(event["details"] or {}, instance),
            "sentence": _preemption(event["move"], event["details"] or {}, instance=instance, everything=everything),
        }
        for event in events
        if event["move"] in RECEIPTS
    ]


def told(events: Sequence[Row], *, instance: str, everything: bool) -> list[Row]:
    """The events as a caller may see them: receipts without other tenants, unless it may see everything."""
    if everything:
        return list(events)
    return [
        {**event, "details": own_part(event["details"] or {}, instance)} if event["move"] in RECEIPTS else event
        for event in events
    ]


def own_part(receipt: Row, instance: str) -> dict[str, Any]:
    """A receipt of preemption without what belongs to other tenants, and without the bot."""
    kept = {name: value for name, value in receipt.items() if name not in ("preemptor", "victims", "bot")}
    preemptor = receipt.get("preemptor") or {}
    if preemptor.get("instance") == instance:
        kept["preemptor"] = preemptor
    victims = [each for each in receipt.get("victims") or () if each.get("instance") == instance]
    return {**kept, "victims": victims} if victims else kept


def why_there(attempt: Mapping[str, Any]) -> str:
    """One sentence: by what rule the attempt went to its bot."""
    decision, strategy = attempt["decision"], attempt["strategy"]
    where = f"bot '{attempt['bot']}'" if attempt["bot"] else "its bot"
    if strategy == "proactive":
        return f"{where} asked for more work when it had finished something, and this was the most urgent it may have"
    if strategy == "preemption":
        return f"{where} was freed for it by a preemption"
    if "candidates" not in decision:
        return f"{where} was chosen by the strategy '{escaped(strategy, 63)}'"
    score = decision.get("score") or {}
    parts = ", ".join(f"{part} {score[part]:+g}" for part in _PARTS if isinstance(score.get(part), int | float))
    best = f" with {score['total']:g} points ({parts})" if "total" in score else ""
    found = f"{where} was the best of {decision['candidates']} candidates{best}"
    match decision.get("round"):
        case 0:
            return f"{found}, of all that were free, after a sample had left it without one"
        case int() as number if number > 1:
            return f"{found}, in round {number}, after the samples before it had left it without one"
        case _:
            return found


def _endings(events: Iterable[Row]) -> Iterable[tuple[int, Row]]:
    """Fence of a grant → the event that ended its lease."""
    fence: int | None = None
    for event in events:
        if event["move"] == "grant":
            fence = event["fence"]
        elif fence is not None and event["from"] in _HELD and event["to"] not in _HELD:
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
    below = f"below its minimum of {preemptor.get('min_quota')} with {preemptor.get('usage')} units"
    rule = f"by the rule {receipt.get('rule')}"
    if move == "preempted":
        if not everything and preemptor.get("instance") != instance:
            return f"it was asked to stop for a job of an instance below its minimum, {rule}"
        who = f"job {preemptor.get('job')} of instance '{preemptor.get('instance')}'"
        return f"it was asked to stop for {who}, which was {below}, {rule}"
    where = f" on bot '{receipt.get('bot')}'" if everything else ""
    freed = sum(each.get("units", 0) for each in victims)
    jobs = f"{len(victims)} {'job was' if len(victims) == 1 else 'jobs were'} asked to stop"
    told = f"{jobs}{where} for it" if everything else "room was made for it"
    waited = preemptor.get("waited_seconds")
    numbers = f", {freed} units" if everything else ""
    return f"{told}{numbers}, {rule}: its instance was {below}, and it had waited {waited} s"
