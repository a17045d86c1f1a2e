"""Prometheus metrics of assigners, upkeep and quotas.

The number of label values is bounded: labels are names that operators have given, or words listed here, never ids. Of
instances, whose number is not bounded, at most `quotas.metric_pairs` have series.
"""

import math
from collections import Counter as TotalCounter
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from schema import clock
from schema.accounting.forecasts import SOME, Judged
from schema.accounting.quota_uses import QuotaUse, QuotaUses
from schema.fleet.success import Swarm

log = structlog.get_logger()

CYCLES = Counter(
    "leasehold_assigner_cycles_total",
    "Cycles of the assigners, by result: assigned, deferred, idle or lost.",
    ["result"],
)
CYCLE_SECONDS = Histogram(
    "leasehold_cycle_seconds",
    "Seconds that one cycle of an assigner took from picking jobs to the commit of their leases.",
    buckets=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 5.0, 10.0),
)
JOBS_ASSIGNED = Counter(
    "leasehold_jobs_assigned_total",
    "Jobs that an assigner leased to a bot, by the strategy that chose the bot.",
    ["strategy"],
)
JOBS_PREFERRING = Counter(
    "leasehold_jobs_preferring_total",
    "Jobs with preferred properties that an assigner leased, by the phase that found a bot: preferred or required.",
    ["phase"],
)
QUEUES_RESTED = Counter(
    "leasehold_queues_rested_total",
    "Queues that were put to rest because no bot could take a job of them, by the reason.",
    ["reason"],
)
RACES_LOST = Counter(
    "leasehold_races_lost_total",
    "Rows that a move did not change because another transaction was faster, by the kind of move.",
    ["kind"],
)

QUEUES_CLOSED = Counter(
    "leasehold_gated_queues_closed_total",
    "Queues of constrained jobs that a gate kept waiting as a whole, counted each cycle among the queues it read.",
    ["gate"],
)
JOBS_CLOSED = Counter(
    "leasehold_gated_jobs_closed_total",
    "Constrained jobs of open queues that a gate kept waiting, counted each cycle.",
    ["gate"],
)
PICKS_EMPTY = Counter(
    "leasehold_gated_picks_empty_total",
    "Picks of constrained jobs that found none, by the reason: a gate, no room, empty queue, or taken by other "
    "assigners.",
    ["reason"],
)

PREEMPTIONS = Counter(
    "leasehold_preemptions_total",
    "Running jobs that were asked to stop so that an instance gets its minimum quota.",
)
FAIRNESS = Gauge(
    "leasehold_fairness_index",
    "Jain's index of usage over weight, of managed instances with waiting jobs: 1 = equal; NaN = no such instance.",
)
FAIRNESS.set(math.nan)
QUOTA_DRIFT = Counter(
    "leasehold_quota_drift_total",
    "Quota counters that differed from the live leases they count and were repaired: each is a defect.",
)
CAPACITY_DRIFT = Counter(
    "leasehold_capacity_drift_total",
    "Bots whose units in use differed from their live leases and were repaired: each is a defect.",
)

QUOTA_READS_FAILED = Counter(
    "leasehold_quota_reads_failed_total",
    "Scrapes that have no figures of quotas, because the database did not answer.",
)

