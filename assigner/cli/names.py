"""What commands are called: the groups of `--help`, earlier names of commands, and what people say instead of them.

An earlier name is refused with the one that took its place. Hardly anything is imported here, because every command
reads it.
"""

from collections.abc import Mapping, Sequence

from leasehold.states import JobState

#: In the `meta` of a command's context: what returns the model of a whole configuration file.
SECTIONS = "leasehold.sections"
#: The groups of `--help`, in its order. A test says that each command is in one of them.
GROUPS: Mapping[str, Sequence[str]] = {
    "Jobs": (
        *("submit", "list", "show", "logs", "result", "wait", "explain", "metadata"),
        *("cancel", "requeue", "hold", "release", "priority", "reschedule"),
    ),
    "Graphs": ("graph",),
    "Tasks and schedules": ("schedule",),
    "Bots": ("bots", "bot"),
    "Tenants": ("instance", "cohort", "quota", "token"),
    "Limits": ("pool-limit", "lock", "rate", "queue-limit", "limit"),
    "Rules": ("class", "scheduling", "rule", "pause", "policy"),
    "Pool": (
        *("up", "demo", "status", "report", "forecast", "demand", "preemptions", "simulate", "tune", "assigners"),
        *("console", "config", "db", "gateway", "farm", "assign", "completion", "help"),
    ),
}
#: Earlier name → what it is called now.
RENAMED: Mapping[str, str] = {
    "account": "instance set",
    "backpressure": "rule backpressure",
    "ceiling": "limit ceiling",
    "class limit": "limit class set",
    "class-limit": "limit class",
    "class-reserve": "limit reserve",
    "instance limit-all": "pool-limit set",
    "instance-queue-limit": "limit instance-queue",
    "meter": "rule meter",
    "owner-quota": "limit owner",
    "project-quota": "limit project",
    "quota owner": "limit owner set",
    "quota project": "limit project set",
    "report-ceiling": "limit report",
    "service-level": "rule service-level",
    "submit-rule": "rule submit",
    "window": "rule window",
}
#: Earlier option → what takes its place.
RENAMED_OPTIONS: Mapping[str, str] = {"--urgency": "is now --priority, which is 100 - urgency"}
#: Command and option that it does not have → why it needs none.
NEEDLESS_OPTIONS: Mapping[tuple[str, str], str] = {
    ("instance set", "--create"): "is not needed: this command makes an instance that is not there",
    ("graph submit", "--file"): "is not needed: the file is the argument, as in `leasehold graph submit FILE`",
    ("cohort set", "--create"): "is not needed: this command makes a cohort that is not there",
}
#: What other schedulers call an option of `submit` → what it is here.
SUBMIT_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("--array", "-a"), "is --file here, with a line for each job"),
    **dict.fromkeys(
        ("--cpus", "--cpus-per-task", "-c"),
        "is --resource cpu_milli=2000 here (two cores); it chooses the bot, bot.job_cpu_milli bounds attempts",
    ),
    **dict.fromkeys(("--dependency", "--after", "-d"), "is a graph here: leasehold graph submit --help shows one"),
    **dict.fromkeys(("--gpus", "--gres"), "is --resource gpus=1 here"),
    **dict.fromkeys(
        ("--mem", "--memory"),
        "is --resource memory_mib=512 here; it chooses the bot, bot.job_memory_mib bounds attempts",
    ),
    **dict.fromkeys(("--name", "--job-name", "-J"), "is --label here, or --meta KEY=VALUE"),
    **dict.fromkeys(("--time", "--time-limit"), "is --timeout here"),
    **dict.fromkeys(
        ("--retries", "--max-retries"), "is --retry-failed with --max-attempts here, which counts the first one"
    ),
}
#: What other programs call it → the command that is probably meant.
MEANT: Mapping[str, str] = {
    **{f"bot {each}": f"bots {each}" for each in ("list", "show", "drain")},
    "bots undrain": "bots drain --undo",
    **dict.fromkeys(("jobs", "ls", "ps", "tasks"), "list"),
    **{state: f"list --state {state}" for state in map(str, JobState)},
    **dict.fromkeys(("ready", "pending", "waiting", "queue", "queues"), "list --state queued"),
    **dict.fromkeys(("active", "executing"), "list --state running"),
    **dict.fromkeys(("top", "watch", "monitor"), "status --watch"),
    **dict.fromkeys(("history", "events"), "show"),
    **dict.fromkeys(("job", "info", "describe", "get", "inspect"), "show"),
    **dict.fromkeys(("kill", "stop", "abort", "delete", "rm", "remove", "revoke", "clear", "purge"), "cancel"),
    **dict.fromkeys(("retry", "rerun", "resubmit"), "requeue"),
    **dict.fromkeys(("run", "exec", "enqueue", "defer"), "submit"),
    **{f"pause {kind}": f"pause set {kind}" for kind in ("label", "task", "instance", "schedule")},
    **{f"resume {kind}": f"pause rm {kind}" for kind in ("label", "task", "instance", "schedule")},
    **dict.fromkeys(("pause clear", "pause remove", "pause delete"), "pause rm"),
    **{f"{kind} pause": f"pause set {kind}" for kind in ("label", "task", "instance")},
    **{f"{kind} resume": f"pause rm {kind}" for kind in ("label", "task", "instance")},
    "suspend": "pause set",
    **dict.fromkeys(("resume", "unpause"), "pause rm"),
    "unhold": "release",
    **dict.fromkeys(("output", "tail"), "logs"),
    **dict.fromkeys(("worker", "workers"), "bots"),
    "drain": "bots drain",
    "undrain": "bots drain --undo",
    **dict.fromkeys(("init", "migrate"), "db upgrade"),
    "why": "explain",
    **dict.fromkeys(("cron", "beat", "periodic"), "schedule"),
    "start": "up",
    **dict.fromkeys(("schedule set", "schedule put", "schedule create", "schedule new"), "schedule add"),
    "schedule pause": "schedule disable",
    "schedule resume": "schedule enable",
    "rollback": "policy rollback",
    "server": "gateway",
    **dict.fromkeys(("evictions", "preempted"), "preemptions list"),
    **dict.fromkeys(("tenant", "tenants", "team", "teams"), "instance"),
    "verify": "db verify",
    **dict.fromkeys(("doctor", "health"), "db doctor"),
    "check": "config check",
}
#: What people look for that no command shows → what shows it.
SHOWN_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("audit", "audits", "auditlog", "audit-log"),
        "the audit is on the console's page Health and in GET /v1/audit; `leasehold help operations` has a query",
    ),
}


def instead(words: Sequence[str]) -> str | None:
    """Return why these first words of a command line are no command, if it is known what is meant; else None."""
    for said in (" ".join(words[:2]), *words[:1]):
        if said in RENAMED:
            return f"'{said}' is now `leasehold {RENAMED[said]}`"
        if said in SHOWN_ELSEWHERE:
            return f"there is no command '{said}': {SHOWN_ELSEWHERE[said]}"
        if said in MEANT:
            return f"there is no command '{said}'; did you mean `leasehold {MEANT[said]}`?"
    return None
