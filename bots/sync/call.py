"""Calls while they are settled: who may be let in, and what is known of each."""

import base64
import binascii
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, TextClause, text

from bots.protocol import Chunk, LeaseReport, Outcome, Sync, Work
from bots.sync.sessions import digest
from schema.errors import BadInput, Conflict
from schema.moves.acknowledge import Start
from schema.moves.end import AttemptEnd, BotCapacity, EndedAttempt, Verdict
from schema.outputs import Written
from schema.postgres.fragments import newest_leases
from schema.states import BotStatus, LeaseState
from schema.tables.fleet import NOT_OVER

# What a bot's report means for the leases it holds: pure, so that every case can be seen in one place.


#: Verdicts after which proactive fetching replaces the job: the bot has done work.
COMPLETED = frozenset({Verdict.SUCCEEDED, Verdict.FAILED, Verdict.ERROR})


@dataclass
class ReportOutcome:
    """The consequences of one sync: leases that began, leases that ended, and output."""

    started: list[Start] = field(default_factory=list)
    endings: list[AttemptEnd] = field(default_factory=list)
    output: list[Written] = field(default_factory=list)


def compare(
    held: Sequence[Row[Any]],
    reported: Sequence[LeaseReport],
    *,
    bot_id: int,
    epoch: int,
    actor: str,
    leaves: bool = False,
) -> ReportOutcome:
    """Compare the live leases of a bot with its report. Reports of other fences are not the bot's any more and
    mean nothing; the answer will not list them, and the bot stops them.

    A held lease that is not reported: pending ones are on their way; cancelling ones have been stopped; active ones
    the bot has lost, unless it `leaves`, which gives everything back. Raises BadInput for a report that contradicts
    itself.
    """
    said = {(report.job, report.fence): report for report in reported}
    account = ReportOutcome()
    for lease in held:
        report = said.get((str(lease.public_id), lease.fence))
        verdict, details = None, dict[str, Any]()
        if report is not None and report.output:
            account.output += decode_output(bot_id, epoch, report.job, report.fence, report.output)
        if report is not None and report.state == "completed":
            if report.outcome is None:
                raise BadInput(f"leases.{report.job}.outcome", "is required when the state is 'completed'")
            verdict, details = Verdict(report.outcome.verdict), _details(report.outcome)
        elif report is not None and report.state == "active" and lease.state == LeaseState.PENDING:
            account.started.append(Start(lease.job_id, lease.fence, bot_id, epoch, actor))
        elif report is None and lease.state == LeaseState.CANCELLING:
            verdict, details = Verdict.STOPPED, {"reason": "its bot does not have it any more"}
        elif report is None and lease.state == LeaseState.ACTIVE and not leaves:
            verdict, details = Verdict.LOST, {"reason": "its bot does not know it any more"}
        if verdict is None and leaves:
            verdict, details = Verdict.RELEASED, {"reason": "its bot left"}
        if verdict is not None:
            account.endings.append(AttemptEnd(lease.job_id, lease.fence, bot_id, epoch, verdict, details))
    return account


def decode_output(bot_id: int, epoch: int, job: str, fence: int, chunks: Sequence[Chunk]) -> list[Written]:
    """Decode chunks of output. Raises BadInput where they are not base64."""
    try:
        return [
            Written(bot_id, epoch, job, fence, chunk.start, base64.b64decode(chunk.data, validate=True))
            for chunk in chunks
        ]
    except (binascii.Error, ValueError):
        raise BadInput("output.data", "is not base64") from None


def _details(outcome: Outcome) -> dict[str, Any]:
    details = outcome.model_dump(exclude_none=True, exclude={"verdict"})
    if not details.get("output_truncated"):
        details.pop("output_truncated", None)
    return details


@dataclass(frozen=True)
class NewCall:
    """A call that came when the monotonic clock showed `began`."""

    sync: Sync
    began: float


@dataclass(frozen=True)
class HeldCall:
    """A sync without news: the answer may be held back for as long as the bot would wait, if its session is kept alive
    meanwhile, or until a wake-up for the bot arrives."""

    bot: str
    bot_id: int
    epoch: int
    seq: int
    began: float


Call = NewCall | HeldCall

#: Of so many calls that may fetch, one leaves the bot's room to jobs at gates while some wait.
YIELDING = 4
#: 2^32 over the golden ratio, by which multiples of it are spread most evenly (Knuth, TAOCP 3, 6.4).
GOLDEN = 2654435769


