"""The duties of upkeep: expiry of sessions, overdue leases, waiting jobs, graphs, reconciliation and old records.

Finished jobs leave in rounds of their own (`retention.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, field_validator

from assigner import estimation, metrics
from assigner.maintenance import forecasts, needs, unnamed_rows
from assigner.maintenance.duties import Duty, Rounds, move_possible
from assigner.maintenance.expiry import Expiry
from assigner.maintenance.forecasts import Forecasts, Foresee
from assigner.maintenance.needs import Needs
from assigner.maintenance.overflow import OverflowController
from assigner.maintenance.webhooks import Webhooks
from assigner.queries import status
from schema import graphs
from schema.accounting import counters, fair_share, limit_patterns, pool_samples, quotas
from schema.accounting import forecasts as forecast_rows
from schema.accounting.fair_share import FairShareSettings
from schema.clock import Monotonic
from schema.diagnostics.tracing import AttemptTracer
from schema.fleet import success
from schema.fleet.kinds import link_missed
from schema.moves import retention as retention_moves
from schema.moves.cancel import ask_stop
from schema.moves.dependencies import count_dead_ends, unblock_due
from schema.moves.graphs import cancel_left_over, finish_graphs
from schema.moves.preempt import release_kept_units
from schema.moves.reassign import add_constraints, remove_constraints
from schema.moves.sessions import close_overdue
from schema.moves.waiting import pause
from schema.moves.waiting.backoff import wake_queues
from schema.moves.waiting.pause import Walked
from schema.moves.waiting.priority import reprice, review_waiting
from schema.moves.waiting.timeouts import age_out, stop_drained, stop_over_ceiling, time_out
from schema.picking import constrained
from schema.postgres import notify
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.states import LeaseState
from schema.tenancy import processes
from schema.timing import Timing

#: The most jobs that one transaction reviews, and the most such transactions in one round.
REVIEW_LIMIT, REVIEW_BATCHES = 500, 10
log = structlog.get_logger()


def review_waiting_jobs(database: Database, *, actor: str) -> Counter[str]:
    """Review the waiting jobs that are due for it: promote starving ones, hasten those near their deadline.

    Returns how many jobs were promoted, hastened and found at risk of missing their deadline.
    """
    done: Counter[str] = Counter()
    for _ in range(REVIEW_BATCHES):
        looked, warned = database.run(lambda connection: review_waiting(connection, REVIEW_LIMIT, actor=actor))
        for each in warned:
            done[each.move] += 1
            if each.move == "promote":
                log.info("promoted due to age", job=each.public_id, now=each.level)
            elif each.move == "at_risk":
                log.warning("a job will miss its deadline", job=each.public_id)
        if looked < REVIEW_LIMIT:
            break
    for move, count in done.items():
        metrics.WATCHED.labels(move=move).inc(count)
    return done


def sample_minute(connection: Connection) -> bool:
    """Write the samples of the last minute that is over; false if another process has done so."""
    at = pool_samples.claim(connection)
    if at is None:
        return False
    pool_samples.store(connection, at, status.count_minute(connection, at))
    return True


#: The most rows that one transaction changes.
LIMIT = 500
#: The most requirement sets that one transaction links: no session opens meanwhile.
LINKS = 20
#: The most batches of one duty in one round.
DELETIONS = 10
HOUR = 3600.0
DAY = 24 * HOUR
#: Seconds between two reconciliations of quotas and bots, between two rounds that end usage older than the window, and
#: between two counts of the backlog.
RECONCILE_INTERVAL = ROLL_INTERVAL = BACKLOG_INTERVAL = 60.0

#: Seconds between two looks whether the last minute has its samples. Half a minute, so that no minute is left out.
SAMPLE_INTERVAL = 30.0
#: Seconds between two looks for jobs that have waited longer than a ceiling: a look may read all that wait.
AGE_INTERVAL = 10.0
#: Seconds between two thorough rounds, which read all overdue leases. Other rounds read only the leases that became due
#: within LOOK_BACK rounds, because earlier ones are left only if a round failed.
THOROUGH_INTERVAL, LOOK_BACK = 60.0, 10
EVER = 1e9
#: The most nodes of graphs counted that can never run.
MAX_DEAD_ENDS = 100_000

# Locked leases are skipped while reading, so that those in front keep no others waiting.
OVERDUE = Statement(f"""
SELECT job_id, fence, state FROM leases WHERE {needs.OVERDUE}
ORDER BY due_at LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")


