"""The rounds of upkeep: expiry of sessions, overdue leases, waiting jobs, graphs, reconciliation and retention.

Every assigner process runs them. Each duty is a bounded batch that skips locked rows, so any process may run it at any
time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import structlog
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy import Connection, text

from assigner import estimation, metrics
from assigner.maintenance.overflow import OverflowController
from assigner.maintenance.webhooks import Webhooks
from assigner.queries import status
from schema import clock, graphs
from schema.accounting import counters, fair_share, pool_samples, quotas
from schema.accounting.fair_share import FairShareSettings
from schema.clock import Monotonic
from schema.diagnostics.tracing import AttemptTracer
from schema.fleet import success
from schema.fleet.kinds import link_missed
from schema.moves import retention as retention_moves
from schema.moves.cancel import ask_stop
from schema.moves.dependencies import any_open_graph, count_dead_ends, unblock_due
from schema.moves.graphs import cancel_left_over, delete_graph, finish_graphs
from schema.moves.preempt import release_kept_units
from schema.moves.priority import review_waiting
from schema.moves.reassign import add_constraints, remove_constraints
from schema.moves.retention import delete_finished
from schema.moves.sessions import close_overdue, expire
from schema.moves.timeouts import age_out, stop_drained, stop_over_ceiling, time_out
from schema.picking import constrained
from schema.postgres.engine import Database
from schema.states import LeaseState
from schema.tenancy import drains, processes
from schema.timing import Timing

#: The most jobs that one transaction reviews, and the most such transactions in one round.
REVIEW_LIMIT, REVIEW_BATCHES = 500, 10
#: Seconds for which a round waits for the readers of queues that it wants to delete, and between two looks at them.
READERS_PATIENCE, READERS_PAUSE = 0.5, 0.02

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


def delete_idle_queues(database: Database, *, patience: float = READERS_PATIENCE) -> int:
    """Delete queues that were marked in an earlier round and that no job has, and mark others; returns how many went.

    patience: seconds to wait for transactions that may have looked them up before. If one goes on, none is deleted.
    """
    unused, deleted = database.run(retention_moves.unused_queues), 0
    if unused:
        readers = database.run(retention_moves.readers_of_queues)
        give_up = clock.monotonic() + patience
        while readers and clock.monotonic() < give_up:
            clock.sleep(READERS_PAUSE)
            readers &= database.run(retention_moves.readers_of_queues)
        if not readers:
            deleted = database.run(lambda connection: retention_moves.delete_queues(connection, unused))
    database.run(retention_moves.mark_idle_queues)
    return deleted


def sample_minute(connection: Connection) -> bool:
    """Write the samples of the last minute that is over; false if another process has done so."""
    at = pool_samples.claim(connection)
    if at is None:
        return False
    pool_samples.store(connection, at, status.count_minute(connection, at))
    return True


#: The most rows that one transaction changes.
LIMIT = 500
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

# The lower bound on `due_at` matters while an old snapshot is open: then the index keeps every lease that ended since,
# and most of these were due by now.
OVERDUE = text("""
SELECT job_id, fence, state FROM leases
WHERE state IN ('pending', 'active', 'cancelling') AND due_at < now()
    AND due_at >= now() - make_interval(secs => :since)
    AND NOT (state = 'cancelling' AND EXISTS (SELECT FROM bots b WHERE b.id = leases.bot_id AND b.closing))