ASSIGNMENT_SCORE = Histogram(
    "leasehold_assignment_score",
    "Scores, 0 to 1, of the bots that the strategy `success` gave jobs to: success rate over one plus load.",
    buckets=tuple(step / 10 for step in range(1, 11)),
)
COHORT_LOAD = Gauge(
    "leasehold_cohort_load",
    "Average share of their units that the present bots of a cohort have in use, NaN without bots.",
    ["cohort"],
)
COHORT_SUCCESS = Gauge(
    "leasehold_cohort_success_rate",
    "Average success rate of the present bots of a cohort, NaN without bots or while successes are not counted.",
    ["cohort"],
)
COHORT_BOTS = Gauge("leasehold_cohort_bots", "Bots of a cohort that are idle, busy or offline.", ["cohort", "state"])
COHORT_PROBATION = Gauge("leasehold_cohort_bots_on_probation", "Bots of a cohort that are on probation.", ["cohort"])
COHORT_IN_FLIGHT = Gauge("leasehold_cohort_units_in_flight", "Units in use on the bots of a cohort.", ["cohort"])
COHORT_CONCENTRATION = Gauge(
    "leasehold_cohort_concentration",
    "Herfindahl index of the units in use by bot, divided by its value if all bots of the cohort had equal load: "
    "1 = even, NaN = no units in use.",
    ["cohort"],
)
COHORT_LATENCY = Gauge(
    "leasehold_cohort_latency_seconds",
    "Average run time of the latest attempts with a result on the present bots of a cohort, in seconds; NaN without "
    "any or while successes are not counted.",
    ["cohort"],
)
_OF_COHORTS = (
    COHORT_LOAD,
    COHORT_SUCCESS,
    COHORT_BOTS,
    COHORT_PROBATION,
    COHORT_IN_FLIGHT,
    COHORT_CONCENTRATION,
    COHORT_LATENCY,
)
BLOCKED_FOREVER = Gauge(
    "leasehold_graph_nodes_blocked_forever",
    "Nodes of unfinished graphs with a dependency that can never be met, at the last upkeep.",
)

JOBS = Gauge(
    "leasehold_jobs",
    "Jobs that have not ended, by state; upkeep counts them once a minute. A state with more than 100,000 jobs shows a "
    "lower bound.",
    ["state"],
)
OLDEST_WAIT = Gauge(
    "leasehold_oldest_wait_seconds",
    "Seconds in the queue of the oldest queued job among those counted, at the last count; 0 = no queued job.",
)
UNMATCHABLE = Gauge(
    "leasehold_jobs_unmatchable",
    "Queued jobs that no present bot could run even if it were idle, at the last count.",
)

REAPED = Counter(
    "leasehold_upkeep_reaped_total",
    "Repairs by upkeep: sessions expired, jobs requeued, leases stopped, sessions closed or jobs deleted, by kind.",
    ["kind"],
)
WATCHED = Counter(
    "leasehold_waiting_jobs_total",
    "Waiting jobs that were promoted after starving, hastened before their deadline, or found at risk of missing it.",
    ["move"],
)
DEFERRED = Counter(
    "leasehold_overflow_jobs_total",
    "Jobs deferred because the queue was over its limit, and deferred jobs returned to the queue, by move.",
    ["move"],
)
WEBHOOKS = Counter(
    "leasehold_webhook_deliveries_total",
    "Tries to deliver to a webhook that were sent or failed, and deliveries that expired or were dropped.",
    ["webhook", "result"],
)
SCHEDULE_TICKS = Counter(
    "leasehold_schedule_ticks_total",
    "Looks at schedules that were due, by result: submitted, refused, overlapped, missed or failed.",
    ["result"],
)
SCHEDULES_HELD_UP = Gauge(
    "leasehold_schedules_held_up",
    "Schedules that have left out three ticks in a row or more because their previous job has not started.",
)
SCHEDULES_FAILING = Gauge(
    "leasehold_schedules_failing",
    "Schedules whose job was refused three times in a row or more.",
)
NOTIFICATIONS = Gauge(
    "leasehold_notification_queue_usage",
    "The part of the server's queue of notifications that is in use, 0 to 1, counted each minute.",
)
RETENTION_LATE = Gauge(
    "leasehold_retention_late_seconds",
    "Seconds for which the oldest rows of a duty have outlived their age at the last deletion; 0 = all left.",
    ["duty"],
)
FORECAST_COVERAGE = Gauge(
    "leasehold_forecast_coverage_ratio",
    "The part of jobs that started within the time promised in the last day, 0 to 1; 0.9 is meant. NaN without any.",
)
FORECAST_COVERAGE_OF = Gauge(
    "leasehold_forecast_instance_coverage_ratio",
    "The same of an instance with 200 judged jobs in the last day or more; of at most 100 instances.",
    ["instance"],
)
FORECASTS_JUDGED = Gauge("leasehold_forecasts_judged", "Forecasts of the last day whose promise could be judged.")
FORECASTS_KNOWN = Gauge(
    "leasehold_forecast_known_ratio",
    "The part of waiting jobs that got a time, among those with 200 earlier forecasts or more; NaN without any.",
)
FORECAST_WIDTH = Gauge(
    "leasehold_forecast_width_seconds",
    "The median of the times within which jobs were promised to start in the last day; NaN without any.",
)
FORECAST_ERROR = Gauge(
    "leasehold_forecast_error_seconds",
    "The median difference between the time that was told and the real one, of the last day; NaN without any.",
)
DUTY_FAILURES = Gauge(
    "leasehold_upkeep_duty_failures",
    "Failures in a row of a duty of upkeep in this process, 0 after a success.",
    ["duty"],
)

