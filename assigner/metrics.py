"""Prometheus metrics of assigners and upkeep.

The number of label values is bounded: labels are names from the configuration or words listed here, never ids.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from schema import clock
from schema.fleet.success import Swarm

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
_OF_COHORTS = (COHORT_LOAD, COHORT_SUCCESS, COHORT_BOTS, COHORT_PROBATION, COHORT_IN_FLIGHT, COHORT_CONCENTRATION)
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
TICK_AGE = Gauge(
    "leasehold_upkeep_tick_age_seconds",
    "Seconds since this process last completed a round of upkeep, NaN before its first.",
)
TICK_AGE.set(math.nan)

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
LOOP_AGE = Gauge(
    "leasehold_loop_age_seconds",
    "Seconds since a background loop of this process last completed a run without an error.",
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


def observe_scores(scores: Iterable[float]) -> None:
    """Record the scores that the strategy `success` gave to the bots of granted leases."""
    for score in scores:
        ASSIGNMENT_SCORE.observe(score)


def observe_swarms(swarms: Sequence[Swarm]) -> None:
    """Record the statistics of every cohort's bots; drop cohorts that no longer exist."""
    for gauge in _OF_COHORTS:
        gauge.clear()
    for one in swarms:
        spread, even = one.concentration, one.even_concentration
        COHORT_LOAD.labels(one.cohort).set(_known(one.avg_load))
        COHORT_SUCCESS.labels(one.cohort).set(_known(one.avg_success_rate))
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
    """Record that a round of upkeep has just ended."""
    ended = clock.monotonic()
    TICK_AGE.set_function(lambda: clock.monotonic() - ended)
