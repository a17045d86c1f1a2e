"""The sync call: compare what bots report with what they should hold, for many bots in one transaction."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from leasehold.errors import BadInput, Conflict, LeaseholdError
from leasehold.states import JobState
from leasehold.wire import escaped

from bots.protocol import MAX_TASK, AskInputs, LeaseReport, OutputReport
from bots.sync.call import (
    Call,
    Due,
    HeldCall,
    LockedBot,
    NewCall,
    SyncCall,
    answer_message,
    bot_name,
    check_call,
    check_session,
    decode_output,
    ends_something,
    told,
)
from bots.sync.fetch import FetchSettings, fetch_after_sync
from bots.sync.hindrances import Hindrances, ReportTrials
from bots.sync.inputs import read_inputs
from bots.sync.leases import ask_news, read_due_leases, read_held_leases
from schema import outputs
from schema.accounting.held_rows import SHORT_WAIT, Trials
from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.accounting.units import ReturnedUnits
from schema.checkpoints import Checkpoint, store_checkpoints, store_progress
from schema.clock import Monotonic
from schema.diagnostics.tracing import AttemptTracer
from schema.fleet import localities
from schema.moves.acknowledge import Start, acknowledge, deliver
from schema.moves.end import AttemptEnd, EndedAttempt, Verdict, end
from schema.moves.reassign import require_tasks
from schema.moves.sessions import (
    SyncUpdate,
    close,
    limit_spared,
    read_ends_of_older,
    record_syncs,
)
from schema.moves.submissions import lock_jobs
from schema.picking.head_cursor import HeadCursors
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import HINDRANCES
from schema.postgres.fragments import newest_version
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.predicates import ANY_CONSTRAINED_READY, assigner_is_placing
from schema.states import BotStatus, LeaseState
from schema.timing import Timing

#: What becomes of a call: its bot is told something, or the call is held, or refused.
Reply = Due | HeldCall | LeaseholdError

_log = structlog.get_logger(__name__)

# Bots are found by name without a lock, and then locked in the order of their ids.
LOCK_BOTS = Statement(f"""
WITH named AS MATERIALIZED (
    SELECT f.id FROM unnest(CAST(:names AS text[])) AS n (name)
    CROSS JOIN LATERAL {newest_version("bots", "name", "n.name", columns="id")} f ORDER BY f.id
)
SELECT b.id, b.name, b.epoch, b.session, b.sync_seq, b.status, b.draining, b.closing, b.cohort, b.instance, b.pool,
    b.capacity, b.in_use, b.held, b.free, b.kept_units, b.kind,
    extract(epoch FROM b.expires_at - clock_timestamp()) AS remaining,
    CASE WHEN :fetches AND {ANY_CONSTRAINED_READY}
        THEN EXISTS (SELECT FROM assigners a WHERE {assigner_is_placing("a")}) END AS gated