LOOP_CYCLES = Counter(
    "leasehold_loop_cycles_total",
    "Runs of a background loop of this process that succeeded.",
    ["loop"],
)
LOOP_ERRORS = Counter(
    "leasehold_loop_errors_total",
    "Runs of a background loop of this process that ended with an error.",
    ["loop"],
)
POLICY = Gauge("leasehold_policy_version", "Version of the policy by which this process works; 0 while there is none.")
CANARIES_RETURNED = Counter(
    "leasehold_policy_canaries_returned_total",
    "Trials of a version of the policy that this process has taken back, because a guard did not hold.",
)
SHADOW_DECISIONS = Counter(
    "leasehold_shadow_decisions_total",
    "Decisions of this process with which a shadow was compared, by what was decided and the result: bots, orders or "
    "victims; same or other.",
    ["decided", "result"],
)
SHADOW_CYCLES = Counter(
    "leasehold_shadow_cycles_total",
    "Cycles of this process that a shadow was to look at, by the result: compared, skipped or failed.",
    ["result"],
)
LOOP_AGE = Gauge(
    "leasehold_loop_age_seconds",
    "Seconds since a background loop of this process last completed a run without an error.",
    ["loop"],
)
LOOP_STANDS = Gauge(
    "leasehold_loop_run_seconds",
    "Seconds that the current run of a background loop of this process has taken so far, 0 between two runs.",
    ["loop"],
)


def observe_cycle(*, seconds: float, granted: int, rested: int, lost: int, evicted: int, strategy: str) -> None:
    """Count one assigner cycle: its duration in seconds, jobs granted, lost and evicted, and queues that rest."""
    CYCLE_SECONDS.observe(seconds)
    result = "assigned" if granted else "lost" if lost else "deferred" if rested else "idle"
    CYCLES.labels(result=result).inc()
    if granted:
        JOBS_ASSIGNED.labels(strategy=strategy).inc(granted)
    if rested:
        QUEUES_RESTED.labels(reason="unplaced").inc(rested)
    if lost:
        RACES_LOST.labels(kind="grant").inc(lost)
    if evicted:
        PREEMPTIONS.inc(evicted)


def observe_shadow(jobs: Mapping[tuple[int, str], int], cycles: Mapping[str, int]) -> None:
    """Count what shadows of this process have compared: by instance and the names of `schema.policy.shadows`."""
    sums = TotalCounter[str]()
    for (_, name), count in jobs.items():
        sums[name] += count
    for decided in ("bots", "orders", "victims"):
        other = sums[f"other_{decided}"]
        SHADOW_DECISIONS.labels(decided=decided, result="other").inc(other)
        SHADOW_DECISIONS.labels(decided=decided, result="same").inc(sums[decided] - other)
    for result, count in cycles.items():
        SHADOW_CYCLES.labels(result=result).inc(count)


def observe_scores(scores: Iterable[float]) -> None:
    """Record the scores that the strategy `success` gave to the bots of granted leases."""
    for score in scores:
        ASSIGNMENT_SCORE.observe(score)