ORDER BY due_at LIMIT :limit
""")


class UpkeepSettings(BaseModel):
    """How long ended jobs and other records are kept, in seconds. Doubling an age doubles the disk space.

    keep_succeeded: succeeded jobs, and finished graphs without any job left.
    keep_failed, keep_cancelled: jobs that ended so.
    keep_dead: dead jobs, and the log of evictions, which is kept for at least a day.
    keep_gone_bots: bots without a session, counted from the start of their last one; drained bots are kept.
    keep_audit: audit rows.
    keep_usage: usage of instances, counted at the earliest from when it left the rolling window.
    retention_interval: seconds between two deletions of old jobs.
    predictor: how the run time of a class's jobs is predicted: `quantiles` of the latest runs, or the name of an entry
        point of the group `leasehold.predictors`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    keep_succeeded: float = Field(default=DAY, ge=0, le=3650 * DAY)
    keep_failed: float = Field(default=7 * DAY, ge=0, le=3650 * DAY)
    keep_cancelled: float = Field(default=DAY, ge=0, le=3650 * DAY)
    keep_dead: float = Field(default=30 * DAY, ge=0, le=3650 * DAY)
    keep_gone_bots: float = Field(default=30 * DAY, ge=0, le=3650 * DAY)
    keep_audit: float = Field(default=365 * DAY, ge=0, le=3650 * DAY)
    keep_usage: float = Field(default=30 * DAY, ge=0, le=3650 * DAY)
    retention_interval: float = Field(default=60.0, gt=0, le=DAY)
    predictor: str = estimation.QUANTILES

    @field_validator("predictor")
    @classmethod
    def _predictor_is_there(cls, predictor: str) -> str:
        estimation.load_predictor(predictor)
        return predictor


@dataclass
class RoundResult:
    """The counts of one round of upkeep.

    session: expired sessions. kept: bots that kept units for an instance in vain. overdue: overdue leases asked to
    stop. drained: leases asked to stop because a drain's deadline passed. stubborn: bots closed because they did not
    stop a lease. ceiling: leases asked to stop, and waiting jobs given up, because of a ceiling. waited: jobs that
    reached their queue timeout. probation: bots put on probation. graph: nodes queued
    or cancelled. retention: deleted jobs.
    """

    session: int = 0
    kept: int = 0
    overdue: int = 0
    drained: int = 0
    stubborn: int = 0
    ceiling: int = 0
    waited: int = 0
    probation: int = 0
    graph: int = 0
    retention: int = 0


