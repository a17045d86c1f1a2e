"""The readable output of the commands: tables, jobs with their history, bots and the pool's status.

One module because all commands share the table, the cut of long texts and the words for numbers, times and states.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from leasehold import wire
from leasehold.states import EndKind, JobState, end_kind

from schema import readable
from schema.readable import Column, plural, table

if TYPE_CHECKING:
    from rich.text import Text

Record = Mapping[str, Any]

_COLOURS = {
    "blocked": "magenta",
    "blocked for ever": "red",
    "stalled": "red",
    "queued": "cyan",
    "parked": "magenta",
    "deferred": "magenta",
    "leased": "blue",
    "running": "blue",
    "cancelling": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "dead": "red",
    "ok": "green",
    "unhealthy": "red",
    "draining": "yellow",
    "probation": "yellow",
    "gone": "dim",
}


#: A time with an offset among the details of a move.
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
#: Characters of a job's result that `show` prints; `result` prints all.
MAX_SHOWN_RESULT = 2000


def terminal() -> bool:
    """Return True if standard error is a terminal; progress is shown only then."""
    return sys.stderr.isatty()


def state(name: object) -> "Text":
    """Return a state's name in its colour."""
    return styled(str(name), _COLOURS.get(str(name), ""))


def styled(text: str, style: str) -> "Text":
    """Return a text in a style, for a table or a line."""
    from rich.text import Text  # here and below: only what prints a table takes the time to import it

    return Text(text, style=style)


def line(start: str, value: object) -> None:
    """Print one line: a heading and a value. A state keeps its colour."""
    from rich.text import Text

    readable.print_line(start, value if isinstance(value, Text) else str(value))


def seconds(value: float | None) -> str:
    """Format a duration in at most two units."""
    return "-" if value is None else readable.duration(value)


def expiry(value: float | None) -> str:
    """Format the time until something expires, or since it has."""
    return f"{seconds(-value)} ago" if value is not None and value < 0 else seconds(value)


def moment(value: str | None) -> str:
    """Format a time: on a terminal in the zone of this machine, otherwise as the gateway gives it, in UTC."""
    return "-" if value is None else readable.moment(value)


def properties(values: Mapping[str, Any] | None) -> str:
    """Format properties as `key=value` pairs; a key with several values appears several times."""
    found = []
    for key, value in sorted((values or {}).items()):
        found += [f"{key}={each}" for each in ([value] if isinstance(value, str) else value)]
    return " ".join(found) or "-"


def plain(value: object) -> str:
    """Escape unprintable characters, so that the text cannot control the terminal."""
    return wire.printable(str(value))


# The history of a job


def print_events(events: Sequence[Record]) -> None:
    """Print one line for each move, oldest first."""
    rows = []
    previous: str | None = None
    for event in events:
        step = f"{event['from']} -> {event['to']}" if event["from"] else f"-> {event['to']}"
        after = seconds(between(previous, event["at"]))
        rows.append((moment(event["at"]), after, event["move"], step, event["actor"], evidence(event)))
        previous = event["at"]
    table(("at", "after", "move", "state", Column("by", leaves=1), Column("details", folds=True)), rows)


def evidence(event: Record) -> str:
    """Format a move's details on one line: a receipt of preemption as a sentence, others as `name=value` pairs."""
    details = event.get("details") or {}
    match event["move"]:
        case "preempt" | "preempted" if "rule" in details:
            return _receipt(event["move"], details)
        case _:
            return " ".join(_pairs("", details))


def between(start: str | None, end: str | None) -> float | None:
    """Return the seconds between two times, at least 0; None if either time is unknown."""
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
        stopped = ", ".join(
            f"{each['job']} of {each['instance']} ({plural(each['units'], 'unit')})" for each in victims
        )
        parts.append(f"asked to stop: {stopped}" if stopped else "room is being made for it")
    if receipt.get("bot"):
        parts.append(f"on {receipt['bot']}")
    parts.append(f"rule {receipt['rule']}")
    if preemptor:
        parts += [
            f"usage {preemptor.get('usage')} below the minimum of {preemptor.get('min_quota')}",
            f"waited {seconds(preemptor.get('waited_seconds'))}",
        ]
    return "; ".join(parts)


