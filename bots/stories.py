"""What people are told of jobs, bots and the pool, from the gateway's answers."""

import shlex
from collections.abc import Sequence
from typing import Any

import click

from bots import histories, printing
from bots.histories import between
from bots.printing import Record, table
from schema.states import JobState


def ending(job: Record) -> str:
    """One line: how a final job ended."""
    result = job.get("result") or {}
    parts = [job["id"], job["state"]]
    if job["state"] == JobState.FAILED and result.get("exit_code") is not None:
        parts.append(_exit(result["exit_code"]))
    reason = job.get("reason") or (result.get("reason") if job["state"] != JobState.SUCCEEDED else None)
    if reason:
        parts.append(f"({printing.plain(reason)})")
    if result.get("seconds") is not None:
        parts.append(f"after {printing.seconds(result['seconds'])}")
    return " ".join(parts)


def tell(job: Record) -> None:
    """The story of one job: what it is, what became of it, and every step on the way."""
    result = job.get("result") or {}
    facts: list[tuple[str, Any]] = [
        ("job", job["id"]),
        ("joined", job.get("joined")),
        ("submissions", _sharing(job)),
        ("state", printing.state(job["state"])),
        ("graph", _node_of(job)),
        ("instance", job["instance"]),
        ("label", job["label"]),
        ("command", _cut(shlex.join((job.get("payload") or {}).get("command", [])))),
        ("needs", printing.properties(job["properties"])),
        ("priority", job["priority"]),
        ("units", job["units"]),
        ("locality", job["locality_hint"]),
        ("asks for", _asked(job.get("terms") or {})),
        ("estimated cost", job.get("estimated_cost")),
        ("timeout", None if job["timeout_seconds"] is None else printing.seconds(job["timeout_seconds"])),
        ("queue timeout", _queue_timeout(job)),
        ("attempts", f"{job['attempts']} of {job['max_attempts']}"),
        ("bot", job["bot"]),
        ("why it waits", _waits(job)),
        ("reason", job["reason"]),
        ("exit", None if result.get("exit_code") is None else _exit(result["exit_code"])),
        ("ran for", None if result.get("seconds") is None else printing.seconds(result["seconds"])),
        ("output", _output(result)),
    ]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        if value not in (None, "", "-"):
            printing.line(f"{name:<{width}}  ", value)
    click.echo()
    histories.tell(job["events"])


def list_jobs(jobs: Sequence[Record]) -> None:
    """One line for each job."""
    table(
        ("id", "state", "instance", "label", "priority", "attempts", "bot", "waited", "ran", "reason"),
        (
            (
                job["id"],
                printing.state(job["state"]),
                job["instance"],
                job["label"],
                job["priority"],
                job["attempts"],
                job["bot"],
                printing.seconds(between(job["created_at"], job["started_at"])),
                printing.seconds(between(job["started_at"], job["finished_at"])),
                job["reason"],
            )
            for job in jobs
        ),
    )


def _standing(bot: Record) -> str:
    """A bot's status, or why it gets less than others although that is ok."""
    if bot["status"] != "ok":
        return str(bot["status"])
    return "draining" if bot["draining"] else "probation" if bot["probation"] is not None else "ok"


def show_bot(bot: Record) -> None:
    """Everything about one bot."""
    facts = (
        ("status", printing.state(_standing(bot))),
        ("units", f"{bot['in_use']} of {bot['capacity']} in use, {bot['leases']} leases"),
        ("cohort", bot["cohort"]),
        ("properties", printing.properties(bot["properties"])),
        ("expires in", printing.seconds(bot["expires_in"])),
        ("probation", printing.seconds(bot["probation"])),
        ("success", _share(bot["success_rate"])),
        ("latency", _latency(bot)),
    )
    for name, value in facts:
        printing.line(f"{name:12}", value)
    if bot["success"]:
        click.echo()
        table(
            ("label", "successes", "failures", "given back", "success", "latency"),
            (
                (each["label"], *(f"{each[name]:.1f}" for name in ("successes", "failures", "returned")),
                 _share(each["success_rate"]), _latency(each))
                for each in bot["success"]
            ),
        )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _latency(row: Record) -> str:
    return printing.seconds(None if row["avg_latency_ms"] is None else row["avg_latency_ms"] / 1000)


def list_bots(bots: Sequence[Record]) -> None:
    """One line for each bot."""
    table(
        (
            "bot",
            "status",
            "in use",
            "capacity",
            "leases",
            "priority",
            "cohort",
            "instance",
            "pool",
            "labels",
            "properties",
            "expires in",
        ),
        (
            (
                bot["name"],
                printing.state(_standing(bot)),
                bot["in_use"],
                bot["capacity"],
                bot["leases"],
                bot["priority"],
                bot["cohort"],
                bot["instance"] or ("-" if bot["pool"] else "every"),
                bot["pool"],
                " ".join(bot["labels"]),
                printing.properties(bot["properties"]),
                printing.seconds(bot["expires_in"]),
            )
            for bot in bots
        ),
    )


