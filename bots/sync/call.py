"""Calls while they are settled: the checks of session and sequence number, and the comparison of reports with
leases."""

import base64
import binascii
import hmac
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

from leasehold.errors import BadInput, Conflict
from pydantic_core import to_json

from bots.protocol import Chunk, LeaseReport, Outcome, Progress, Sync
from bots.sync.sessions import digest
from schema.accounting.units import BotCapacity
from schema.checkpoints import Checkpoint, Told
from schema.moves.acknowledge import Start
from schema.moves.end import VERDICTS, AttemptEnd, EndedAttempt, Verdict
from schema.moves.grant import FetchedLease
from schema.moves.sessions import IDLE_RENEWED_BELOW, RENEWED_BELOW, STARTED_ANEW
from schema.outputs import Written
from schema.postgres.statements import Row
from schema.states import BotStatus, LeaseState

# The meaning of a bot's report for its leases: a pure function, so that every case is in one place.


#: Verdicts after which proactive fetching replaces the job, because the bot has done work.
COMPLETED = frozenset({Verdict.SUCCEEDED, Verdict.FAILED, Verdict.ERROR})


@dataclass
class ReportOutcome:
    """The consequences of one report: leases that have begun, leases that have ended, output, checkpoints, progress.

    unknown: reports of the end of leases that the bot does not hold, which change nothing.
    """

    started: list[Start] = field(default_factory=list)
    endings: list[AttemptEnd] = field(default_factory=list)
    output: list[Written] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    unknown: list[LeaseReport] = field(default_factory=list)


def compare(
    held: Sequence[Row],
    reported: Sequence[LeaseReport],
    *,
    bot_id: int,
    epoch: int,
    actor: str,
    leaves: bool = False,
    unlisted: bool = False,
) -> ReportOutcome:
    """Compare the live leases of a bot with its report. Raises BadInput for output that is not base64.

    Reports of other fences are ignored. The answer will not list these leases, and the bot stops them. If a live lease
    is not reported, it depends on its state: a pending one is on its way to the bot, a cancelling one has been stopped,
    and an active one is lost. A bot that `leaves` gives all of them back. Such ends are marked as `spared`, and their
    number is limited, because a job may have cut its bot off.

    unlisted: the bot holds more leases than it lists. So one that it does not list may still run.
    """
    said = {(report.job, report.fence): report for report in reported}
    outcome = ReportOutcome()
    for lease in held:
        report = said.pop((lease.public_id, lease.fence), None)
        verdict, details, result = None, dict[str, Any](), None
        if report is not None:
            _note_left(outcome, report, bot_id, epoch)
        if report is not None and report.outcome is not None:
            verdict, details = VERDICTS[report.outcome.verdict], _details(report.outcome)
            result = report.outcome.result
        elif report is not None and report.state == "active" and lease.state == LeaseState.PENDING:
            outcome.started.append(Start(lease.job_id, lease.fence, bot_id, epoch, actor))
        elif report is not None or unlisted:
            pass
        elif lease.state == LeaseState.CANCELLING:
            verdict, details = Verdict.STOPPED, {"reason": "its bot does not have it any more"}
        elif lease.state == LeaseState.ACTIVE and not leaves:
            verdict, details = Verdict.LOST, {"reason": "its bot does not know it any more"}
        if verdict is None and leaves:
            verdict, details = Verdict.RELEASED, {"reason": "its bot left", "spared": True}
        if verdict is not None:
            outcome.endings.append(AttemptEnd(lease.job_id, lease.fence, bot_id, epoch, verdict, details, result))
    outcome.unknown = [report for report in said.values() if report.outcome is not None]
    return outcome


def _note_left(outcome: ReportOutcome, report: LeaseReport, bot_id: int, epoch: int) -> None:
    """Take note of the output, the checkpoint and the progress of one report."""
    if report.output:
        outcome.output += decode_output(bot_id, epoch, report.job, report.fence, report.output)
    if report.checkpoint is not None:
        number, found = report.checkpoint_number, report.checkpoint
        outcome.checkpoints.append(Checkpoint(bot_id, epoch, report.job, report.fence, number, found))
    if report.progress is not None:
        outcome.told.append(told(bot_id, epoch, report.job, report.fence, report.progress))