def _pairs(prefix: str, value: object) -> list[str]:
    """Flatten nested values to `name.part=value`; the elements of a list have numbers as names."""
    parts: Sequence[tuple[Any, object]] = ()
    match value:
        case Mapping():
            parts = list(value.items())
        case list() if any(isinstance(each, dict | list) for each in value):
            parts = list(enumerate(value))
        case _:
            return [_pair(prefix, value)]
    return [pair for name, each in parts for pair in _pairs(f"{prefix}.{name}" if prefix else str(name), each)]


def _pair(name: str, value: object) -> str:
    """Format a detail; one in seconds as a duration, under a name without its unit."""
    *path, last = name.split(".")
    if not isinstance(value, int | float) or isinstance(value, bool) or not last.endswith("seconds"):
        return f"{name}={_value(value)}"
    return ".".join([*path, last.removesuffix("seconds").rstrip("_") or "time"]) + f"={seconds(value)}"


def _value(value: object) -> str:
    match value:
        case float():
            return readable.number(value)
        case list():
            return ",".join(map(_value, value)) or "-"
        case None:
            return "-"
        case True | False:
            return "yes" if value else "no"
        case str() if _TIME.fullmatch(value):
            return moment(value)
        case _:
            return str(value)


# Jobs, bots and the pool


#: How reasons begin that an agent has derived from the exit code alone.
_TELL_THE_CODE = ("exit code ", "killed by SIG")


def _why(job: Record) -> str | None:
    """Why a job ended so; of a dead one also what its last attempt has told."""
    reason, told = job.get("reason"), (job.get("result") or {}).get("reason")
    if job["state"] == JobState.DEAD and reason and told and told not in reason:
        return f"{reason}; its last attempt: {told}"
    return reason or told


def ending(job: Record) -> str:
    """Describe on one line how a final job ended."""
    result = job.get("result") or {}
    parts = [job["id"], job["state"]]
    reason = _why(job)
    if reason and reason.startswith(_TELL_THE_CODE):
        parts.append(plain(reason))
        reason = None
    elif (
        job["state"] == JobState.FAILED
        and result.get("exit_code") is not None
        and end_kind(job["state"], reason) is not EndKind.TIMEOUT  # whose signal says no more
    ):
        parts.append(_exit(result["exit_code"]))
    if reason:
        parts.append(f"({plain(reason)})")
    if result.get("seconds") is not None:
        parts.append(f"after {seconds(result['seconds'])}")
    return " ".join(parts)


def print_job(job: Record, left: Sequence[object] = ()) -> None:
    """Print one job: its request, its state, how it ended, the result that it `left`, and its history."""
    result = job.get("result") or {}
    facts: list[tuple[str, Any]] = [
        ("job", job["id"]),
        ("joined", job.get("joined")),
        ("submissions", _sharing(job)),
        ("state", state(job["state"])),
        ("graph", _node_of(job)),
        ("instance", job["instance"]),
        ("label", job["label"]),
        ("command", _cut(shlex.join((job.get("payload") or {}).get("command", [])))),
        ("arguments", arguments_of(job.get("payload") or {})),
        ("needs", properties(job["properties"])),
        ("prefers", _preferred(job)),
        ("metadata", properties(job.get("metadata"))),
        ("priority", job["priority"]),
        ("units", job["units"]),
        ("locality", job["locality_hint"]),
        ("service level", job.get("service_level")),
        ("asks for", _constraints_text(job.get("terms") or {})),
        ("estimated cost", job.get("estimated_cost")),
        ("timeout", None if job["timeout_seconds"] is None else seconds(job["timeout_seconds"])),
        ("queue timeout", _queue_timeout(job)),
        ("attempts", f"{job['attempts']} of {job['max_attempts']}"),
        ("bot", job["bot"]),
        ("policy", job.get("policy") and f"version {job['policy']}"),
        ("why it waits", _waits(job)),
        ("forecast", (job.get("forecast") or {}).get("sentence")),
        ("progress", progress(job)),
        ("reason", _why(job) if job["state"] == JobState.DEAD else job["reason"]),
        ("exit", None if result.get("exit_code") is None else _exit(result["exit_code"]).removeprefix("exit ")),
        ("ran for", readable.run_time(job)),
        ("output", _output(result)),
        ("result", _result(result, left)),
    ]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        if value not in (None, "", "-"):
            line(f"{name:<{width}}  ", value)
    click.echo()
    print_events(job["events"])


