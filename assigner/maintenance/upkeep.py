"""What has to happen although nobody asks: expiry, what is overdue, retention. Any process may do it at any time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import structlog
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy import Connection, text

from assigner import estimation, metrics
from assigner.maintenance.overflow import OverflowController
from assigner.queries import status
from schema import graphs
from schema.accounting import counters, fair_share, quotas
from schema.accounting.fair_share import FairShareSettings
from schema.clock import Monotonic
from schema.fleet import success
from schema.moves import retention as retention_moves
from schema.moves.cancel import ask_stop
from schema.moves.dependencies import any_open_graph, count_dead_ends, unblock_due
from schema.moves.graphs import cancel_left_over, delete_graph, finish_graphs
from schema.moves.preempt import expire_reservations
from schema.moves.priority import review_waiting
from schema.moves.reassign import add_constraints, remove_constraints
from schema.moves.retention import delete_finished
from schema.moves.sessions import close_overdue, expire
from schema.moves.timeouts import stop_drained, time_out
from schema.postgres.engine import Database
from schema.states import LeaseState
from schema.tenancy import drains
from schema.timing import Timing

# What upkeep does about jobs that wait: promotes those that starve, hastens those that are due, tells what will be
# late.


#: Jobs that one transaction looks at, and such transactions in one round.
REVIEW_LIMIT, REVIEW_BATCHES = 500, 10

log = structlog.get_logger()


def review_waiting_jobs(database: Database, *, actor: str) -> Counter[str]:
    """Look at the waiting jobs that are due for it; returns how many were promoted, hastened and found at risk."""
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


#: Rows one transaction touches.
LIMIT = 500
#: Batches of old jobs that one round deletes.
DELETIONS = 10
HOUR = 3600.0
DAY = 24 * HOUR
#: Seconds between two checks of the quotas' and the bots' counters, and two looks at the bots of every cohort, at the
#: backlog, or for usage to be forgotten.
RECONCILE_INTERVAL = ROLL_INTERVAL = BACKLOG_INTERVAL = 60.0

#: Seconds between two looks at all leases that are overdue; the others look at what became overdue within so many
#: rounds, for that is what there is unless a round failed.
THOROUGH_INTERVAL, LOOK_BACK = 60.0, 10
EVER = 1e9
#: Nodes of graphs that are counted because they can never run.
MAX_DEAD_ENDS = 100_000

# While somebody holds a snapshot open, every lease that ended since stays in the index, and most were due by now.
OVERDUE = text("""
SELECT job_id, fence, state FROM leases
WHERE state IN ('pending', 'active', 'cancelling') AND due_at < now()
    AND due_at >= now() - make_interval(secs => :since)
    AND NOT (state = 'cancelling' AND EXISTS (SELECT FROM bots b WHERE b.id = leases.bot_id AND b.closing))
ORDER BY due_at LIMIT :limit
""")


class UpkeepSettings(BaseModel):
    """How long things are kept, in seconds, and how often to look. Doubling an age doubles the disk space.

    keep_succeeded: of jobs that succeeded, and of graphs that are over and of which no job is kept.
    keep_dead: of dead jobs, and of the log of evictions, which is kept for a day at least.
    keep_usage: of what instances have used, counted from when it left the rolling window at the earliest.
    keep_gone_bots: of bots without a session, counted from when their last one began, unless they are drained.
    retention_interval: seconds between two looks for jobs to delete.
    predictor: what tells how long jobs of a class will run: `quantiles` of those that ran last, or the name of an entry
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
    """What one round of upkeep ended: sessions, leases asked to stop because they are overdue or because a drain's time
    is over, bots that would not, jobs that waited too long, reservations, old jobs; bots put on probation."""

    session: int = 0
    reservation: int = 0
    overdue: int = 0
    drained: int = 0
    stubborn: int = 0
    waited: int = 0
    probation: int = 0
    graph: int = 0
    retention: int = 0