@dataclass
class SyncCall:
    """One call that is being settled, the `nth` of them, by a bot whose row is locked.

    `held`: live leases before it, `due`: after it; `ended`: what became of jobs that it has ended; `before`: seconds
    that had surely passed since the call was sent when the rest of the session was measured. `repeated`: a call of
    this number has been settled, so its report has been applied.
    """

    nth: int
    call: Call
    bot: Row[Any]
    repeated: bool
    held: list[Row[Any]] = field(default_factory=list)
    account: ReportOutcome = field(default_factory=ReportOutcome)
    ended: list[EndedAttempt] = field(default_factory=list)
    due: list[Row[Any]] = field(default_factory=list)
    before: float = 0.0
    remaining: float = 0.0
    bot_capacity: BotCapacity = field(init=False)

    def __post_init__(self) -> None:
        self.bot_capacity = BotCapacity(self.bot.capacity, self.bot.in_use, self.bot.held, self.bot.kept_units)

    @property
    def sync(self) -> Sync | None:
        """The bot's report, None if it has been applied before."""
        return self.call.sync if isinstance(self.call, NewCall) and not self.repeated else None

    @property
    def seq(self) -> int:
        """The number of the call in its session."""
        return _seq(self.call)

    @property
    def actor(self) -> str:
        """The bot, as events name it."""
        return f"bot:{self.bot.name}"

    @property
    def leaves(self) -> bool:
        """Whether the bot closes its session."""
        return self.sync is not None and self.sync.status == BotStatus.GONE.value

    @property
    def status(self) -> str:
        """How the bot is, by its own word; one that leaves is there until its session is closed."""
        return str(self.bot.status if self.sync is None or self.leaves else self.sync.status)

    @property
    def constrained_first(self) -> bool:
        """Whether jobs wait at gates and this is one of those calls that leave the bot's room to them: assigners alone
        can give it to them. Spread evenly over the calls, whichever of them end something."""
        return bool(self.bot.gated) and (self.bot.id + self.seq) * GOLDEN % 2**32 < 2**32 // YIELDING

    @property
    def healthy(self) -> bool:
        """Whether the bot may be given work. A bot that is being closed is not let in."""
        return self.status == BotStatus.OK and not self.bot.draining

    def size(self) -> None:
        """Take the capacity that the bot says it has. One that says less than it uses keeps what it uses until that
        has ended."""
        said = None if self.sync is None else self.sync.capacity
        capacity = self.bot_capacity
        capacity.capacity = max(capacity.capacity if said is None else said, capacity.in_use)
        capacity.kept = min(capacity.kept, capacity.capacity)


def _seq(call: Call) -> int:
    return call.sync.seq if isinstance(call, NewCall) else call.seq


def bot_name(call: Call) -> str:
    """The bot whose call it is."""
    return call.sync.bot if isinstance(call, NewCall) else call.bot


def ends_something(call: Call) -> bool:
    """Whether the bot says that something is over, and so may want more."""
    return isinstance(call, NewCall) and any(report.state == "completed" for report in call.sync.leases)


def check_call(nth: int, call: Call, bot: Row[Any] | None) -> SyncCall:
    """The visit of a bot whose session is open and whose call is not older than what was answered. Raises Conflict."""
    if isinstance(call, NewCall):
        bot = check_session(bot, epoch=call.sync.epoch, secret=call.sync.secret)
        late = call.sync.seq < bot.sync_seq
    else:
        bot = _check_epoch(bot, epoch=call.epoch)
        late = call.seq != bot.sync_seq
    if late:
        raise Conflict("stale_seq", "a later call of this session has been answered")
    return SyncCall(nth, call, bot, repeated=_seq(call) == bot.sync_seq)


def check_session(bot: Row[Any] | None, *, epoch: int, secret: str) -> Row[Any]:
    """The bot, if this is its open session. Raises Conflict."""
    bot = _check_epoch(bot, epoch=epoch)
    if not hmac.compare_digest(bot.session, digest(secret)):
        raise Conflict("session_over", "this session is over: open a new one")
    return bot


def _check_epoch(bot: Row[Any] | None, *, epoch: int) -> Row[Any]:
    if bot is None or bot.session is None or bot.closing:
        raise Conflict("session_over", "this session is over: open a new one")
    if bot.epoch != epoch:
        raise Conflict("session_superseded", "a newer session of this bot is open")
    return bot