def progress(job: Record) -> str | None:
    """Return how far a job says that it is, with its text; None if it says nothing."""
    told = job.get("progress") if job["state"] != JobState.SUCCEEDED else None
    return None if told is None else f"{told['share']:.0%} {wire.printable(told['text'])}".rstrip()


def _result(ended: Record, left: Sequence[object]) -> str | None:
    """Return the beginning of a job's result, of a task that failed its error.

    Where a job has none, a bot may say why in the reason of a success.
    """
    if not left:
        return ended.get("reason") if ended.get("exit_code") == 0 else None
    match left[0]:
        case {"error": {"type": str(kind), "message": str(message), "traceback": str()}}:  # of a task
            return _cut(f"{kind}: {message}", MAX_SHOWN_RESULT)
        case document:
            return _cut(json.dumps(document, ensure_ascii=False), MAX_SHOWN_RESULT)


def _preferred(job: Record) -> str | None:
    preferred, until = job.get("preferred_properties"), job.get("prefer_until")
    if not preferred:
        return None
    return properties(preferred) + (f", only such bots until {moment(until)}" if until else "")


#: What a list of jobs shows. On a narrow terminal the attempts leave first, then the priority, the label, the instance
#: and the bot.
_JOBS = (
    Column("id"),
    Column("state"),
    Column("command", least=20, middle=True),
    Column("waited"),
    Column("ran"),
    Column("reason", least=16),
    Column("bot", leaves=5),
    Column("instance", leaves=4),
    Column("label", leaves=3),
    Column("priority", leaves=2),
    Column("attempts", leaves=1),
)
#: What is told beside it if it was asked for, and what a list shows only if it is chosen.
_STARTS = Column("starts", least=16)
_CHOSEN = (_STARTS, Column("submitted"), Column("metadata", least=16), Column("units"))
#: The names by which columns of a list of jobs are chosen.
COLUMNS = tuple(each.title for each in (*_JOBS, *_CHOSEN))


def list_jobs(jobs: Sequence[Record], chosen: Sequence[str] = ()) -> None:
    """Print one line for each job: the columns that are chosen, else the usual ones, and forecasts if any has one."""
    shown = [each for each in (*_JOBS, *_CHOSEN) if each.title in chosen] if chosen else [*_JOBS]
    if chosen:
        # What was asked for stays, and a long command is told whole where there is room.
        shown = [replace(each, leaves=0) for each in sorted(shown, key=lambda each: chosen.index(each.title))]
    elif any(job.get("forecast") for job in jobs):
        shown.insert(6, _STARTS)
    ids = readable.short_ids([job["id"] for job in jobs])
    rows = [_row(short, job, limit=None if chosen else 100) for short, job in zip(ids, jobs, strict=True)]
    table(shown, [[row[each.title] for each in shown] for row in rows], empty="No job passes the filter.")


def _row(short: str, job: Record, *, limit: int | None) -> Record:
    """What a list shows of a job, by column. limit: the most characters of its command."""
    command = plain(in_words(job["command"], job.get("arguments")))
    return {
        "id": short,
        "state": state(job["state"]),
        "command": command if limit is None else readable.without_middle(command, limit),
        "waited": None if _starts_later(job) else seconds(job["waited_seconds"]),
        "ran": seconds(job["ran_seconds"]),
        "reason": _few_words(job),
        "starts": _starts(job.get("forecast")),
        "bot": job["bot"],
        "instance": job["instance"],
        "label": job["label"],
        "priority": job["priority"],
        "attempts": f"{job['attempts']} of {job['max_attempts']}",
        "submitted": moment(job["created_at"]),
        "metadata": properties(job.get("metadata")),
        "units": job["units"],
    }