class Upkeep:
    """The duties, in rounds. Every duty is a bounded batch that skips locked rows, so rounds may overlap freely."""

    def __init__(
        self,
        database: Database,
        settings: UpkeepSettings,
        *,
        timing: Timing,
        name: str,
        now: Monotonic,
        fair: FairShareSettings | None = None,
    ) -> None:
        self.name = name
        self._database, self._settings, self._timing, self._now = database, settings, timing, now
        self._fair = fair or FairShareSettings()
        self._overflow = OverflowController(database, name=name, now=now)
        self._next_retention = self._next_reconcile = self._next_forget = self._next_thorough = now()
        self._next_share = self._next_roll = self._next_backlog = now()

    def reconfigure(self, settings: UpkeepSettings, fair: FairShareSettings) -> None:
        """Use other settings from the next round on."""
        self._settings, self._fair = settings, fair

    def run_once(self) -> float:
        """One round; returns the seconds until the next one is due."""
        done = RoundResult()
        in_grace = self._database.run(self._tick, urgent=True)
        if not in_grace:
            self._expire(done)
        done.overdue, done.stubborn = self._database.run(self._overdue, urgent=True, undone=self._overlooked)
        done.drained = self._database.run(self._drained, urgent=True)
        done.waited = self._database.run(lambda connection: time_out(connection, LIMIT, actor=self.name))
        self._graphs(done)
        done.reservation = self._database.run(lambda connection: expire_reservations(connection, LIMIT))
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
        for kind, count in vars(done).items():
            metrics.observe_reaped(kind, count)
        metrics.observe_tick()
        return self._timing.reap

    def _tick(self, connection: Connection) -> bool:
        return drains.tick(connection, "reaper", gap=self._timing.ttl / 2, grace=self._timing.ttl)

    def _expire(self, done: RoundResult) -> None:
        """Close expired sessions, page by page, each in a transaction of its own."""
        after = 0
        while True:

            def page(connection: Connection, after: int = after) -> list[int]:
                bot_ids, _ = expire(connection, after=after, limit=LIMIT, actor=self.name)
                return bot_ids

            bot_ids = self._database.run(page, urgent=True)
            done.session += len(bot_ids)
            if len(bot_ids) < LIMIT:
                return
            after = bot_ids[-1]

    def _overlooked(self) -> None:
        """A round that came to nothing may have been a thorough one."""
        self._next_thorough = self._now()

    def _overdue(self, connection: Connection) -> tuple[int, int]:
        """Ask bots to stop what they did not acknowledge or what runs too long, and close those that do not stop;
        returns how many leases and how many bots."""
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

    def _probation(self) -> int:
        """Tell of every bot that is put on probation, and of every one that upkeep takes off it."""
        found = self._database.run(success.review_probation)
        for name in found.begun:
            log.warning("a bot is on probation: jobs that failed there passed elsewhere", bot=name)
        for name in found.over:
            log.info("a bot's probation is over", bot=name)
        return len(found.begun)

    def _graphs(self, done: RoundResult) -> None:
        """Queue or cancel nodes whose jobs were locked when it was their turn, cancel what is left of graphs that were
        given up, and note which graphs are over."""
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
        """Compare the quotas' and the bots' counters with what they count. A difference is a defect: it is repaired and
        reported."""
        for drift in self._database.run(quotas.reconcile_quotas):
            metrics.QUOTA_DRIFT.inc()
            log.error("a quota's counter was wrong and is repaired", **asdict(drift))
        for room in self._database.run(quotas.reconcile_capacity):
            metrics.CAPACITY_DRIFT.inc()
            log.error("a bot's units in use were wrong and are repaired", **asdict(room))

    def _share(self) -> None:
        """Note which managed instances ask for anything, and take over the jobs of those that have become managed or
        are so no more."""
        run = self._database.run
        run(
            lambda connection: fair_share.record_demand(
                connection, fair_share.unrecorded_demand(connection), self._fair
            )
        )
        for move in (add_constraints, remove_constraints):
            if not self._in_batches(partial(move, limit=LIMIT)):
                self._next_share = self._now()

    def _roll(self) -> None:
        """What was used before the window began counts no more."""
        window = self._fair.window
        if not self._in_batches(lambda connection: counters.roll(connection, window=window, limit=LIMIT)):
            self._next_roll = self._now()

    def _in_batches(self, duty: Callable[[Connection], int]) -> bool:
        """Do it a batch at a time until a batch is not full; tells whether that was reached."""
        return any(self._database.run(duty) < LIMIT for _ in range(DELETIONS))

    def _forget(self) -> None:
        """Delete what belongs to no job, a batch of each kind at a time, until a batch is not full."""
        settings = self._settings
        # The cooldown of evictions counts those of the last day at most.
        kept = max(settings.keep_dead, DAY)
        duties: tuple[Callable[[Connection], int], ...] = (
            lambda connection: retention_moves.delete_old_evictions(connection, age=kept, limit=LIMIT),
            lambda connection: retention_moves.delete_old_blames(connection, age=DAY, limit=LIMIT),
            lambda connection: retention_moves.delete_old_audit(connection, age=settings.keep_audit, limit=LIMIT),
            lambda connection: retention_moves.delete_gone_bots(connection, age=settings.keep_gone_bots, limit=LIMIT),
            lambda connection: retention_moves.delete_unseen_assigners(connection, age=DAY),
            lambda connection: retention_moves.delete_old_usage(connection, age=settings.keep_usage, limit=LIMIT),
            lambda connection: graphs.delete_idle_counters(connection, limit=LIMIT),
        )
        for duty in duties:
            if not self._in_batches(duty):
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
        # More next time: a round must not keep expiry waiting.
        self._next_retention = self._now()
