"""What is wrong with the pool now, and what to do: the rules of `ops/prometheus/` without Prometheus.

An alert here says what is so at this moment. Prometheus says it once it has lasted for a while, and knows further rules
on counters that only processes have. Names, severities, thresholds and advice are the same; a test compares them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import structlog
from leasehold.states import JobState
from psycopg.errors import QueryCanceled

from assigner.queries import status
from assigner.queries.status import Backlog
from schema.accounting.held_rows import SHORT_WAIT
from schema.accounting.quota_uses import QuotaUse, quota_uses
from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.fleet import success
from schema.fleet.success import Swarm
from schema.moves.dependencies import count_dead_ends
from schema.policy.schedules import FAILING, HELD_UP
from schema.postgres import notify
from schema.postgres.connection import Connection
from schema.postgres.failures import HINDRANCES
from schema.postgres.statements import Statement
from schema.readable import duration, plural
from schema.tenancy import processes
from schema.tenancy.processes import GatewayProcess

Severity = Literal["critical", "warning", "info"]

#: The most pairs of cohort and instance, gateways and graph nodes that one reading looks at.
MAX_PAIRS, MAX_GATEWAYS, MAX_NODES = 1000, 1000, 100_000
#: The most alerts of one rule; further ones are counted in the last of them.
MAX_OF_RULE = 20
SEVERITIES: Sequence[Severity] = ("critical", "warning", "info")
#: What is said of a rule whose figure could not be read, and what to do.
UNREAD = (
    "Whether this is so is not known: somebody holds a table, its figure takes too long, or a stored value is wrong."
)
HELD = "leasehold db doctor names the oldest transaction and values that cannot be used."

# A stored value that cannot be used fails in Python if the database takes it: wrong JSON, or a time without an end.
_WRONG_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_UNREADABLE = (*HINDRANCES, QueryCanceled, *_WRONG_VALUES)

_BEFORE = Statement("""
SELECT max(waiting) FROM pool_samples
WHERE scope = 'pool' AND name = '' AND at >= now() - interval '40 minutes' AND at < now() - interval '30 minutes'
""")
_UPKEEP = Statement("SELECT extract(epoch FROM clock_timestamp() - max(at)) FROM ticks WHERE name LIKE 'reaper%'")
_SCHEDULES = Statement(f"SELECT count(*) FROM schedules WHERE failures >= {FAILING}")
_HELD_UP = Statement(f"SELECT count(*) FROM schedules s JOIN jobs j ON j.id = s.last_job WHERE {HELD_UP}")


_log = structlog.get_logger(__name__)


class UnreadError(AttributeError):
    """A figure could not be read, as somebody holds a table, a row is wrong, or it takes too long."""


@dataclass(frozen=True)
class Reading:
    """What the rules go by. A figure that could not be read is missing: who asks for it gets UnreadError.

    waiting_before: the most jobs that waited between 40 and 30 minutes ago; None if nothing is known. upkeep_age:
    seconds since the last upkeep; None if there was none. notifications: the part of the server's queue of them that is
    in use. refused: the processes whose changed configuration was refused, with the reason.
    """

    swarms: Sequence[Swarm]
    backlog: Backlog
    waiting_before: int | None
    quotas: Sequence[QuotaUse]
    blocked_forever: int
    upkeep_age: float | None
    schedules_failing: int
    schedules_held_up: int
    notifications: float
    gateways: Sequence[GatewayProcess]
    refused: Sequence[tuple[str, str]]

    def __getattr__(self, name: str) -> NoReturn:
        raise UnreadError(name)


@dataclass(frozen=True)
class Alert:
    """Something that is wrong now. subject: the cohort, instance or process; empty for the pool."""

    name: str
    severity: Severity
    subject: str
    summary: str
    action: str


#: What a rule finds: the subject and the words for its summary.
Found = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """One rule. threshold: the number that it compares with. find: returns subjects with what is said of them."""

    name: str
    severity: Severity
    threshold: float
    action: str
    find: Callable[[Reading, float], Found]


def read(connection: Connection, *, cooldown: Cooldown = EVICTION_COOLDOWN) -> Reading:
    """Read what the rules go by, every count up to a bound. One that cannot be read leaves the others.

    A lock is waited for shortly: a console asks every few seconds.
    """
    connection.execute_later(SHORT_WAIT)
    figures: Mapping[str, Callable[[Connection], Any]] = {
        "swarms": success.swarms,
        "backlog": status.count_backlog,
        "waiting_before": lambda c: c.execute(_BEFORE).scalar_one(),
        "quotas": lambda c: quota_uses(c, most=MAX_PAIRS, cooldown=cooldown).pairs,
        "blocked_forever": partial(count_dead_ends, limit=MAX_NODES),
        "upkeep_age": _upkeep_age,
        "schedules_failing": lambda c: c.execute(_SCHEDULES).scalar_one(),
        "schedules_held_up": lambda c: c.execute(_HELD_UP).scalar_one(),
        "notifications": notify.queue_usage,
        "gateways": _running_gateways,
        "refused": _refused_settings,
    }
    reading = object.__new__(Reading)
    for name, figure in figures.items():
        try:
            with connection.savepoint():
                reading.__dict__[name] = figure(connection)
        except _UNREADABLE as error:
            _log.warning("a figure of the alerts could not be read", figure=name, error=type(error).__name__)
    return reading


def _upkeep_age(connection: Connection) -> float | None:
    age = connection.execute(_UPKEEP).scalar_one_or_none()
    return None if age is None else float(age)


def _running_gateways(connection: Connection) -> list[GatewayProcess]:
    return [each for each in processes.gateways(connection, limit=MAX_GATEWAYS) if each.state == "running"]


def _refused_settings(connection: Connection) -> list[tuple[str, str]]:
    told = processes.settings_in_force(connection, limit=MAX_GATEWAYS)
    return [(name, each.config_error) for each in told if each.config_error for name in each.processes]


def judge(reading: Reading) -> list[Alert]:
    """Return what is wrong, the most severe first. A rule that could not be judged is an alert that says so."""
    found = []
    for rule in RULES:
        try:
            subjects = list(rule.find(reading, rule.threshold))
        except _WRONG_VALUES as error:  # UnreadError is one of them
            if not isinstance(error, UnreadError):
                _log.warning("an alert could not be judged", alert=rule.name, error=type(error).__name__)
            found.append(Alert(rule.name, rule.severity, "", UNREAD, HELD))
            continue
        for subject, summary in subjects[:MAX_OF_RULE]:
            found.append(Alert(rule.name, rule.severity, subject, summary, rule.action))
        if len(subjects) > MAX_OF_RULE:
            more = f"The same is so of {len(subjects) - MAX_OF_RULE} more."
            found.append(Alert(rule.name, rule.severity, "", more, rule.action))
    return sorted(found, key=lambda alert: SEVERITIES.index(alert.severity))


def alerts(connection: Connection, *, cooldown: Cooldown = EVICTION_COOLDOWN) -> list[Alert]:
    """Return what is wrong with the pool now."""
    return judge(read(connection, cooldown=cooldown))


def _concentrated(reading: Reading, limit: float) -> Found:
    for one in reading.swarms:
        spread, even = one.concentration, one.even_concentration
        if spread and even and spread / even > limit and one.total_in_flight > one.idle + one.busy:
            yield one.cohort, f"Few bots of cohort {one.cohort} have nearly all of its work."


def _full(reading: Reading, limit: float) -> Found:
    for one in reading.swarms:
        if one.avg_load is not None and one.avg_load > limit:
            yield one.cohort, f"The bots of cohort {one.cohort} are full."


def _fail_often(reading: Reading, limit: float) -> Found:
    for one in reading.swarms:
        if one.avg_success_rate is not None and one.avg_success_rate < limit:
            yield (
                one.cohort,
                f"Of the attempts on bots of cohort {one.cohort} {1 - one.avg_success_rate:.0%} fail.",
            )


def _on_probation(reading: Reading, limit: float) -> Found:
    for one in reading.swarms:
        if one.on_probation > limit:
            yield one.cohort, f"{_bots(one.on_probation)} of cohort {one.cohort} on probation: jobs pass elsewhere."


def _wait_long(reading: Reading, limit: float) -> Found:
    if reading.backlog.oldest > limit:
        yield "", f"A job has been queued for {duration(reading.backlog.oldest)}."


def _backlog_grows(reading: Reading, limit: float) -> Found:
    queued, before = reading.backlog.jobs[JobState.QUEUED], reading.waiting_before
    if queued > limit and before is not None and queued > 1.5 * before:
        yield "", f"More jobs come than are done: {queued:,} are queued, {before:,} were half an hour ago."


def _unmatchable(reading: Reading, limit: float) -> Found:
    if reading.backlog.unmatchable > limit:
        number = reading.backlog.unmatchable
        yield (
            "",
            f"{plural(number, 'queued job')} {'requires' if number == 1 else 'require'} what no present bot offers.",
        )


def _parked(reading: Reading, limit: float) -> Found:
    parked = reading.backlog.jobs[JobState.PARKED]
    if parked > limit:
        yield (
            "",
            f"{plural(parked, 'job')} {'is' if parked == 1 else 'are'} held aside until an operator releases them.",
        )


def _minimum_lacks_bots(reading: Reading, limit: float) -> Found:
    for use in reading.quotas:
        if use.capacity_gap > limit:
            told = f"Cohort {use.cohort} lacks {plural(use.capacity_gap, 'unit')} for the minimum of {use.instance}."
            yield f"{use.cohort}/{use.instance}", told


def _minimum_unmet(reading: Reading, limit: float) -> Found:
    for use in reading.quotas:
        if use.unmet > limit and not use.capacity_gap:
            lacks = f"{use.instance} lacks {plural(use.unmet, 'unit')} of its minimum in cohort {use.cohort}"
            yield f"{use.cohort}/{use.instance}", f"{lacks}; its jobs wait."


def _at_maximum(reading: Reading, limit: float) -> Found:
    for use in reading.quotas:
        if use.effective_max is not None and use.usage >= use.effective_max and use.usage > limit:
            told = f"{use.instance} has used all of its maximum in cohort {use.cohort}: {plural(use.usage, 'unit')}."
            yield f"{use.cohort}/{use.instance}", told


def _evictions(reading: Reading, limit: float) -> Found:
    for use in reading.quotas:
        if use.evictions >= limit:
            told = f"{use.evictions} jobs of {use.instance} were evicted lately in cohort {use.cohort}."
            yield f"{use.cohort}/{use.instance}", told


def _gateways_fail(reading: Reading, limit: float) -> Found:
    failed, requests = (sum(each.figures.get(name, 0) for each in reading.gateways) for name in ("failed", "requests"))
    if requests and failed / requests > limit:
        yield "", f"Gateways answered {failed / requests:.0%} of the requests of five minutes with a server error."


def _behind(reading: Reading, limit: float) -> Found:
    for each in reading.gateways:
        if each.figures.get("queue", 0) > limit:
            yield each.name, f"At gateway {each.name} {each.figures['queue']:,.0f} pieces of work wait for a thread."


def _unheard(reading: Reading, limit: float) -> Found:
    for each in reading.gateways:
        if each.figures.get("wakeups_connected", 1) == limit:
            yield each.name, f"Gateway {each.name} hears no wake-ups: bots and callers learn of news later."


def _refused(reading: Reading, limit: float) -> Found:
    refused = sum(each.figures.get("connections_refused", 0) for each in reading.gateways)
    if refused > limit:
        yield "", f"Gateways have refused {refused:,.0f} connections within ten minutes."


def _configuration(reading: Reading, limit: float) -> Found:
    if len(reading.refused) > limit:
        for name, error in reading.refused:
            yield name, f"The changed configuration of {name} was refused, and the old one is in force: {error}"


def _blocked_forever(reading: Reading, limit: float) -> Found:
    if reading.blocked_forever > limit:
        number = reading.blocked_forever
        yield "", f"{plural(number, 'node')} of graphs {'waits' if number == 1 else 'wait'} for what can never come."


def _upkeep_stands(reading: Reading, limit: float) -> Found:
    if reading.upkeep_age is None or reading.upkeep_age > limit:
        since = "" if reading.upkeep_age is None else f" for {duration(reading.upkeep_age)}"
        yield "", f"No process has done upkeep{since}: dead bots keep their jobs."


def _schedules(reading: Reading, limit: float) -> Found:
    if reading.schedules_failing > limit:
        yield "", f"The jobs of {plural(reading.schedules_failing, 'schedule')} are refused again and again."


def _notifications(reading: Reading, limit: float) -> Found:
    if reading.notifications > limit:
        yield "", f"{reading.notifications:.0%} of the server's queue of notifications is in use."


def _held_up(reading: Reading, limit: float) -> Found:
    if reading.schedules_held_up > limit:
        number = reading.schedules_held_up
        leaves = "leaves" if number == 1 else "leave"
        yield "", f"{plural(number, 'schedule')} {leaves} out ticks because a previous job has not started."


def _bots(number: int) -> str:
    return "1 bot is" if number == 1 else f"{number} bots are"


#: The rules that need nothing but the pool's own tables, in the order of the file for Prometheus.
RULES: Sequence[Rule] = (
    Rule(
        "LeaseholdWorkIsConcentrated",
        "warning",
        3,
        "leasehold bots list shows who has it. Look at the strategy's weights, at bots with wrong capacities "
        "or priorities, and at jobs whose requirements only few bots meet.",
        _concentrated,
    ),
    Rule(
        "LeaseholdBotsAreFull",
        "info",
        0.95,
        "Add bots, or units to those that could run more at once.",
        _full,
    ),
    Rule(
        "LeaseholdBotsFailOften",
        "warning",
        0.7,
        "leasehold bots list shows the rate of each bot; leasehold bots show NAME by label.",
        _fail_often,
    ),
    Rule(
        "LeaseholdBotsOnProbation",
        "warning",
        0,
        "leasehold bots list names them; drain them and look at their machines.",
        _on_probation,
    ),
    Rule(
        "LeaseholdJobsWaitLong",
        "warning",
        3600,
        "leasehold status shows where jobs wait, leasehold report for how long and why; leasehold explain JOB "
        "names the gate that is closed for one of them.",
        _wait_long,
    ),
    Rule(
        "LeaseholdBacklogGrows",
        "warning",
        1000,
        "leasehold status compares the rates of submits and ends. Add bots, or let what is least urgent wait "
        "aside (leasehold scheduling set --max-queue-size).",
        _backlog_grows,
    ),
    Rule(
        "LeaseholdJobsThatNobodyCanRun",
        "warning",
        0,
        "leasehold explain JOB names the clause that no bot has. Start such bots, or cancel the jobs; a "
        "--queue-timeout gives up those that come to nothing.",
        _unmatchable,
    ),
    Rule(
        "LeaseholdJobsAreParked",
        "info",
        0,
        "leasehold list --state parked says why; leasehold release JOB queues them again.",
        _parked,
    ),
    Rule(
        "LeaseholdMinimumCannotBeMet",
        "warning",
        0,
        "leasehold bots list shows which bots are gone, draining or unhealthy. Bring them back or add bots, "
        "or lower minimums with leasehold quota set.",
        _minimum_lacks_bots,
    ),
    Rule(
        "LeaseholdMinimumIsNotMet",
        "warning",
        0,
        "leasehold explain JOB, of a job of the instance that waits, tells why, and what protects the jobs that run. "
        "Give less urgent work a larger priority, or let the cohort reclaim minimums from any job (leasehold cohort "
        "set).",
        _minimum_unmet,
    ),
    Rule(
        "LeaseholdInstanceAtMaximum",
        "info",
        0,
        "Its further jobs wait. If that is not intended, raise the maximum with leasehold quota set; "
        "leasehold quota list shows whether evictions have lowered it.",
        _at_maximum,
    ),
    Rule(
        "LeaseholdEvictionsRepeat",
        "warning",
        10,
        "leasehold show JOB prints the receipt of an eviction. Add bots, give the instance a minimum, or "
        "raise quotas.preemption_delay and quotas.min_run_time.",
        _evictions,
    ),
    Rule(
        "LeaseholdGatewaysFail",
        "critical",
        0.05,
        "Their log names each unexpected error by its id. 503 means that the database does not answer or "
        "takes no writes: leasehold db doctor.",
        _gateways_fail,
    ),
    Rule(
        "LeaseholdGatewayIsBehind",
        "warning",
        100,
        "The database is slow, or there are too few gateways: leasehold db doctor; add gateways.",
        _behind,
    ),
    Rule(
        "LeaseholdWakeUpsAreLost",
        "warning",
        0,
        "Its log says why the connection ended. Behind a pooler set database.listen_url.",
        _unheard,
    ),
    Rule(
        "LeaseholdConnectionsAreRefused",
        "warning",
        100,
        "Raise gateway.max_connections or the limit of open files, or stop the address that opens them.",
        _refused,
    ),
    Rule(
        "LeaseholdConfigurationIsRefused",
        "warning",
        0,
        "leasehold config check names each mistake with its line.",
        _configuration,
    ),
    Rule(
        "LeaseholdNodesAreBlockedForEver",
        "info",
        0,
        "leasehold graph show GRAPH counts them; leasehold graph retry GRAPH lets one go on, graph cancel ends it.",
        _blocked_forever,
    ),
    Rule(
        "LeaseholdUpkeepStands",
        "critical",
        60,
        "Look at the logs of leasehold assign, and at the database with leasehold db doctor.",
        _upkeep_stands,
    ),
    Rule(
        "LeaseholdSchedulesFail",
        "warning",
        0,
        "leasehold db doctor names them, and leasehold schedule show NAME says why.",
        _schedules,
    ),
    Rule(
        "LeaseholdSchedulesAreHeldUp",
        "warning",
        0,
        "leasehold schedule list names the jobs, and leasehold explain JOB why one does not start; cancel it, or let "
        "the schedule overlap.",
        _held_up,
    ),
    Rule(
        "LeaseholdNotificationsFillUp",
        "warning",
        0.5,
        "Some session of the server listens and has been in one transaction for long: leasehold db doctor names the "
        "oldest. End it, or bots and callers learn of news by polls only.",
        _notifications,
    ),
)