FROM named CROSS JOIN LATERAL {newest_version("bots", "id", "named.id", lock="FOR NO KEY UPDATE")} b
""")


def _locked(connection: Connection, message: OutputReport | AskInputs) -> LockedBot:
    """Lock and return the bot whose message this is. Raises Conflict if its session is over."""
    row = connection.execute(LOCK_BOTS, {"names": [message.bot], "fetches": False}).one_or_none()
    return check_session(None if row is None else LockedBot._make(row), epoch=message.epoch, secret=message.secret)


class SyncService:
    """Settles the calls of bots. Any process may answer any call, because all state is in the database."""

    def __init__(
        self,
        database: Database,
        *,
        timing: Timing,
        fetch: FetchSettings,
        now: Monotonic,
        cooldown: Cooldown = EVICTION_COOLDOWN,
        tracer: AttemptTracer | None = None,
    ) -> None:
        self.tracer = tracer
        self._database, self._timing, self._fetch, self._now = database, timing, fetch, now
        self._waiting_once = database.waiting_once()
        self.cooldown = cooldown
        self._policy: int | None = None
        self._fronts = HeadCursors(now)
        self._hindrances = Hindrances(now)

    def reconfigure(self, fetch: FetchSettings, cooldown: Cooldown, *, policy: int | None) -> None:
        """Use other settings from the next call on. policy: the version that they are of, which leases name."""
        self._fetch, self.cooldown, self._policy = fetch, cooldown, policy

    def answer(self, calls: Sequence[Call]) -> list[bytes | HeldCall | LeaseholdError]:
        """Settle calls as `settle` does; the answers are JSON."""
        return [answer_message(each) if isinstance(each, Due) else each for each in self.settle(calls)]

    def settle(self, calls: Sequence[Call]) -> list[Reply]:
        """Settle calls of different bots together, in one transaction; a call may be held.

        A call that was held is answered. A new call is answered too, or held if there is no news and the bot is willing
        to wait. The report of a repeated call is ignored, because it has been applied; the answer says what the bot
        should have now. An error is the answer to one call, which has changed nothing. The number of statements does
        not depend on the number of calls, except for bots that leave or fetch near a maximum.

        If somebody holds a row that a single call needs, such as the quota of an instance whose job has ended, or a
        stored value cannot be used, what the call reports of the leases that need it is put off: its answer lists them
        still, and the bot reports them again. So no bot loses its session by a row that is not its own.

        Errors are Conflict `session_over` (expired, closed, unknown), `session_superseded` (a newer session of that
        name is open) or `stale_seq` (a later call has been answered), and BadInput for output that is not base64.
        Raises ValueError for two calls of one bot.
        """
        names = [bot_name(call) for call in calls]
        if len(set(names)) < len(names):
            raise ValueError("two calls of one bot cannot be settled together")
        tries_all = len(calls) == 1 and self._hindrances.is_careful
        try:
            return self._run(calls, names, tries_all=tries_all)
        except HINDRANCES as error:
            self._hindrances.note(error)
            if len(calls) > 1 or tries_all:
                raise
            return self._run(calls, names, tries_all=True)

    def _run(self, calls: Sequence[Call], names: Sequence[str], *, tries_all: bool) -> list[Reply]:
        """Settle the calls in a transaction, which is not repeated after a lock that could not be had if one could not
        be had lately."""
        self._hindrances.forget_old()
        is_hindered = self._hindrances.is_careful or self._hindrances.leases
        answers = (self._waiting_once if is_hindered else self._database).run(
            lambda connection: self._settle(connection, calls, names, tries_all=tries_all),
            urgent=True,
            undone=self._fronts.forget,
            kept_plans=True,
        )
        return answers()

    def unchanged(self, call: HeldCall, *, drain: bool, expires: float) -> bytes:
        """Return the answer to a call that was held and brought no news, without asking the database.

        This halves what a bot without news costs. Whatever the call should have told, the bot's next one does.
        expires: a monotonic time up to which the session surely lasts. The answer says how long that is from the
        sending of the call.
        """
        expires_in = max(0.0, expires - call.began)
        due = Due(call.leases, seq=call.seq, drain=drain, expires_in=expires_in, sync_in=self._timing.sync)
        return answer_message(due)

    def output(self, report: OutputReport) -> int:
        """Store output, checkpoint and progress of a running lease; return how many chunks of output were written.

        Stores nothing, and returns 0, if the lease is not this bot's any more. Raises Conflict as `answer` does, and
        BadInput for output that is not base64 or a job that is no id.
        """

        def work(connection: Connection) -> int:
            bot = _locked(connection, report)
            try:
                UUID(report.job)
            except ValueError:
                raise BadInput("job", "is not the id of a job") from None
            if report.checkpoint is not None:
                number, found = report.checkpoint_number, report.checkpoint
                checkpoint = Checkpoint(bot.id, bot.epoch, report.job, report.fence, number, found)
                store_checkpoints(connection, [checkpoint])
            if report.progress is not None:
                store_progress(connection, [told(bot.id, bot.epoch, report.job, report.fence, report.progress)])
            chunks = decode_output(bot.id, bot.epoch, report.job, report.fence, report.output)
            count = outputs.append(connection, chunks)
            if count:
                wake(connection, "done", [report.job])
            return count

        return self._database.run(work)

    def inputs(self, asked: AskInputs) -> dict[str, Any]:
        """Return the results of parents of a leased node; see `read_inputs`. Raises Conflict as `output` does."""

        def work(connection: Connection) -> dict[str, Any]:
            return read_inputs(connection, _locked(connection, asked).id, asked)

        return self._database.run(work)

    def _settle(
        self, connection: Connection, calls: Sequence[Call], names: Sequence[str], *, tries_all: bool
    ) -> Callable[[], list[Reply]]:
        """Settle the calls in this transaction, which may be run again.

        tries_all: each report of a begun or ended lease is tried first, not only those that were put off before.
        Returns a function that returns the answers after the commit, with which the last statements travel.
        """
        fetches = self._fetch.to_capacity or any(ends_something(call) for call in calls)
        asked = {"names": list(names), "fetches": fetches and self._fetch.enabled}
        asked_at = self._now()
        locked = connection.execute_later(LOCK_BOTS, asked)
        held = [call for call in calls if isinstance(call, HeldCall)]
        news = ask_news(connection, held) if len(held) == len(calls) else None
        bots = {bot.name: bot for bot in map(LockedBot._make, locked.result())}
        if self._hindrances.is_careful:
            connection.execute_later(SHORT_WAIT)
        replies: dict[int, Reply] = {}
        settled: list[SyncCall] = []
        for nth, (call, name) in enumerate(zip(calls, names, strict=True)):
            try:
                settled.append(check_call(nth, call, bots.get(name), asked_at=asked_at))
            except Conflict as refusal:
                replies[nth] = refusal
        settled = self._compared(connection, settled, replies)
        if tries_all or self._hindrances.leases:
            with connection.savepoint() as tried:
                trials = ReportTrials(Trials(connection), self._hindrances, everything=tries_all)
                self._put_off(connection, settled, trials)
                tried.rollback()
        returned = ReturnedUnits()
        self._apply(connection, settled, returned)
        settled = self._without_leaving(connection, settled, replies, returned)
        fetch_after_sync(
            connection,
            settled,
            self._fetch,
            ack=self._timing.ack,
            cooldown=self.cooldown,
            head_cursors=self._fronts,
            returned=returned,
            policy=self._policy,
        )
        renewed = self._sync(connection, settled)
        read_due_leases(connection, settled, news)
        _deliver(connection, settled)
        returned.write(connection)

        def answers() -> list[Reply]:
            self._reply(settled, replies, renewed())
            return [replies[nth] for nth in range(len(calls))]

        return answers

    def _put_off(self, connection: Connection, settled: Sequence[SyncCall], trials: ReportTrials) -> None:
        """Leave out of the reports what cannot be applied."""

        def starts(start: Start) -> None:
            acknowledge(connection, [start], sync=self._timing.sync)

        held_until = self._held_until(connection, settled)

        def ends(sync_call: SyncCall, ending: AttemptEnd) -> None:
            returned = ReturnedUnits()
            end(
                connection,
                limit_spared(connection, [ending]),
                actor=[sync_call.actor],
                pace=self._fetch.pace,
                hold_until=held_until,
                capacities={sync_call.bot.id: copy(sync_call.bot_capacity)},
                returned=returned,
                cooldown=self.cooldown,
            )
            returned.write(connection)

        for sync_call in settled:
            if sync_call.sync is not None:
                outcome = sync_call.outcome
                outcome.started = trials.possible(sync_call, outcome.started, starts)
                outcome.endings = trials.possible(sync_call, outcome.endings, partial(ends, sync_call))

    def _held_until(self, connection: Connection, settled: Sequence[SyncCall]) -> dict[int, datetime]:
        """Return until when agents may run what older sessions of their bots have left; see `end`."""
        leaving = [sync_call.bot.id for sync_call in settled if sync_call.of_older_sessions]
        return read_ends_of_older(connection, leaving, ttl=self._timing.ttl)

    def _compared(self, connection: Connection, settled: list[SyncCall], replies: dict[int, Reply]) -> list[SyncCall]:
        """Compare the report of each bot with its live leases; return the calls that are not refused by that.

        Nothing has been written yet.
        """
        reported = [sync_call for sync_call in settled if sync_call.sync is not None]
        read_held_leases(connection, reported)
        for sync_call in reported:
            try:
                sync_call.compare()
            except BadInput as refusal:
                replies[sync_call.nth] = refusal
            else:
                if sync_call.outcome.unknown:
                    connection.on_commit(partial(_tell_unknown, sync_call.bot.name, sync_call.outcome.unknown))
        return [sync_call for sync_call in settled if sync_call.nth not in replies]

    def _apply(self, connection: Connection, settled: Sequence[SyncCall], returned: ReturnedUnits) -> None:
        """Apply acknowledgements, ends and what commands have left. The units of ended leases go into `returned`."""
        spoken = [sync_call for sync_call in settled if sync_call.sync is not None]
        starts = [start for sync_call in spoken for start in sync_call.outcome.started]
        endings = [(ending, sync_call.actor) for sync_call in spoken for ending in sync_call.outcome.endings]
        if starts and endings:
            lock_jobs(connection, [start.job_id for start in starts] + [ending.job_id for ending, _ in endings])
        outputs.append(connection, [chunk for sync_call in spoken for chunk in sync_call.outcome.output])
        checkpoints = [each for sync_call in spoken for each in sync_call.outcome.checkpoints]
        store_checkpoints(connection, checkpoints)
        store_progress(connection, [each for sync_call in spoken for each in sync_call.outcome.told])
        started = set(acknowledge(connection, starts, sync=self._timing.sync))
        ended = end(
            connection,
            limit_spared(connection, [ending for ending, _ in endings]),
            actor=[actor for _, actor in endings],
            pace=self._fetch.pace,
            hold_until=self._held_until(connection, spoken),
            capacities={sync_call.bot.id: sync_call.bot_capacity for sync_call in spoken},
            returned=returned,
            cooldown=self.cooldown,
        )
        if self.tracer is not None:
            self.tracer.trace(connection, ended)
        self._keep_from_others(connection, spoken, [job for job in ended if job.verdict is Verdict.RELEASED])
        by_bot = {sync_call.bot.id: sync_call for sync_call in spoken}
        for job in ended:
            by_bot[job.bot_id].ended.append(job)
        hints = [
            (job.bot_id, job.locality_hint) for job in ended if job.state == JobState.SUCCEEDED and job.locality_hint
        ]
        localities.remember(connection, hints, limit=self._fetch.bot_locality_hint_limit)
        for sync_call in spoken:
            sync_call.started = started
            sync_call.size()

    def _keep_from_others(
        self, connection: Connection, spoken: Sequence[SyncCall], released: Sequence[EndedAttempt]
    ) -> None:
        """Let calls of tasks that these bots have given back, because they have not imported the task, go to others."""
        if not released:
            return
        unknown = {
            report.job
            for sync_call in spoken
            if sync_call.sync is not None
            for report in sync_call.sync.leases
            if report.outcome is not None and report.outcome.unknown_task
        }
        if calls := [job.job_id for job in released if job.public_id in unknown]:
            require_tasks(connection, calls, longest=MAX_TASK)

    def _without_leaving(
        self,
        connection: Connection,
        settled: list[SyncCall],
        replies: dict[int, Reply],
        returned: ReturnedUnits,
    ) -> list[SyncCall]:
        """Close the sessions of bots that leave; return the calls of the others."""
        if any(sync_call.leaves for sync_call in settled):
            returned.write(connection)
        self._sync(connection, [sync_call for sync_call in settled if sync_call.leaves])
        for sync_call in settled:
            if sync_call.leaves:
                close(connection, sync_call.bot.id, keeps_leases=sync_call.bot_capacity.held > 0)
                replies[sync_call.nth] = Due([], seq=sync_call.seq, expires_in=0.0, sync_in=0.0)
        return [sync_call for sync_call in settled if not sync_call.leaves]

    def _sync(self, connection: Connection, settled: Sequence[SyncCall]) -> Callable[[], Mapping[int, float]]:
        """Write the rows of the bots that have changed, or whose session has to be renewed.

        The rows are written with the next statement. After it, the function that is returned tells the rest of each
        session that was renewed, in seconds, by bot id.
        """
        changed = [
            sync_call
            for sync_call in settled
            if sync_call.changes_bot or sync_call.remaining < self._timing.ttl * sync_call.renewed_below
        ]
        for sync_call in changed:
            sync_call.before = self._now() - sync_call.call.began
        words = [
            SyncUpdate(sync_call.bot.id, sync_call.seq, sync_call.status, sync_call.bot_capacity)
            for sync_call in changed
        ]
        return record_syncs(connection, words, ttl=self._timing.ttl)

    def _reply(
        self,
        settled: Sequence[SyncCall],
        replies: dict[int, Reply],
        renewed: Mapping[int, float],
    ) -> None:
        """Answer each call with the leases that its bot should have now, or hold it if there is no news."""
        for sync_call in settled:
            sync_call.remaining = renewed.get(sync_call.bot.id, sync_call.remaining)
            replies[sync_call.nth] = self._reply_to(sync_call)

    def _reply_to(self, sync_call: SyncCall) -> Due | HeldCall:
        """Return the answer to one call. The bot counts `expires_in` from the sending of its call."""
        call = sync_call.call
        if isinstance(call, NewCall) and call.sync.wait > 0 and _may_be_held(sync_call, call):
            return _held_call(sync_call, call)
        return Due(
            sync_call.due,
            seq=sync_call.seq,
            unlisted=sync_call.left_out,
            drain=sync_call.bot.draining,
            expires_in=max(0.0, sync_call.remaining + sync_call.before),
            sync_in=self._timing.sync,
        )


def _deliver(connection: Connection, settled: Sequence[SyncCall]) -> None:
    """Record which leases bots are told of for the first time."""
    deliver(
        connection,
        [
            (lease.job_id, lease.fence)
            for sync_call in settled
            for lease in sync_call.due
            if lease.state == LeaseState.PENDING and not lease.delivered
        ],
    )


def _tell_unknown(bot: str, reports: Sequence[LeaseReport]) -> None:
    """Log reports of the end of leases that the bot does not hold: it has lost them, or has reported the end before."""
    for report in reports:
        _log.debug("leasehold.mark_complete_unknown_job", job=escaped(report.job, 80), fence=report.fence, bot=bot)


def _may_be_held(sync_call: SyncCall, call: NewCall) -> bool:
    """Return whether there is no news for the bot of this call."""
    if not sync_call.runs_its_leases:
        return False
    if call.of_worker:
        return not sync_call.outcome.started
    if sync_call.repeated and sync_call.due:
        # Its deadline goes on until the call is answered.
        return False
    # A bot says `draining` because it was asked to drain. If it is not any more, this is news as the drain was.
    knows = {BotStatus.OK.value: False, BotStatus.DRAINING.value: True}.get(call.sync.status, sync_call.bot.draining)
    return knows == sync_call.bot.draining


def _held_call(sync_call: SyncCall, call: NewCall) -> HeldCall:
    bot, expires = sync_call.bot, call.began + sync_call.before + sync_call.remaining
    return HeldCall(bot.name, bot.id, bot.epoch, call.sync.seq, bot.draining, call.began, expires, sync_call.due)