def observe_phases(phases: Iterable[str]) -> None:
    """Count granted leases of jobs with preferred properties by the phase in which their bots were found."""
    for phase in phases:
        JOBS_PREFERRING.labels(phase).inc()


def observe_swarms(swarms: Sequence[Swarm]) -> None:
    """Record the statistics of every cohort's bots; drop cohorts that no longer exist."""
    for gauge in _OF_COHORTS:
        gauge.clear()
    for one in swarms:
        spread, even = one.concentration, one.even_concentration
        COHORT_LOAD.labels(one.cohort).set(_known(one.avg_load))
        COHORT_SUCCESS.labels(one.cohort).set(_known(one.avg_success_rate))
        COHORT_LATENCY.labels(one.cohort).set(math.nan if one.avg_latency_ms is None else one.avg_latency_ms / 1000)
        COHORT_PROBATION.labels(one.cohort).set(one.on_probation)
        COHORT_IN_FLIGHT.labels(one.cohort).set(one.total_in_flight)
        COHORT_CONCENTRATION.labels(one.cohort).set(spread / even if spread and even else math.nan)
        for state, number in (("idle", one.idle), ("busy", one.busy), ("offline", one.offline)):
            COHORT_BOTS.labels(one.cohort, state).set(number)


def observe_backlog(jobs: Mapping[str, int], *, oldest: float, unmatchable: int) -> None:
    """Record the jobs by state, the oldest one's seconds in the queue, and the jobs that no bot could run."""
    for state, count in jobs.items():
        JOBS.labels(state).set(count)
    OLDEST_WAIT.set(oldest)
    UNMATCHABLE.set(unmatchable)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def observe_fairness(index: float | None) -> None:
    """Record the fairness index of instances with waiting jobs; None if there is nothing to compare."""
    FAIRNESS.set(math.nan if index is None else index)


def observe_gates(*, queues: Mapping[str, int], jobs: Mapping[str, int], picked: int, empty: str | None) -> None:
    """Count one pick of constrained jobs.

    queues, jobs: how many of each every gate kept waiting, by the gate's name. picked: jobs found. empty: the reason
    if no job was found and no gate was closed.
    """
    for gate, count in queues.items():
        QUEUES_CLOSED.labels(gate=gate).inc(count)
    for gate, count in jobs.items():
        JOBS_CLOSED.labels(gate=gate).inc(count)
    if not picked:
        for reason in {*queues, *jobs} or {empty or "no room"}:
            PICKS_EMPTY.labels(reason=reason).inc()


def observe_reaped(kind: str, count: int) -> None:
    """Count the repairs of one kind in a round of upkeep."""
    if count:
        REAPED.labels(kind=kind).inc(count)


def observe_tick() -> None:
    """Record that upkeep of this process has just begun, or has looked for expired sessions."""
    UPKEEP.ticked_at = clock.monotonic()


def observe_duty(name: str, *, failures: int) -> None:
    """Record how often in a row a duty of upkeep has failed."""
    DUTY_FAILURES.labels(duty=name).set(failures)


#: What is said of each pair of cohort and instance with a quota. None makes no series.
_OF_QUOTAS: tuple[tuple[str, str, Callable[[QuotaUse], int | None]], ...] = (
    ("usage_units", "Units that the instance uses in the cohort.", lambda use: use.usage),
    ("min_units", "Minimum quota of the instance in the cohort, in units.", lambda use: use.min_quota),
    ("max_units", "Maximum quota, in units; no series = no maximum.", lambda use: use.max_quota),
    (
        "effective_max_units",
        "Maximum quota less the evictions within the cooldown, if it is in force, but not below the minimum, in units; "
        "no series = no maximum.",
        lambda use: use.effective_max,
    ),
    (
        "free_units",
        "Free units of the cohort's healthy bots that serve the instance and keep them for no other.",
        lambda use: use.free,
    ),
    (
        "opportunistic_units",
        "Units that the instance uses above its minimum, which preemption may take: max(0, usage - min).",
        lambda use: use.opportunistic,
    ),
    (
        "capacity_gap_units",
        "Units of the minimum that the cohort cannot give: max(0, min - usage - free - what others use above theirs).",
        lambda use: use.capacity_gap,
    ),
    (
        "unmet_units",
        "Units that the instance lacks of its minimum while a job of it that needs only room has waited for a minute.",
        lambda use: use.unmet,
    ),
    (
        "recent_evictions",
        "Jobs of the instance that were evicted in the cohort within the eviction cooldown.",
        lambda use: use.evictions,
    ),
)