def _starts_later(job: Record) -> bool:
    """True if a job has not been ready for a moment yet."""
    return not job["waited_seconds"] and job["started_at"] is None


def _few_words(job: Record) -> str | None:
    """Return why a job waits or how it ended, without what its state says already."""
    why: str | None = job["why"]
    return why.removeprefix(f"{job['state']} ") if why else why


def _starts(forecast: Record | None) -> str | None:
    """A forecast in few words."""
    if forecast is None:
        return None
    if forecast["seconds"] is None:
        earliest = forecast.get("earliest_seconds")
        return "not known" if earliest is None else f"in {seconds(earliest)} at the earliest"
    return f"in {seconds(forecast['seconds'])}, 90% within {seconds(forecast['upper_seconds'])}"


def in_words(command: Sequence[str], arguments: str | None = None) -> str:
    """Return a command as a shell takes it, or the task that it calls, with its arguments if they are known."""
    if len(command) != 3 or command[0] != wire.COMMAND:
        return shlex.join(command)
    return command[2] if arguments is None else f"{command[2]}({arguments})"


def arguments_of(payload: Record) -> str | None:
    """Return the arguments of a task's call in words, cut in their middle; None for another command."""
    command, stdin = payload.get("command"), payload.get("stdin")
    if not isinstance(command, list) or not isinstance(stdin, str) or command[:1] != [wire.COMMAND]:
        return None
    return readable.call_arguments(stdin)


def show_summary(found: Record) -> None:
    """Print the sum of jobs with the same metadata."""
    unknown = found["unestimated"]
    left = seconds(found["remaining_seconds"]) + (
        f", and {plural(unknown, 'job')} without an estimate" if unknown else ""
    )
    facts = (
        ("jobs", f"{sum(found['jobs'].values()):,}{' of the newest; there are more' if found['more'] else ''}"),
        *((f"  {name}", f"{number:,}") for name, number in sorted(found["jobs"].items())),
        ("first queued", moment(found["first_queued_at"])),
        ("last ended", moment(found["last_ended_at"])),
        ("run time", seconds(found["run_seconds"])),
        ("unfinished", f"{found['unfinished']:,}"),
        ("run time left", left),
    )
    for name, value in facts:
        line(f"{name:14}", value)


def _bot_status(bot: Record) -> str:
    """Return a bot's status; for an `ok` bot, whether it is draining or on probation."""
    if bot["status"] != "ok":
        return str(bot["status"])
    return "draining" if bot["draining"] else "probation" if bot["probation"] is not None else "ok"


def _process(bot: Record) -> str:
    """Tell the agent's process. Other bots than agents tell none."""
    return "not told" if bot["pid"] is None else f"{bot['pid']} on {plain(bot['host'] or 'an unknown host')}"


def version(told: str | None) -> str:
    """Tell the version of a bot's software. Older bots tell none."""
    return "not known" if told is None else plain(told)


def show_bot(bot: Record) -> None:
    """Print one bot."""
    facts = (
        ("status", state(_bot_status(bot))),
        ("process", _process(bot)),
        ("version", version(bot.get("version"))),
        ("units", f"{bot['in_use']:,} of {bot['capacity']:,} in use, {plural(bot['leases'], 'lease')}"),
        ("cohort", bot["cohort"]),
        ("properties", properties(bot["properties"])),
        ("exclusive", " ".join(bot["exclusive"]) or "-"),
        ("expires in", expiry(bot["expires_in"])),
        ("probation", seconds(bot["probation"])),
        ("success", _share(bot["success_rate"])),
        ("latency", _latency(bot)),
    )
    for name, value in facts:
        line(f"{name:12}", value)
    if bot["success"]:
        click.echo()
        table(
            ("label", "successes", "failures", "given back", "success", "latency"),
            (
                (each["label"], *(f"{each[name]:,.1f}" for name in ("successes", "failures", "returned")),
                 _share(each["success_rate"]), _latency(each))
                for each in bot["success"]
            ),
        )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _latency(row: Record) -> str:
    return seconds(None if row["avg_latency_ms"] is None else row["avg_latency_ms"] / 1000)