class UpkeepSettings(BaseModel):
    """How long ended jobs and other records are kept, in seconds. Doubling an age doubles the disk space.

    keep_succeeded: succeeded jobs, and finished graphs without any job left.
    keep_failed, keep_cancelled: jobs that ended so.
    keep_dead: dead jobs, what builds have asked for, and the log of evictions, which is kept for at least a day.
    keep_keys: keys that callers gave their submits, from the submit on. Those that clients made are kept for an hour.
    keep_gone_bots: bots without a session, counted from the start of their last one; drained bots are kept.
    keep_audit: audit rows.
    keep_journal: what is kept of deleted jobs, for `leasehold simulate` and forecasts, counted from the end of the job;
        and sessions of bots, from their end. 0 = nothing is kept.
    keep_usage: usage of instances, counted at the earliest from when it left the rolling window.
    retention_interval: seconds between two looks for jobs that may be deleted; none while some are left.
    predictor: how the run time of a class's jobs is predicted: `quantiles` of the latest runs, or the name of an entry
        point of the group `leasehold.predictors`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    keep_succeeded: float = Field(default=DAY, ge=0, le=3650 * DAY)
    keep_failed: float = Field(default=7 * DAY, ge=0, le=3650 * DAY)
    keep_cancelled: float = Field(default=DAY, ge=0, le=3650 * DAY)
    keep_dead: float = Field(default=30 * DAY, ge=0, le=3650 * DAY)
    keep_keys: float = Field(default=7 * DAY, ge=0, le=3650 * DAY)
    keep_gone_bots: float = Field(default=30 * DAY, ge=0, le=3650 * DAY)
    keep_audit: float = Field(default=365 * DAY, ge=0, le=3650 * DAY)
    keep_journal: float = Field(default=90 * DAY, ge=0, le=3650 * DAY)
    keep_usage: float = Field(default=30 * DAY, ge=0, le=3650 * DAY)
    retention_interval: float = Field(default=5.0, gt=0, le=DAY)
    predictor: str = estimation.QUANTILES

    @field_validator("predictor")
    @classmethod
    def _predictor_is_there(cls, predictor: str) -> str:
        estimation.load_predictor(predictor)
        return predictor


class Upkeep(Rounds):
    """Carries out the duties of upkeep.

    A duty of each round runs only if there is anything for it: see `Needs`.
    """

    def __init__(
        self,
        database: Database,
        settings: UpkeepSettings,
        *,
        timing: Timing,
        name: str,
        now: Monotonic,
        fair: FairShareSettings | None = None,
        webhooks: Webhooks | None = None,
        tracer: AttemptTracer | None = None,
        foresee: Foresee | None = None,
    ) -> None:
        # A duty comes again in the next round, and sessions must not expire late because others wait at several tries.
        self._database = database = database.waiting_once()
        self._expiry = Expiry(database, timing=timing, actor=name, now=now, tracer=tracer)
        self._forecasts = None if foresee is None else Forecasts(database, foresee)
        self.name = name
        super().__init__(pause=timing.reap, now=now)
        self._timing = timing
        self._overflow = OverflowController(database, name=name, now=now, webhooks=webhooks)
        self._needs = Needs(database, now, since=LOOK_BACK * timing.reap)
        self._question = Duty("needs", 0, self._needs.ask)
        self.reconfigure(settings, fair or FairShareSettings())
        metrics.observe_tick()

    def reconfigure(self, settings: UpkeepSettings, fair: FairShareSettings) -> None:
        """Use these settings from the next round on."""
        self._settings, self._fair = settings, fair
        self.duties = [
            *self._duties_of_sessions(),
            *self._duties_of_jobs(),
            *self._duties_of_pauses(),
            *self._duties_of_totals(),
            *self._duties_of_forecasts(),
            *self._duties_of_cleaning(),
        ]

    def run_once(self) -> float:
        """Run the duties that are due and have something to do; returns the seconds until the next round."""
        self._needs.begin()
        return super().run_once()

    def _by_need(self, name: str, what: str, run: Callable[[], bool | None]) -> Duty:
        """Return a duty of each round that runs if there is anything to do of what `NEEDS` calls so."""
        return Duty(name, 0, lambda: run() if self._is_needed(what) else None)

    def _is_needed(self, what: str) -> bool:
        """Return whether there may be anything to do of this, after what the duties before it have done."""
        if self._needs.is_outdated(what):
            self._run(self._question)
        return self._needs.are_there(what)

    def _duties_of_sessions(self) -> Iterator[Duty]:
        """What keeps bots and leases alive or ends them; first, because other things wait for it."""
        yield Duty("sessions", 0, self._expiry.run_once)
        yield self._question
        yield self._by_need("overdue leases", "overdue", partial(self._overdue, since=LOOK_BACK * self._timing.reap))
        yield Duty("all overdue leases", THOROUGH_INTERVAL, partial(self._overdue, since=EVER))
        yield self._by_need("drains", "drained", self._drained)
        yield self._by_need("ceilings of run times", "ceilings", self._ceilings)
        yield Duty("ceilings of waits", AGE_INTERVAL, self._age_out)
        yield self._by_need("kept units", "kept", self._kept_units)
        yield self._by_need("probation", "probation", self._probation)

    def _duties_of_jobs(self) -> Iterator[Duty]:
        """What moves jobs that wait, and graphs."""
        yield self._by_need("queue timeouts", "late", self._time_out)
        yield self._by_need("missed links", "unlinked", self._in_batches(self._link, full=LINKS))
        yield self._by_need("graph nodes", "graphs", self._graph_nodes)
        yield self._by_need("cancelled graphs", "graphs", self._cancelled_graphs)
        yield self._by_need("finished graphs", "graphs", self._finished_graphs)
        yield Duty("dead ends of graphs", 0, self._dead_ends)
        yield self._by_need("changed points", "repricing", self._reprice)
        yield self._by_need("waiting jobs", "watched", self._waiting_jobs)
        yield self._by_need("overflow", "overflow", self._overflow.run_once)

    def _duties_of_pauses(self) -> Iterator[Duty]:
        """What sets jobs aside that are paused, and makes them ready again."""
        # Who resumes makes the first jobs ready at once. This looks at each job that is set aside.
        yield Duty("resumed jobs", 10.0, self._walk(pause.make_ready, limit=10 * LIMIT, pages=1))
        yield Duty("paused jobs", 10.0, self._walk(pause.set_aside_ready, limit=LIMIT, pages=DELETIONS))

    def _duties_of_totals(self) -> Iterator[Duty]:
        """What compares totals with what they count, and counts what is shown."""
        run = self._database.run
        yield Duty("quotas", RECONCILE_INTERVAL, self._reconcile_quotas)
        yield Duty("capacity", RECONCILE_INTERVAL, self._reconcile_capacity)
        predict = partial(estimation.predict, self._database, self._settings.predictor)
        yield Duty("predictions", RECONCILE_INTERVAL, self._whole(predict))
        yield Duty("counters", RECONCILE_INTERVAL, self._doing(counters.sample))
        yield Duty("swarms", RECONCILE_INTERVAL, lambda: metrics.observe_swarms(run(success.swarms)))
        yield Duty("demand", fair_share.DEMAND_INTERVAL, self._demand)
        for name, move in (("new accounts", add_constraints), ("lost accounts", remove_constraints)):
            yield Duty(name, fair_share.DEMAND_INTERVAL, self._in_batches(partial(move, limit=LIMIT)))
        roll = partial(counters.roll, window=self._fair.window, limit=LIMIT)
        rolled = partial(move_possible, self._database, roll)
        yield Duty("usage within the window", ROLL_INTERVAL, lambda: all(rolled() >= LIMIT for _ in range(DELETIONS)))
        yield Duty("backlog", BACKLOG_INTERVAL, self._backlog)
        yield Duty("notifications", BACKLOG_INTERVAL, lambda: metrics.NOTIFICATIONS.set(run(notify.queue_usage)))
        yield Duty("samples", SAMPLE_INTERVAL, self._doing(sample_minute))

    def _duties_of_forecasts(self) -> Iterator[Duty]:
        """What makes forecasts and judges them."""
        if self._forecasts is not None:
            yield Duty("forecasts", forecasts.INTERVAL, self._forecasts.run_once)
            yield Duty("errors of forecasts", RECONCILE_INTERVAL, self._forecasts.measure)

    def _duties_of_cleaning(self) -> Iterator[Duty]:
        """What deletes old rows."""
        settings = self._settings
        # The cooldown of evictions is at most a day.
        batches: dict[str, Callable[[Connection], int]] = {
            "old evictions": partial(
                retention_moves.delete_old_evictions, age=max(settings.keep_dead, DAY), limit=LIMIT
            ),
            "old builds": partial(retention_moves.delete_old_builds, age=settings.keep_dead, limit=LIMIT),
            "old blames": partial(retention_moves.delete_old_blames, age=DAY, limit=LIMIT),
            "old lost attempts": partial(retention_moves.delete_old_lost_attempts, age=DAY, limit=LIMIT),
            "old audit": partial(retention_moves.delete_old_audit, age=settings.keep_audit, limit=LIMIT),
            "old usage": partial(retention_moves.delete_old_usage, age=settings.keep_usage, limit=LIMIT),
            **{
                f"old {name}": partial(retention_moves.delete_old_journal, table=table, age=age, limit=LIMIT)
                for name, table, age in (
                    # They may have been used a day longer than they say, and the day is kept a day longer.
                    ("queues of the journal", "journal_queues", settings.keep_journal + 2 * DAY),
                    ("sessions of bots", "bot_sessions", settings.keep_journal),
                )
            },
            "idle locks and rates of patterns": partial(limit_patterns.delete_idle, age=DAY, limit=LIMIT),
            "idle counters of graphs": partial(graphs.delete_idle_counters, limit=LIMIT),
            "unused constraint sets": partial(retention_moves.delete_unused_constraint_sets, age=HOUR, limit=LIMIT),
            "unused requirement sets": partial(retention_moves.delete_unused_platforms, age=HOUR, limit=LIMIT),
            "unused kinds of bots": partial(retention_moves.delete_unused_kinds, age=HOUR, limit=LIMIT),
            "old forecasts": partial(forecast_rows.forget, limit=LIMIT),
            "old samples": partial(pool_samples.forget, limit=LIMIT),
        }
        for name, batch in batches.items():
            yield Duty(name, HOUR, self._in_batches(batch))
        gone = unnamed_rows.gone_bots(self._database, age=settings.keep_gone_bots)
        yield Duty("gone bots", HOUR, gone.run_once)
        yield Duty("idle queues", HOUR, unnamed_rows.idle_queues(self._database).run_once)
        unseen = partial(retention_moves.delete_unseen_assigners, age=DAY)
        yield Duty("unseen assigners", HOUR, self._doing(unseen))
        yield Duty("ended processes", HOUR, self._doing(partial(processes.forget, age=DAY)))
        for fine, coarse, age in pool_samples.MERGES:
            merge = partial(pool_samples.merge, fine=fine, coarse=coarse, age=age)
            yield Duty(f"samples of {coarse:g} s", HOUR, self._in_batches(merge, full=1))

    def _doing(self, work: Callable[[Connection], object]) -> Callable[[], None]:
        """A run that does the work in one transaction."""
        return self._whole(lambda: self._database.run(work))

    @staticmethod
    def _whole(work: Callable[[], object]) -> Callable[[], None]:
        """A run after which nothing is left, whatever the work returns."""

        def run() -> None:
            work()

        return run

    def _in_batches(self, batch: Callable[[Connection], int], *, full: int = LIMIT) -> Callable[[], bool]:
        """A run in batches until one is not full, at most DELETIONS, because a long round delays other duties."""
        return lambda: all(self._database.run(batch) >= full for _ in range(DELETIONS))

    def _walk(self, look: Callable[..., Walked], *, limit: int, pages: int) -> Callable[[], bool]:
        """A run that looks at some pages of jobs, and goes on where the run before has ended."""
        after: Mapping[str, Any] | None = None

        def run() -> bool:
            nonlocal after
            for _ in range(pages):
                after = self._database.run(partial(look, after=after, limit=limit)).after
                if after is None:
                    break
            return after is not None

        return run

    def _overdue(self, *, since: float) -> bool:
        """Ask bots to stop unacknowledged leases and those that run too long; close bots that do not stop.

        since: only leases that became due during the last so many seconds.
        """

        def batch(connection: Connection) -> tuple[int, int, int]:
            overdue = connection.execute(OVERDUE, {"limit": LIMIT, "since": since}).all()
            asked = closed = 0
            for state, reason in ((LeaseState.PENDING, "unacknowledged"), (LeaseState.ACTIVE, "timeout")):
                leases = [(lease.job_id, lease.fence) for lease in overdue if lease.state == state]
                if leases:
                    asked += ask_stop(connection, leases, from_state=state, reason=reason, sync=self._timing.sync)
            if any(lease.state == LeaseState.CANCELLING for lease in overdue):
                closed = len(close_overdue(connection, LIMIT))
            return len(overdue), asked, closed

        found, asked, closed = self._database.run(batch, urgent=True)
        metrics.observe_reaped("overdue", asked)
        metrics.observe_reaped("stubborn", closed)
        return found == LIMIT

    def _drained(self) -> None:
        stopped = self._database.run(
            lambda c: stop_drained(c, LIMIT, sync=self._timing.sync, actor=self.name), urgent=True
        )
        metrics.observe_reaped("drained", stopped)

    def _ceilings(self) -> None:
        """Stop what runs longer than its ceiling."""
        stopped = self._database.run(lambda c: stop_over_ceiling(c, LIMIT, sync=self._timing.sync, actor=self.name))
        metrics.observe_reaped("ceiling", stopped)

    def _age_out(self) -> bool:
        """Give up what has waited longer than its ceiling."""
        aged = move_possible(self._database, partial(age_out, limit=LIMIT, actor=self.name))
        metrics.observe_reaped("ceiling", aged)
        return aged == LIMIT

    def _time_out(self) -> None:
        metrics.observe_reaped("waited", move_possible(self._database, partial(time_out, limit=LIMIT, actor=self.name)))

    def _kept_units(self) -> None:
        for released in self._database.run(lambda c: release_kept_units(c, LIMIT)):
            metrics.observe_reaped("kept", 1)
            log.warning("leasehold.kept_units_unused", **asdict(released))

    def _probation(self) -> None:
        """Begin and end probations of bots and log each."""
        found = self._database.run(success.review_probation)
        for name in found.begun:
            log.warning("a bot is on probation: jobs that failed there passed elsewhere", bot=name)
        for name in found.over:
            log.info("a bot's probation is over", bot=name)
        metrics.observe_reaped("probation", len(found.begun))

    def _graph_nodes(self) -> None:
        """Queue or cancel nodes whose jobs were locked when they were due."""
        settled = move_possible(self._database, partial(unblock_due, limit=LIMIT))
        metrics.observe_reaped("graph", settled.queued + settled.cancelled)

    def _cancelled_graphs(self) -> None:
        """Cancel the jobs left over in graphs that were cancelled or replaced."""
        cancel = partial(cancel_left_over, limit=LIMIT, sync=self._timing.sync, actor=self.name)
        cancelled = move_possible(self._database, cancel)
        metrics.observe_reaped("graph", cancelled)

    @staticmethod
    def _link(connection: Connection) -> int:
        """Link new requirement sets with kinds of bots that appeared at the same time, and wake their queues."""
        found = link_missed(connection, limit=LINKS)
        if found.queues and wake_queues(connection, found.queues):
            notify.wake(connection, "jobs")
        return found.sets

    def _finished_graphs(self) -> None:
        self._database.run(lambda c: finish_graphs(c, LIMIT))

    def _dead_ends(self) -> None:
        """Set the gauge of nodes that can never run."""
        any_graph = self._is_needed("graphs")
        found = self._database.run(lambda c: count_dead_ends(c, MAX_DEAD_ENDS)) if any_graph else 0
        metrics.BLOCKED_FOREVER.set(found)

    def _reprice(self) -> bool:
        """Go on with the walk that gives waiting jobs the priority of points that were changed."""
        batch = partial(reprice, limit=LIMIT, actor=self.name)
        return all(not self._database.run(batch).is_over for _ in range(DELETIONS))

    def _waiting_jobs(self) -> None:
        review_waiting_jobs(self._database, actor=self.name)

    def _reconcile_quotas(self) -> None:
        """Compare the totals of quotas with what they count. A difference is a defect, repaired and logged."""
        for drift in self._database.run(quotas.reconcile_quotas):
            metrics.QUOTA_DRIFT.inc()
            log.error("a quota's counter was wrong and is repaired", **asdict(drift))

    def _reconcile_capacity(self) -> None:
        """Compare the units in use of bots with their leases. A difference is a defect, repaired and logged."""
        for room in self._database.run(quotas.reconcile_capacity):
            metrics.CAPACITY_DRIFT.inc()
            log.error("a bot's units in use were wrong and are repaired", **asdict(room))

    def _demand(self) -> None:
        """Record which managed instances have jobs."""
        self._database.run(lambda c: fair_share.record_demand(c, constrained.unrecorded_demand(c), self._fair))

    def _backlog(self) -> None:
        backlog = self._database.run(status.count_backlog)
        metrics.observe_backlog(backlog.jobs, oldest=backlog.oldest, unmatchable=backlog.unmatchable)
