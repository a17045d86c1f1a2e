"""The history of a job for people: every move with its actor, and its evidence on one line."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from bots import printing
from bots.printing import Record, table


def tell(events: Sequence[Record]) -> None:
    """One line for each move, oldest first."""
    rows = []
    previous: str | None = None
    for event in events:
        step = f"{event['from']} -> {event['to']}" if event["from"] else f"-> {event['to']}"
        after = printing.seconds(between(previous, event["at"]))
        rows.append((event["at"], after, event["move"], step, event["actor"], evidence(event)))
        previous = event["at"]
    table(("at", "after", "move", "state", "by", "details"), rows)


def evidence(event: Record) -> str:
    """What the move rested on, on one line: a receipt as a sentence, anything else as `name=value` pairs."""
    details = event.get("details") or {}
    match event["move"]:
        case "preempt" | "preempted" if "rule" in details:
            return _receipt(event["move"], details)
        case _:
            return " ".join(_pairs("", details))


def between(start: str | None, end: str | None) -> float | None:
    """Seconds from one time to another, not below 0; None if either is not known."""
    if start is None or end is None:
        return None
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())


def _receipt(move: str, receipt: Record) -> str:
    preemptor, victims = receipt.get("preemptor"), receipt.get("victims") or []
    parts = []
    if move == "preempted":
        whom = f"job {preemptor['job']} of {preemptor['instance']}" if preemptor else "a job of another instance"
        parts.append(f"asked to stop for {whom}")
    else:
        stopped = ", ".join(f"{each['job']} of {each['instance']} ({each['units']} units)" for each in victims)
        parts.append(f"asked to stop: {stopped}" if stopped else "room is being made for it")
    if receipt.get("bot"):
        parts.append(f"on {receipt['bot']}")
    parts.append(f"rule {receipt['rule']}")
    if preemptor:
        parts += [
            f"usage {preemptor.get('usage')} below the minimum of {preemptor.get('min_quota')}",
            f"waited {_value(preemptor.get('waited_seconds'))} s",
        ]
    return "; ".join(parts)


def _pairs(prefix: str, value: object) -> list[str]:
    """Nested parts as `name.part=value`; the elements of a list by their number."""
    parts: Sequence[tuple[Any, object]] = ()
    match value:
        case Mapping():
            parts = list(value.items())
        case list() if any(isinstance(each, dict | list) for each in value):
            parts = list(enumerate(value))
        case _:
            return [f"{prefix}={_value(value)}"]
    return [pair for name, each in parts for pair in _pairs(f"{prefix}.{name}" if prefix else str(name), each)]


def _value(value: object) -> str:
    match value:
        case float():
            return f"{value:g}"
        case list():
            return ",".join(map(_value, value)) or "-"
        case None:
            return "-"
        case True | False:
            return "yes" if value else "no"
        case _:
            return str(value)