#: What a list of bots shows. Name, status, host and process stay on every terminal.
_BOTS = (
    Column("bot"),
    Column("status"),
    Column("host"),
    Column("pid"),
    Column("version", leaves=10),
    Column("units in use", leaves=9),
    Column("leases", leaves=8),
    Column("cohort", leaves=7),
    Column("properties", leaves=6, least=16),
    Column("instance", leaves=5),
    Column("pool", leaves=4),
    Column("labels", leaves=3),
    Column("priority", leaves=2),
    Column("expires in", leaves=1),
)


def list_bots(bots: Sequence[Record]) -> None:
    """Print one line for each bot."""
    table(
        _BOTS,
        (
            (
                bot["name"],
                state(_bot_status(bot)),
                bot.get("host"),
                None if bot.get("pid") is None else str(bot["pid"]),
                version(bot.get("version")),
                f"{bot['in_use']:,} of {bot['capacity']:,}",
                bot["leases"],
                bot["cohort"],
                properties(bot["properties"]),
                bot["instance"] or ("-" if bot["pool"] else "every"),
                bot["pool"],
                " ".join(bot["labels"]),
                bot["priority"],
                expiry(bot["expires_in"]),
            )
            for bot in bots
        ),
    )


def list_quotas(quotas: Sequence[Record]) -> None:
    """Print one line for each quota; all numbers are units."""
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


#: States that leave the status on a narrow terminal, the first ones first.
_STATES_LEAVE = {state: n for n, state in enumerate(("succeeded", "cancelled", "deferred", "parked", "blocked"), 1)}


def show_status(found: Record) -> None:
    """Print the pool's status: jobs by instance and state, bots, rates, waits and upkeep."""
    states = [state.value for state in JobState if state.value in found["jobs"]]
    least = set(found["at_least"])

    def cells(counts: Record) -> list[str]:
        return [f"{counts.get(state, 0):,}{'+' if state in least else ''}" for state in states]

    rows = [(name, *cells(counts)) for name, counts in found["instances"].items()]
    if rows:
        total = ("all", *cells(found["jobs"]))
        titles = [Column(state, leaves=_STATES_LEAVE.get(state, 0)) for state in states]
        table(("instance", *titles), [*rows, total] if len(rows) > 1 else rows)
    else:
        click.echo("no jobs yet")
    if least & set(states):
        kept = found["finished_estimate"]
        about = "" if kept is None else f"; about {kept:,} finished jobs are kept"
        line("", f"+ at least: not all of them were counted{about}")
    click.echo()
    bots = ", ".join(f"{seen['bots']:,} {status}" for status, seen in found["bots"].items()) or "none"
    line("bots      ", f"{bots}; {found['in_use']:,} of {plural(found['capacity'], 'unit')} in use")
    if len(found["swarm"]) > 1 or any(one["avg_success_rate"] is not None for one in found["swarm"]):
        click.echo()
        _swarm(found["swarm"])
    if found["quotas"]:
        click.echo()
        list_quotas(found["quotas"])
        click.echo()
    _pace(found["rates"], found["waits"])
    if found["oldest_queued_seconds"] is not None:
        oldest = seconds(found["oldest_queued_seconds"])
        line("", f"oldest queued job: {'at least ' if 'oldest_queued_seconds' in least else ''}{oldest}")
    if found["later"]:
        start = "starts" if found["later"] == 1 else "start"
        line("", f"{readable.plural(found['later'], 'queued job')} {start} later, at a time that was given")
    if found["unmatchable"]:
        number = f"{'at least ' if 'unmatchable' in least else ''}{readable.plural(found['unmatchable'], 'queued job')}"
        are, them = ("is", "it") if found["unmatchable"] == 1 else ("are", "them")
        line("", f"{number} {are} unmatchable: no present bot could run {them} (leasehold list --unmatchable)")
    for tick in found["upkeep"]:
        grace = ", in grace: nothing expires yet" if tick["grace"] else ""
        line("upkeep    ", f"{tick['name']} {seconds(tick['age_seconds'])} ago{grace}")
    for each in found.get("paused", ()):
        where = f" of {each['instance']}" if each["instance"] and each["kind"] != "instance" else ""
        why = f": {each['reason']}" if each["reason"] else ""
        line("paused    ", each["kind"] + " " + each["name"] + where + why)
    if reads := found.get("reads"):
        line("reads     ", reads_in_words(reads))