def list_quotas(quotas: Sequence[Record]) -> None:
    """One line for each quota; all numbers are units."""
    table(
        ("cohort", "instance", "usage", "min", "max", "effective max"),
        (
            (
                each["cohort"],
                each["instance"],
                each["usage"],
                each["min_quota"],
                each["max_quota"],
                each["effective_max"],
            )
            for each in quotas
        ),
    )


def show_status(found: Record) -> None:
    """Jobs by instance and state, bots, rates, waits and upkeep."""
    states = [state.value for state in JobState if state.value in found["jobs"]]
    least = set(found["at_least"])

    def cells(counts: Record) -> list[str]:
        return [f"{counts.get(state, 0)}{'+' if state in least else ''}" for state in states]

    rows = [(name, *cells(counts)) for name, counts in found["instances"].items()]
    if rows:
        total = ("all", *cells(found["jobs"]))
        table(("instance", *states), [*rows, total] if len(rows) > 1 else rows)
    else:
        click.echo("no jobs yet")
    if least & set(states):
        kept = found["finished_estimate"]
        about = "" if kept is None else f"; about {kept:,} finished jobs are kept"
        click.echo(f"+ at least: not all of them were counted{about}")
    click.echo()
    bots = ", ".join(f"{seen['bots']} {status}" for status, seen in found["bots"].items()) or "none"
    click.echo(f"bots      {bots}; {found['in_use']} of {found['capacity']} units in use")
    if len(found["swarm"]) > 1 or any(one["avg_success_rate"] is not None for one in found["swarm"]):
        click.echo()
        _swarm(found["swarm"])
    if found["quotas"]:
        click.echo()
        list_quotas(found["quotas"])
        click.echo()
    _pace(found["rates"], found["waits"])
    if found["oldest_queued_seconds"] is not None:
        oldest = printing.seconds(found["oldest_queued_seconds"])
        click.echo(f"oldest queued job: {'at least ' if 'oldest_queued_seconds' in least else ''}{oldest}")
    if found["unmatchable"]:
        number = f"{'at least ' if 'unmatchable' in least else ''}{found['unmatchable']}"
        click.echo(f"{number} queued jobs are unmatchable: no present bot could run them (see show ID)")
    for tick in found["upkeep"]:
        grace = ", in grace" if tick["grace"] else ""
        click.echo(f"upkeep    {printing.plain(tick['name'])} {printing.seconds(tick['age_seconds'])} ago{grace}")


def _swarm(swarm: Sequence[Record]) -> None:
    """One line for each cohort's bots."""
    columns = ("total", "idle", "busy", "offline", "on_probation", "total_in_flight")
    averages = ("avg_load", "avg_success_rate", "concentration")
    table(
        ("cohort", *(name.replace("_", " ") for name in columns), "load", "success", "concentration"),
        (
            (one["cohort"], *(one[name] for name in columns),
             *(_share(one[name]) for name in averages))
            for one in swarm
        ),
    )  # fmt: skip


def _pace(rates: Record, waits: Record) -> None:
    """How fast jobs come and go, and how long they waited for their bot."""
    when = "minute" if rates["span"] >= 60 else printing.seconds(rates["span"])
    click.echo(
        f"per second, last {when}: {rates['submitted']:g} submitted, {rates['granted']:g} granted, "
        f"{rates['started']:g} started, {rates['finished']:g} finished"
    )
    parts = [f"{rates[name]:g} {name}" for name in ("succeeded", "failed", "cancelled", "dead") if rates[name]]
    if parts:
        click.echo(f"by outcome: {', '.join(parts)}")
    if waits["jobs"]:
        told = ", ".join(f"{name} {printing.seconds(waits[name])}" for name in ("p50", "p95", "p99"))
        click.echo(f"from the queue to a bot, {waits['jobs']} jobs: {told}")


def _cut(text: str, limit: int = 200) -> str:
    shown = printing.plain(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _sharing(job: Record) -> str | None:
    if job.get("dedup_key") is None:
        return None
    return f"{job['submissions']} want it, with the deduplication key '{printing.plain(job['dedup_key'])}'"


def _asked(terms: Record) -> str:
    return "; ".join(f"{name} {_listed(value)}" for name, value in terms.items())


def _listed(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key} {amount}" for key, amount in value.items()]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _node_of(job: Record) -> str | None:
    graph = job.get("graph")
    return None if graph is None else f"node {graph['node']} of {printing.plain(graph['name'])}, {graph['id']}"


def _queue_timeout(job: Record) -> str | None:
    deadline = job.get("queue_deadline")
    if deadline is None:
        return None
    return f"{printing.seconds(between(job['created_at'], deadline))}, until {deadline}"


def _waits(job: Record) -> str | None:
    waiting = job.get("waiting")
    if waiting is None:
        return None
    return f"unmatchable: {waiting['sentence']}" if waiting["unmatchable"] else str(waiting["sentence"])


def _exit(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"killed by signal {-code}"


def _output(result: Record) -> str | None:
    if not result.get("output_bytes"):
        return None
    return f"{result['output_bytes']} bytes" + (", cut" if result.get("output_truncated") else "")