def told(bot_id: int, epoch: int, job: str, fence: int, progress: Progress) -> Told:
    """Return the progress of an attempt as it is stored."""
    return Told(bot_id, epoch, job, fence, progress.number, progress.share, progress.text)


def decode_output(bot_id: int, epoch: int, job: str, fence: int, chunks: Sequence[Chunk]) -> list[Written]:
    """Decode chunks of output. Raises BadInput for a chunk that is not base64."""
    try:
        return [
            Written(bot_id, epoch, job, fence, chunk.start, base64.b64decode(chunk.data, validate=True))
            for chunk in chunks
        ]
    except (binascii.Error, ValueError):
        raise BadInput("output.data", "is not base64") from None


def _details(outcome: Outcome) -> dict[str, Any]:
    details = outcome.model_dump(exclude_none=True, exclude={"verdict", "result"})
    if not details.get("output_truncated"):
        details.pop("output_truncated", None)
    return details


@dataclass(frozen=True)
class NewCall:
    """A new call. `began`: the monotonic time at which it came.

    of_worker: the bot is a worker of another protocol. It numbers no calls, so each gets the number after the last one.
        Its call is answered at once if it reports the start of a job.
    """

    sync: Sync
    began: float
    of_worker: bool = False


@dataclass(frozen=True)
class HeldCall:
    """A call without news. Its answer may be held back until a wake-up for the bot arrives, or for as long as the bot
    is willing to wait; the session has to be renewed meanwhile.

    drain: whether an operator asked the bot to drain when the call was settled. A bot that says `ok` or `draining`
        knows that. expires: a monotonic time up to which the session surely lasts. leases: those of the bot, which
        runs all of them.
    """

    bot: str
    bot_id: int
    epoch: int
    seq: int
    drain: bool
    began: float
    expires: float
    leases: Sequence[Row | FetchedLease]


Call = NewCall | HeldCall

#: While constrained jobs wait, one in this many calls does not fetch, so that the bot has room for them.
YIELDING = 4
#: 2^32 divided by the golden ratio; its multiples are spread most evenly (Knuth, TAOCP 3, 6.4).
GOLDEN = 2654435769


class LockedBot(NamedTuple):
    """The row of a bot as `LOCK_BOTS` returns it. remaining: the rest of the session, seconds. gated: whether
    constrained jobs wait that an assigner could place; None if no call of the batch may fetch."""

    id: int
    name: str
    epoch: int
    session: bytes | None
    sync_seq: int
    status: str
    draining: bool
    closing: bool
    cohort: int
    instance: int | None
    pool: str | None
    capacity: int
    in_use: int
    held: int
    free: bool
    kept_units: int
    kind: int
    remaining: float
    gated: bool | None