def lease_message(row: Row[Any]) -> Work:
    """A lease as its bot is told of it."""
    return Work(
        job=str(row.public_id),
        fence=row.fence,
        state=row.state,
        stop_reason=row.stop_reason,
        instance=row.instance,
        attempt=row.attempts,
        timeout=row.timeout_seconds,
        payload=None if row.payload is None else dict(row.payload),
    )


# The live leases of bots whose calls are settled: what they held before, what they are due after.


# A bot's live leases are as many as its row says: those that are known, looked up by their keys, and for the rest the
# latest ones. So neither short jobs nor long ones make anybody look through what has ended between them.
_LEASE = "bot_id, job_id, fence, instance, state, delivered_at, stop_reason"
_LATEST = newest_leases("b.id", "b.held - coalesce(c.leases, 0)", columns=_LEASE, but="coalesce(c.jobs, '{}')")
_FOUND = f"""counted AS MATERIALIZED (
    SELECT bot_id, count(*) AS leases, array_agg(job_id) AS jobs FROM known GROUP BY bot_id
), found AS MATERIALIZED (
    SELECT * FROM known
    UNION ALL
    SELECT l.* FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:held AS integer[])) AS b (id, held)
    LEFT JOIN counted c ON c.bot_id = b.id
    CROSS JOIN LATERAL {_LATEST} l
)"""
# Before the call: known is what the bot says that it still has, as far as that is true.
HELD_LEASES = text(f"""
WITH known AS MATERIALIZED (
    SELECT DISTINCT ON (l.job_id) l.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS uuid[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT id FROM jobs WHERE public_id = k.job OFFSET 0) j
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = j.id AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_FOUND}
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state FROM found l JOIN jobs j ON j.id = l.job_id ORDER BY l.job_id
""")
# After it: known is what was held and has not ended. The payload travels until the bot has said that it has the lease.
DUE_LEASES = text(f"""
WITH known AS MATERIALIZED (
    SELECT l.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS bigint[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = k.job AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_FOUND}
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state, i.name AS instance, j.attempts, j.timeout_seconds, p.payload,
    l.delivered_at IS NOT NULL AS delivered, CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason
FROM found l JOIN jobs j ON j.id = l.job_id JOIN instances i ON i.id = l.instance
LEFT JOIN job_payloads p ON p.job_id = l.job_id AND l.state = 'pending'
ORDER BY l.job_id
""")

Known = Iterable[tuple[object, int]]


def read_held_leases(connection: Connection, sync_calls: Sequence[SyncCall]) -> None:
    """Give each visit the live leases that its bot has when its call begins, in the order of their jobs. The bots' rows
    are locked."""
    _gather(connection, HELD_LEASES, sync_calls, _reported, lambda sync_call: sync_call.held)


def read_due_leases(connection: Connection, sync_calls: Sequence[SyncCall]) -> None:
    """Give each visit the live leases that its bot has when all else is settled, likewise."""
    _gather(connection, DUE_LEASES, sync_calls, _left, lambda sync_call: sync_call.due)


def _reported(sync_call: SyncCall) -> Known:
    for report in sync_call.sync.leases if sync_call.sync is not None else ():
        try:
            yield UUID(report.job), report.fence
        except ValueError:
            continue


def _left(sync_call: SyncCall) -> Known:
    ended = {job.job_id for job in sync_call.ended}
    return ((lease.job_id, lease.fence) for lease in sync_call.held if lease.job_id not in ended)


def _gather(
    connection: Connection,
    query: TextClause,
    sync_calls: Sequence[SyncCall],
    known: Callable[[SyncCall], Known],
    into: Callable[[SyncCall], list[Row[Any]]],
) -> None:
    by_bot = {sync_call.bot.id: sync_call for sync_call in sync_calls}
    keys = [(bot_id, job, fence) for bot_id, sync_call in by_bot.items() for job, fence in known(sync_call)]
    if not keys and not any(sync_call.bot_capacity.held for sync_call in sync_calls):
        return
    values = {
        "bot_ids": list(by_bot),
        "held": [sync_call.bot_capacity.held for sync_call in by_bot.values()],
        "known_bots": [bot_id for bot_id, _, _ in keys],
        "known_jobs": [job for _, job, _ in keys],
        "known_fences": [fence for _, _, fence in keys],
    }
    for row in connection.execute(query, values).all():
        into(by_bot[row.bot_id]).append(row)