class QuotaCollector(Collector):
    """Figures of every pair of cohort and instance with a quota, read when metrics are scraped.

    The number of pairs is bounded by what is read; how many were left out is a metric of its own. A read that fails
    is counted and logged, and the scrape has the other metrics.
    """

    def __init__(self) -> None:
        self._read: Callable[[], QuotaUses] | None = None

    def read_from(self, read: Callable[[], QuotaUses] | None) -> None:
        """Get the figures from `read` at each scrape from now on; None = there are no figures."""
        self._read = read

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The families without samples, so that registering reads nothing."""
        return self._families(None)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read the figures once, and return them as metrics."""
        found: QuotaUses | None = None
        if self._read is not None:
            try:
                found = self._read()
            except Exception as error:
                QUOTA_READS_FAILED.inc()
                log.warning("leasehold.quota_metrics_unread", error=type(error).__name__)
        return self._families(found)

    @staticmethod
    def _families(found: QuotaUses | None) -> Iterable[GaugeMetricFamily]:
        for name, told, figure in _OF_QUOTAS:
            family = GaugeMetricFamily(f"leasehold_quota_{name}", told, labels=["cohort", "instance"])
            for use in found.pairs if found else ():
                if (value := figure(use)) is not None:
                    family.add_metric([use.cohort, use.instance], value)
            yield family
        left_out = GaugeMetricFamily(
            "leasehold_quota_pairs_left_out",
            "Pairs of cohort and instance with a quota that are beyond `quotas.metric_pairs` and have no metrics.",
        )
        if found is not None:
            left_out.add_metric([], found.left_out)
        yield left_out


#: The most instances whose coverage is told.
MOST_COVERAGES = 100


def observe_forecasts(found: Sequence[Judged]) -> None:
    """Tell what became of the forecasts of the last day, of the pool and of instances."""
    of_pool = next(each for each in found if not each.instance)
    figures = {
        FORECAST_COVERAGE: of_pool.coverage,
        FORECASTS_KNOWN: of_pool.told / of_pool.with_past if of_pool.with_past else None,
        FORECAST_WIDTH: of_pool.width,
        FORECAST_ERROR: of_pool.error,
    }
    for gauge, value in figures.items():
        gauge.set(math.nan if value is None else value)
    FORECASTS_JUDGED.set(of_pool.jobs)
    FORECAST_COVERAGE_OF.clear()
    most = sorted((each for each in found if each.instance and each.jobs >= SOME), key=lambda each: -each.jobs)
    for each in most[:MOST_COVERAGES]:
        FORECAST_COVERAGE_OF.labels(instance=each.instance).set(each.kept / each.jobs)


QUOTAS = QuotaCollector()
REGISTRY.register(QUOTAS)


class UpkeepCollector(Collector):
    """The age of upkeep's last look for expired sessions, counted from its beginning before the first.

    There is no sample in processes without upkeep, where none could be true. `ticked_at`: by the monotonic clock.
    """

    ticked_at: float | None = None

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The metric without a sample."""
        yield GaugeMetricFamily(
            "leasehold_upkeep_tick_age_seconds",
            "Seconds since upkeep of this process last looked for expired sessions, or since it began.",
        )

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The metric, with a sample once upkeep has begun."""
        for family in self.describe():
            if self.ticked_at is not None:
                family.add_metric([], clock.monotonic() - self.ticked_at)
            yield family


UPKEEP = UpkeepCollector()
REGISTRY.register(UPKEEP)