@dataclass
class SyncCall:
    """One call of a batch that is being settled; its bot's row is locked."""

    #: The number of the call in the batch.
    nth: int
    call: Call
    bot: LockedBot
    #: A call with this sequence number has been settled before, so that its report has been applied.
    repeated: bool
    #: Seconds that have surely passed between the sending of the call and the moment at which `remaining` was measured.
    before: float
    #: The rest of the session at that moment, in seconds.
    remaining: float
    #: The bot's live leases before the call.
    held: list[Row] = field(default_factory=list)
    #: Leases of older sessions of the bot, which could not end when this session began. They end as lost: nothing tells
    #: any more whether the bot was only cut off.
    of_older_sessions: list[Row] = field(default_factory=list)
    #: The jobs whose starts calls of the batch have reported.
    started: Collection[int] = ()
    #: The attempts that the call has ended.
    ended: list[EndedAttempt] = field(default_factory=list)
    #: The leases that the call has begun.
    fetched: list[FetchedLease] = field(default_factory=list)
    #: The bot's live leases after the call, without those of `left_out`.
    due: list[Row | FetchedLease] = field(default_factory=list)
    #: How many live leases neither the bot nor the answer lists, because nothing has changed for them.
    left_out: int = 0
    #: What the bot's report means, once it has been compared.
    outcome: ReportOutcome = field(init=False)
    #: The units of the bot, as they will be written.
    bot_capacity: BotCapacity = field(init=False)
    #: The bot's report; None if it has been applied before.
    sync: Sync | None = field(init=False)
    #: The bot closes its session.
    leaves: bool = field(init=False)
    #: As the bot reports it. The status of a bot that leaves stays until its session is closed.
    status: str = field(init=False)

    def __post_init__(self) -> None:
        self.bot_capacity = BotCapacity(self.bot.capacity, self.bot.in_use, self.bot.held, self.bot.kept_units)
        self.sync = self.call.sync if isinstance(self.call, NewCall) and not self.repeated else None
        self.leaves = self.sync is not None and self.sync.status == BotStatus.GONE.value
        self.status = str(self.bot.status if self.sync is None or self.leaves else self.sync.status)

    @property
    def seq(self) -> int:
        """Return the sequence number of the call in its session."""
        return _seq(self.call)

    @property
    def actor(self) -> str:
        """Return the name of the bot in events."""
        return f"bot:{self.bot.name}"

    @property
    def unlisted(self) -> int:
        """Return how many leases the bot does not list, if it can be believed that they are those of the database.

        0 if the call before is not the last that the database knows, because then the bot may hold other leases.
        """
        sync = self.sync
        return 0 if sync is None or self.leaves or self.bot.sync_seq != sync.seq - 1 else sync.unlisted

    @property
    def still_of_older_sessions(self) -> int:
        """Return how many leases of older sessions the call has not ended."""
        if not self.of_older_sessions:
            return 0
        return len({lease.job_id for lease in self.of_older_sessions} - {job.job_id for job in self.ended})

    @property
    def is_idle(self) -> bool:
        """Return whether a bot without leases makes a call that may be held, and not its first one.

        The number of such a call is not stored, because to settle it twice changes nothing.
        """
        call = self.call
        if not isinstance(call, NewCall) or call.sync.wait == 0 or self.bot.sync_seq == 0:
            return False
        return not (call.sync.leases or call.sync.unlisted or self.bot.held)

    @property
    def renewed_below(self) -> float:
        """Return below which part of its life the session is renewed. A worker gets time to find another door."""
        is_late = self.is_idle and not (isinstance(self.call, NewCall) and self.call.of_worker)
        return IDLE_RENEWED_BELOW if is_late else RENEWED_BELOW

    @property
    def changes_bot(self) -> bool:
        """Return whether the call changes anything of its bot but the end of its session."""
        bot, capacity = self.bot, self.bot_capacity
        seq = bot.sync_seq if self.sync is None or self.is_idle else self.seq
        return (seq, self.status, capacity.capacity, capacity.in_use, capacity.held, capacity.kept) != (
            bot.sync_seq,
            bot.status,
            bot.capacity,
            bot.in_use,
            bot.held,
            bot.kept_units,
        )

    @property
    def runs_its_leases(self) -> bool:
        """Return whether the bot lists all leases that it should have, and runs all that it lists."""
        call = self.call
        if not isinstance(call, NewCall) or call.sync.unlisted:
            return False
        listed = {(report.job, report.fence) for report in call.sync.leases if report.state == "active"}
        due = {(lease.public_id, lease.fence) for lease in self.due if lease.state == LeaseState.ACTIVE}
        return listed == due and len(due) == len(self.due) == len(call.sync.leases)

    @property
    def constrained_first(self) -> bool:
        """Return whether this call leaves the bot's room to constrained jobs, which only assigners place.

        While such jobs wait, one of `YIELDING` calls does. They are spread evenly over all calls.
        """
        return bool(self.bot.gated) and (self.bot.id + self.seq) * GOLDEN % 2**32 < 2**32 // YIELDING

    @property
    def healthy(self) -> bool:
        """Return whether the bot may be given work. A call of a closing bot is refused before."""
        return self.status == BotStatus.OK and not self.bot.draining

    def compare(self) -> None:
        """Take account of the report. Raises BadInput for output that is not base64."""
        assert self.sync is not None, "it has been applied"
        self.outcome = compare(
            self.held,
            self.sync.leases,
            bot_id=self.bot.id,
            epoch=self.bot.epoch,
            actor=self.actor,
            leaves=self.leaves,
            unlisted=self.sync.unlisted > 0 and not self.leaves,
        )
        anew = {"reason": STARTED_ANEW}
        self.outcome.endings += [
            AttemptEnd(lease.job_id, lease.fence, self.bot.id, lease.bot_epoch, Verdict.LOST, anew)
            for lease in self.of_older_sessions
        ]

    def size(self) -> None:
        """Take over the capacity that the bot reports, but not less than what it uses. It keeps no more units for an
        instance than it has."""
        said = None if self.sync is None else self.sync.capacity
        capacity = self.bot_capacity
        capacity.capacity = max(capacity.capacity if said is None else said, capacity.in_use)
        capacity.kept = min(capacity.kept, capacity.capacity)