class Upkeep:
    """Runs the duties in rounds. Rounds of several processes may overlap freely."""

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
    ) -> None:
        self.name, self._tracer = name, tracer
        self._database, self._settings, self._timing, self._now = database, settings, timing, now
        self._fair = fair or FairShareSettings()
        self._overflow = OverflowController(database, name=name, now=now, webhooks=webhooks)
        self._next_retention = self._next_reconcile = self._next_forget = self._next_thorough = now()
        self._next_share = self._next_roll = self._next_backlog = self._next_age = self._next_sample = now()

    def reconfigure(self, settings: UpkeepSettings, fair: FairShareSettings) -> None:
        """Use these settings from the next round on."""
        self._settings, self._fair = settings, fair

    def run_once(self) -> float:
        """Run one round; returns the seconds until the next one is due."""
        done = RoundResult()
        in_grace = self._database.run(self._tick, urgent=True)
        if not in_grace:
            self._expire(done)
        done.overdue, done.stubborn = self._database.run(self._overdue, urgent=True, undone=self._overlooked)
        done.drained = self._database.run(self._drained, urgent=True)
        done.ceiling = self._ceilings()
        done.waited = self._database.run(lambda connection: time_out(connection, LIMIT, actor=self.name))
        self._graphs(done)
        for released in self._database.run(lambda connection: release_kept_units(connection, LIMIT)):
            done.kept += 1
            log.warning("leasehold.kept_units_unused", **asdict(released))
        done.probation = self._probation()
        review_waiting_jobs(self._database, actor=self.name)
        self._overflow.run_once()
        if self._now() >= self._next_reconcile:
            self._next_reconcile = self._now() + RECONCILE_INTERVAL
            self._reconcile()
            estimation.predict(self._database, self._settings.predictor)
            self._database.run(counters.sample)
            metrics.observe_swarms(self._database.run(success.swarms))
        if self._now() >= self._next_share:
            self._next_share = self._now() + fair_share.DEMAND_INTERVAL
            self._share()
        if self._now() >= self._next_roll:
            self._next_roll = self._now() + ROLL_INTERVAL
            self._roll()
        if self._now() >= self._next_retention:
            self._next_retention = self._now() + self._settings.retention_interval
            self._delete(done)
        if self._now() >= self._next_forget:
            self._next_forget = self._now() + HOUR
            self._forget()
        if self._now() >= self._next_backlog:
            self._next_backlog = self._now() + BACKLOG_INTERVAL
            backlog = self._database.run(status.count_backlog)
            metrics.observe_backlog(backlog.jobs, oldest=backlog.oldest, unmatchable=backlog.unmatchable)
        if self._now() >= self._next_sample:
            self._next_sample = self._now() + SAMPLE_INTERVAL
            self._database.run(sample_minute)
        for kind, count in vars(done).items():
            metrics.observe_reaped(kind, count)
        metrics.observe_tick()
        return self._timing.reap

    def _tick(self, connection: Connection) -> bool:
        return drains.tick(connection, "reaper", gap=self._timing.ttl / 2, grace=self._timing.ttl)

    def _expire(self, done: RoundResult) -> None:
        """Close expired sessions page by page, each page in its own transaction."""
        after = 0
        while True:

            def page(connection: Connection, after: int = after) -> list[int]:
                bot_ids, ended = expire(connection, after=after, limit=LIMIT, actor=self.name)
                if self._tracer is not None:
                    self._tracer.trace(connection, ended)
                return bot_ids

            bot_ids = self._database.run(page, urgent=True)
            done.session += len(bot_ids)
            if len(bot_ids) < LIMIT:
                return
            after = bot_ids[-1]

    def _overlooked(self) -> None:
        """Make the next round thorough, because the transaction that was rolled back may have been a thorough one."""
        self._next_thorough = self._now()

    def _overdue(self, connection: Connection) -> tuple[int, int]:
        """Ask bots to stop unacknowledged leases and those that run too long; close bots that do not stop.

        Returns the number of leases and of bots.
        """
        thorough = self._now() >= self._next_thorough
        since = EVER if thorough else LOOK_BACK * self._timing.reap
        overdue = connection.execute(OVERDUE, {"limit": LIMIT, "since": since}).all()
        if len(overdue) == LIMIT:
            self._next_thorough = self._now()
        elif thorough:
            self._next_thorough = self._now() + THOROUGH_INTERVAL
        asked = 0
        for state, reason in ((LeaseState.PENDING, "unacknowledged"), (LeaseState.ACTIVE, "timeout")):
            leases = [(lease.job_id, lease.fence) for lease in overdue if lease.state == state]
            if leases:
                asked += ask_stop(connection, leases, from_state=state, reason=reason, sync=self._timing.sync)
        if any(lease.state == LeaseState.CANCELLING for lease in overdue):
            return asked, len(close_overdue(connection, LIMIT))
        return asked, 0

    def _drained(self, connection: Connection) -> int:
        return stop_drained(connection, LIMIT, sync=self._timing.sync, actor=self.name)

    def _ceilings(self) -> int:
        """Stop what runs, and give up what waits, longer than its ceiling; returns the number of both."""
        beyond = self._database.run(
            lambda connection: stop_over_ceiling(connection, LIMIT, sync=self._timing.sync, actor=self.name)
        )
        if self._now() >= self._next_age:
            aged = self._database.run(lambda connection: age_out(connection, LIMIT, actor=self.name))
            beyond += aged
            if aged < LIMIT:
                self._next_age = self._now() + AGE_INTERVAL
        return beyond

    def _probation(self) -> int:
        """Begin and end probations of bots and log each; returns how many began."""
        found = self._database.run(success.review_probation)
        for name in found.begun:
            log.warning("a bot is on probation: jobs that failed there passed elsewhere", bot=name)
        for name in found.over:
            log.info("a bot's probation is over", bot=name)
        return len(found.begun)

    def _graphs(self, done: RoundResult) -> None:
        """Queue or cancel nodes whose jobs were locked when they were due; finish graphs.

        Also cancels the jobs left over in graphs that were cancelled or replaced, and sets the gauge of nodes that can
        never run.
        """
        run = self._database.run
        if not run(any_open_graph):
            metrics.BLOCKED_FOREVER.set(0)
            return
        settled = run(lambda connection: unblock_due(connection, LIMIT))
        done.graph += settled.queued + settled.cancelled
        done.graph += run(
            lambda connection: cancel_left_over(connection, LIMIT, sync=self._timing.sync, actor=self.name)
        )
        run(lambda connection: finish_graphs(connection, LIMIT))
        metrics.BLOCKED_FOREVER.set(run(lambda connection: count_dead_ends(connection, MAX_DEAD_ENDS)))

    def _reconcile(self) -> None:
        """Compare the totals of quotas and bots with what they count. A difference is a defect, repaired and logged.

        Also link new requirement sets with kinds of bots that their submit could not see.
        """
        self._database.run(lambda connection: link_missed(connection, age=HOUR))
        for drift in self._database.run(quotas.reconcile_quotas):
            metrics.QUOTA_DRIFT.inc()
            log.error("a quota's counter was wrong and is repaired", **asdict(drift))
        for room in self._database.run(quotas.reconcile_capacity):
            metrics.CAPACITY_DRIFT.inc()
            log.error("a bot's units in use were wrong and are repaired", **asdict(room))

    def _share(self) -> None:
        """Record which managed instances have jobs; move jobs of instances that became managed or ceased to be."""
        run = self._database.run
        run(
            lambda connection: fair_share.record_demand(
                connection, constrained.unrecorded_demand(connection), self._fair
            )
        )
        for move in (add_constraints, remove_constraints):
            if not self._in_batches(partial(move, limit=LIMIT)):
                self._next_share = self._now()

    def _roll(self) -> None:
        """Take usage older than the rolling window off the counters."""
        window = self._fair.window
        if not self._in_batches(lambda connection: counters.roll(connection, window=window, limit=LIMIT)):
            self._next_roll = self._now()

    def _in_batches(self, duty: Callable[[Connection], int]) -> bool:
        """Run the duty in batches until one is not full, at most DELETIONS times; true if one was not full."""
        return any(self._database.run(duty) < LIMIT for _ in range(DELETIONS))

    def _forget(self) -> None:
        """Delete old rows that belong to no job, each kind in batches."""
        settings = self._settings
        # The cooldown of evictions is at most a day.
        kept = max(settings.keep_dead, DAY)
        duties: tuple[Callable[[Connection], int], ...] = (
            lambda connection: retention_moves.delete_old_evictions(connection, age=kept, limit=LIMIT),
            lambda connection: retention_moves.delete_old_blames(connection, age=DAY, limit=LIMIT),
            lambda connection: retention_moves.delete_old_lost_attempts(connection, age=DAY, limit=LIMIT),
            lambda connection: retention_moves.delete_old_audit(connection, age=settings.keep_audit, limit=LIMIT),
            lambda connection: retention_moves.delete_gone_bots(connection, age=settings.keep_gone_bots, limit=LIMIT),
            lambda connection: retention_moves.delete_unseen_assigners(connection, age=DAY),
            lambda connection: retention_moves.delete_old_usage(connection, age=settings.keep_usage, limit=LIMIT),
            lambda connection: graphs.delete_idle_counters(connection, limit=LIMIT),
            lambda connection: retention_moves.delete_unused_constraint_sets(connection, age=HOUR, limit=LIMIT),
            lambda connection: retention_moves.delete_unused_platforms(connection, age=HOUR, limit=LIMIT),
            lambda connection: retention_moves.delete_unused_kinds(connection, age=HOUR, limit=LIMIT),
            lambda connection: pool_samples.forget(connection, limit=LIMIT),
        )
        for duty in duties:
            if not self._in_batches(duty):
                self._next_forget = self._now()
        delete_idle_queues(self._database)
        self._database.run(lambda connection: processes.forget(connection, age=DAY))
        for fine, coarse, age in pool_samples.MERGES:
            merge = partial(pool_samples.merge, fine=fine, coarse=coarse, age=age)
            if not any(self._database.run(merge) == 0 for _ in range(DELETIONS)):
                self._next_forget = self._now()

    def _delete(self, done: RoundResult) -> None:
        settings = self._settings

        def batch(connection: Connection) -> int:
            return delete_finished(
                connection,
                succeeded=settings.keep_succeeded,
                failed=settings.keep_failed,
                cancelled=settings.keep_cancelled,
                dead=settings.keep_dead,
                limit=LIMIT,
            )

        for _ in range(DELETIONS):
            if not self._database.run(lambda connection: delete_graph(connection, age=settings.keep_succeeded)):
                break
        for _ in range(DELETIONS):
            count = self._database.run(batch)
            done.retention += count
            if count < LIMIT:
                return
        # Continue in the next round, because a long round would delay the expiry of sessions.
        self._next_retention = self._now()