def reads_in_words(reads: Record) -> str:
    """Say where a gateway with a standby reads lists and reports."""
    if not reads["standby"]:
        return f"of lists go to the primary: {plain(reads['reason'])}"
    return f"of lists go to the standby, at most {seconds(reads['lag_seconds'])} behind"


def _swarm(swarm: Sequence[Record]) -> None:
    """Print one line for each cohort's bots."""
    columns = ("total", "idle", "busy", "offline", "on_probation", "total_in_flight")
    averages = ("avg_load", "avg_success_rate", "concentration")
    leaves = {"in flight": 1, "concentration": 2, "latency": 3, "on probation": 4, "load": 5}
    titles = (*columns[:-1], "in flight", "load", "success", "concentration", "latency")
    table(
        ("cohort", *(Column(name.replace("_", " "), leaves.get(name.replace("_", " "), 0)) for name in titles)),
        (
            (one["cohort"], *(one[name] for name in columns), *(_share(one[name]) for name in averages), _latency(one))
            for one in swarm
        ),
    )


def _pace(rates: Record, waits: Record) -> None:
    """Print the rates of submits, grants, starts and ends, and how long jobs waited for a bot."""
    when = "minute" if rates["span"] >= 60 else seconds(rates["span"])
    paces = ", ".join(
        f"{readable.figure(rates[name], digits=6)} {name}" for name in ("submitted", "granted", "started", "finished")
    )
    line(f"per second, last {when}: ", paces)
    parts = [
        f"{readable.figure(rates[name], digits=6)} {name}"
        for name in ("succeeded", "failed", "cancelled", "dead")
        if rates[name]
    ]
    if parts:
        line("by outcome: ", ", ".join(parts))
    if waits["jobs"]:
        told = ", ".join(f"{name} {seconds(waits[name])}" for name in ("p50", "p95", "p99"))
        line(f"from the queue to a bot, {readable.plural(waits['jobs'], 'job')}: ", told)


def _cut(text: str, limit: int = 200) -> str:
    shown = plain(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _sharing(job: Record) -> str | None:
    if job.get("dedup_key") is None:
        return None
    until = job.get("dedup_key_until")
    kept = f", which it keeps until {moment(until)}, also once it has succeeded" if until else ""
    return f"{job['submissions']:,} want it, with the deduplication key '{plain(job['dedup_key'])}'{kept}"


def _constraints_text(terms: Record) -> str:
    return "; ".join(f"{name} {_listed(value)}" for name, value in terms.items())


def _listed(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key} {amount}" for key, amount in value.items()]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _node_of(job: Record) -> str | None:
    graph = job.get("graph")
    return None if graph is None else f"node {graph['node']} of {plain(graph['name'])}, {graph['id']}"


def _queue_timeout(job: Record) -> str | None:
    deadline = job.get("queue_deadline")
    if deadline is None:
        return None
    return f"{seconds(between(job['created_at'], deadline))}, until {moment(deadline)}"


def _waits(job: Record) -> str | None:
    waiting = job.get("waiting")
    return None if waiting is None else str(waiting["sentence"])


def _exit(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"killed by signal {-code}"


def _output(result: Record) -> str | None:
    if not result.get("output_bytes"):
        return None
    return f"{result['output_bytes']} bytes" + (", cut" if result.get("output_truncated") else "")