def _seq(call: Call) -> int:
    return call.sync.seq if isinstance(call, NewCall) else call.seq


def bot_name(call: Call) -> str:
    """Return the name of the bot whose call it is."""
    return call.sync.bot if isinstance(call, NewCall) else call.bot


def ends_something(call: Call) -> bool:
    """Return whether the bot reports the end of a job, and so may want another one."""
    return isinstance(call, NewCall) and any(report.state == "completed" for report in call.sync.leases)


def check_call(nth: int, call: Call, bot: LockedBot | None, *, asked_at: float) -> SyncCall:
    """Check the session of a call and its sequence number. Raises Conflict.

    asked_at: a monotonic time before the row of the bot was read.
    """
    if isinstance(call, NewCall):
        bot = check_session(bot, epoch=call.sync.epoch, secret=call.sync.secret)
        if call.of_worker:
            call = replace(call, sync=call.sync.model_copy(update={"seq": bot.sync_seq + 1}))
    else:
        bot = _check_epoch(bot, epoch=call.epoch)
    if _seq(call) < bot.sync_seq:
        raise Conflict("stale_seq", "a later call of this session has been answered")
    return SyncCall(
        nth,
        call,
        bot,
        repeated=_seq(call) == bot.sync_seq,
        before=asked_at - call.began,
        remaining=float(bot.remaining),
    )


def check_session(bot: LockedBot | None, *, epoch: int, secret: str) -> LockedBot:
    """Return the bot if this is its open session. Raises Conflict."""
    bot = _check_epoch(bot, epoch=epoch)
    if not hmac.compare_digest(bot.session or b"", digest(secret)):
        raise Conflict("session_over", "this session is over: open a new one")
    return bot


def _check_epoch(bot: LockedBot | None, *, epoch: int) -> LockedBot:
    if bot is None or bot.session is None or bot.closing:
        raise Conflict("session_over", "this session is over: open a new one")
    if bot.epoch < epoch:
        raise Conflict("session_over", "the server has lost this session: open a new one")
    if bot.epoch != epoch:
        raise Conflict("session_superseded", "a newer session of this bot is open")
    return bot


@dataclass(frozen=True)
class Due:
    """What a bot is told: the leases that it should have, and the rest of the message `SyncAnswer`."""

    leases: Sequence[Row | FetchedLease]
    _: KW_ONLY
    seq: int
    expires_in: float
    sync_in: float
    drain: bool = False
    unlisted: int = 0


# Answers are written without the models `SyncAnswer` and `Work`, and payloads as the database's text of them, which the
# gateway need not parse: of a call that ends and fetches ten jobs this saves about a tenth of the gateway's settling.


def answer_message(due: Due) -> bytes:
    """Return the message `SyncAnswer`, as JSON."""
    fields: dict[str, Any] = {"drain": due.drain, "expires_in": due.expires_in, "sync_in": due.sync_in}
    if due.unlisted:
        fields["unlisted"] = due.unlisted
    return b'{"seq":%d,"leases":[%b],%b' % (due.seq, b",".join(map(_lease_message, due.leases)), to_json(fields)[1:])


def _lease_message(row: Row | FetchedLease) -> bytes:
    """Return the message `Work` about the lease to its bot, as JSON. Fields without a value are left out."""
    fields = {
        "job": row.public_id,
        "fence": row.fence,
        "state": row.state,
        "instance": row.instance,
        "attempt": row.attempts,
    }
    if row.stop_reason is not None:
        fields["stop_reason"] = row.stop_reason
    if row.timeout_seconds is not None:
        fields["timeout"] = row.timeout_seconds
    if row.units != 1:
        fields["units"] = row.units
    if row.gpus is not None:
        fields["gpus"] = row.gpus
    if row.checkpoint is not None:
        fields["checkpoint"] = row.checkpoint
    message = to_json(fields)
    return message if row.payload is None else b'%b,"payload":%b}' % (message[:-1], row.payload.encode())
