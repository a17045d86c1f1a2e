"""What assigners and upkeep count. Labels are bounded: names of the configuration or words listed here, never ids."""

import math
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from schema import clock
from schema.fleet.success import Swarm

CYCLES = Counter(
    "leasehold_assigner_cycles_total",
    "Cycles of the assigners, by what came of them: assigned, deferred, idle or lost.",
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
JOBS_DEFERRED = Counter(
    "leasehold_jobs_deferred_total",
    "Jobs that were looked at and put back with a delay, by the reason why no bot could take them.",
    ["reason"],
)
RACES_LOST = Counter(
    "leasehold_races_lost_total",
    "Rows that a move did not change because another transaction was faster, by the kind of move.",
    ["kind"],
)

QUEUES_CLOSED = Counter(
    "leasehold_gated_queues_closed_total",
    "Queues of jobs that ask for more than a place which a gate kept waiting as a whole, of those that a cycle asks.",
    ["gate"],
)
JOBS_CLOSED = Counter(
    "leasehold_gated_jobs_closed_total",
    "Jobs of open queues which a gate kept waiting, counted each cycle.",
    ["gate"],
)
PICKS_EMPTY = Counter(
    "leasehold_gated_picks_empty_total",
    "Looks at jobs that ask for more than a place which gave none, by the reason: a gate, no room, empty queue, "
    "or others have them.",
    ["reason"],
)

PREEMPTIONS = Counter(
    "leasehold_preemptions_total",
    "Running jobs that were asked to stop so that an instance gets its minimum.",
)
FAIRNESS = Gauge(
    "leasehold_fairness_index",
    "Jain's index of what managed instances with jobs waiting have used for their weights: 1 = alike; NaN = nobody.",
)
FAIRNESS.set(math.nan)
QUOTA_DRIFT = Counter(
    "leasehold_quota_drift_total",
    "Quota counters that differed from the live leases they count, and were repaired: each is a defect.",
)
CAPACITY_DRIFT = Counter(
    "leasehold_capacity_drift_total",
    "Bots whose units in use differed from their live leases or reservations, and were repaired: each is a defect.",
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
    "Herfindahl index of the units in use by bot, over what it would be if every bot of the cohort were loaded alike: "
    "1 is even, NaN if none are in use.",
    ["cohort"],
)
_OF_COHORTS = (COHORT_LOAD, COHORT_SUCCESS, COHORT_BOTS, COHORT_PROBATION, COHORT_IN_FLIGHT, COHORT_CONCENTRATION)
BLOCKED_FOREVER = Gauge(
    "leasehold_graph_nodes_blocked_forever",
    "Nodes of unfinished graphs with a dependency that is absent or ended otherwise than they ask, at the last upkeep.",
)

JOBS = Gauge(
    "leasehold_jobs",
    "Jobs that are not over, by state, at the last look of upkeep, which is once a minute. Of more than 100,000 that "
    "wait in one way, or run, at least so many.",
    ["state"],
)
OLDEST_WAIT = Gauge(
    "leasehold_oldest_wait_seconds",
    "Seconds for which the oldest queued job among those that were counted had been so, at that look; 0 without any.",
)
UNMATCHABLE = Gauge(
    "leasehold_jobs_unmatchable",
    "Queued jobs that no present bot could run, even if it were idle, at that look.",
)

REAPED = Counter(
    "leasehold_upkeep_reaped_total",
    "What upkeep put right: sessions expired, jobs requeued, leases stopped, sessions closed or jobs deleted, by kind.",
    ["kind"],
)
WATCHED = Counter(
    "leasehold_waiting_jobs_total",
    "Waiting jobs that were promoted because they starved, hastened because they are due, or found at risk to be late.",
    ["move"],
)
DEFERRED = Counter(
    "leasehold_overflow_jobs_total",
    "Jobs that were taken off the queue because more waited than may, and that returned to it, by move.",
    ["move"],
)
TICK_AGE = Gauge(
    "leasehold_upkeep_tick_age_seconds",
    "Seconds since this process last completed a round of upkeep, NaN before its first.",
)
TICK_AGE.set(math.nan)

LOOP_CYCLES = Counter(
    "leasehold_loop_cycles_total",
    "Runs of a background loop of this process that ended well.",
    ["loop"],
)
LOOP_ERRORS = Counter(
    "leasehold_loop_errors_total",
    "Runs of a background loop of this process that ended with an error.",
    ["loop"],
)
LOOP_AGE = Gauge(
    "leasehold_loop_age_seconds",
    "Seconds since a background loop of this process last completed a run that ended well.",
    ["loop"],
)


def observe_cycle(*, seconds: float, granted: int, postponed: int, lost: int, evicted: int, strategy: str) -> None:
    """Count one cycle of an assigner that took `seconds`, granted, postponed, lost and evicted so many jobs."""
    CYCLE_SECONDS.observe(seconds)
    result = "assigned" if granted else "lost" if lost else "deferred" if postponed else "idle"
    CYCLES.labels(result=result).inc()
    if granted:
        JOBS_ASSIGNED.labels(strategy=strategy).inc(granted)
    if postponed:
        JOBS_DEFERRED.labels(reason="unplaced").inc(postponed)
    if lost:
        RACES_LOST.labels(kind="grant").inc(lost)
    if evicted:
        PREEMPTIONS.inc(evicted)


def observe_scores(scores: Iterable[float]) -> None:
    """Placements that became leases, by what the strategy `success` thought of their bots."""
    for score in scores:
        ASSIGNMENT_SCORE.observe(score)


def observe_swarms(swarms: Sequence[Swarm]) -> None:
    """How the bots of every cohort are; cohorts that are no more are dropped."""
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
    """What waits and runs, by state; how long the oldest has been queued, seconds; what nobody could run."""
    for state, count in jobs.items():
        JOBS.labels(state).set(count)
    OLDEST_WAIT.set(oldest)
    UNMATCHABLE.set(unmatchable)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def observe_fairness(index: float | None) -> None:
    """How evenly the instances that have jobs waiting have been served, None if there is nothing to compare."""
    FAIRNESS.set(math.nan if index is None else index)


def observe_gates(*, queues: Mapping[str, int], jobs: Mapping[str, int], picked: int, empty: str | None) -> None:
    """Count one look at jobs that ask for more than a place: what gates have closed, by their names, and why it gave
    none of `picked` jobs."""
    for gate, count in queues.items():
        QUEUES_CLOSED.labels(gate=gate).inc(count)
    for gate, count in jobs.items():
        JOBS_CLOSED.labels(gate=gate).inc(count)
    if not picked:
        for reason in {*queues, *jobs} or {empty or "no room"}:
            PICKS_EMPTY.labels(reason=reason).inc()


def observe_reaped(kind: str, count: int) -> None:
    """Count what a round of upkeep put right."""
    if count:
        REAPED.labels(kind=kind).inc(count)


def observe_tick() -> None:
    """A round of upkeep has just ended."""
    ended = clock.monotonic()
    TICK_AGE.set_function(lambda: clock.monotonic() - ended)
