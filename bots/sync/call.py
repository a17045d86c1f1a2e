"""Calls while they are settled: the checks of session and sequence number, and the comparison of reports with
leases."""

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from leasehold.errors import BadInput, Conflict
from pydantic_core import to_json
from sqlalchemy import Connection, Row, TextClause, text

from bots.protocol import Chunk, LeaseReport, Outcome, Sync
from bots.sync.sessions import digest
from schema.accounting.units import BotCapacity
from schema.moves.acknowledge import Start
from schema.moves.end import VERDICTS, AttemptEnd, EndedAttempt, Verdict
from schema.moves.grant import FetchedLease
from schema.outputs import Written
from schema.postgres.fragments import newest_leases
from schema.results import Checkpoint
from schema.states import BotStatus, LeaseState
from schema.tables.fleet import NOT_OVER

# The meaning of a bot's report for its leases: a pure function, so that every case is in one place.


#: Verdicts after which proactive fetching replaces the job, because the bot has done work.
COMPLETED = frozenset({Verdict.SUCCEEDED, Verdict.FAILED, Verdict.ERROR})


@dataclass
class ReportOutcome:
    """The consequences of one report: leases that have begun, leases that have ended, output and checkpoints. unknown:
    reports of the end of leases that the bot does not hold, which change nothing."""

    started: list[Start] = field(default_factory=list)
    endings: list[AttemptEnd] = field(default_factory=list)
    output: list[Written] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    unknown: list[LeaseReport] = field(default_factory=list)


def compare(
    held: Sequence[Row[Any]],
    reported: Sequence[LeaseReport],
    *,
    bot_id: int,
    epoch: int,
    actor: str,
    leaves: bool = False,
) -> ReportOutcome:
    """Compare the live leases of a bot with its report. Raises BadInput for output that is not base64.

    Reports of other fences are ignored. The answer will not list these leases, and the bot stops them. If a live lease
    is not reported, it depends on its state: a pending one is on its way to the bot, a cancelling one has been stopped,
    and an active one is lost. A bot that `leaves` gives all of them back. Such ends are marked as `spared`, and their
    number is limited, because a job may have cut its bot off.
    """
    said = {(report.job, report.fence): report for report in reported}
    account = ReportOutcome()
    for lease in held:
        report = said.pop((str(lease.public_id), lease.fence), None)
        verdict, details, result = None, dict[str, Any](), None
        if report is not None:
            _note_left(account, report, bot_id, epoch)
        if report is not None and report.outcome is not None:
            verdict, details = VERDICTS[report.outcome.verdict], _details(report.outcome)
            result = report.outcome.result
        elif report is not None and report.state == "active" and lease.state == LeaseState.PENDING:
            account.started.append(Start(lease.job_id, lease.fence, bot_id, epoch, actor))
        elif report is None and lease.state == LeaseState.CANCELLING:
            verdict, details = Verdict.STOPPED, {"reason": "its bot does not have it any more"}
        elif report is None and lease.state == LeaseState.ACTIVE and not leaves:
            verdict, details = Verdict.LOST, {"reason": "its bot does not know it any more"}
        if verdict is None and leaves:
            verdict, details = Verdict.RELEASED, {"reason": "its bot left", "spared": True}
        if verdict is not None:
            account.endings.append(AttemptEnd(lease.job_id, lease.fence, bot_id, epoch, verdict, details, result))
    account.unknown = [report for report in said.values() if report.outcome is not None]
    return account


def take_ends(reported: Sequence[LeaseReport], *, bot_id: int, epoch: int) -> ReportOutcome:
    """Return what `compare` would, if the reports are the ends of just the live leases of the bot.

    The caller sees by the leases that have ended whether they are. Raises BadInput for output that is not base64.
    """
    account = ReportOutcome()
    for report in reported:
        outcome = report.outcome
        assert outcome is not None, "ends_all has looked"
        _note_left(account, report, bot_id, epoch)
        verdict, details = VERDICTS[outcome.verdict], _details(outcome)
        account.endings.append(AttemptEnd(report.job, report.fence, bot_id, epoch, verdict, details, outcome.result))
    return account


def _note_left(account: ReportOutcome, report: LeaseReport, bot_id: int, epoch: int) -> None:
    """Take note of the output and the checkpoint of one report."""
    if report.output:
        account.output += decode_output(bot_id, epoch, report.job, report.fence, report.output)
    if report.checkpoint is not None:
        number, found = report.checkpoint_number, report.checkpoint
        account.checkpoints.append(Checkpoint(bot_id, epoch, report.job, report.fence, number, found))


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
    """A new call. `began`: the monotonic time at which it came."""

    sync: Sync
    began: float


@dataclass(frozen=True)
class HeldCall:
    """A call without news. Its answer may be held back until a wake-up for the bot arrives, or for as long as the bot
    is willing to wait; the session has to be renewed meanwhile.

    expires: a monotonic time up to which the session surely lasts.
    """

    bot: str
    bot_id: int
    epoch: int
    seq: int
    began: float
    expires: float


Call = NewCall | HeldCall

#: While constrained jobs wait, one in this many calls does not fetch, so that the bot has room for them.
YIELDING = 4
#: 2^32 divided by the golden ratio; its multiples are spread most evenly (Knuth, TAOCP 3, 6.4).
GOLDEN = 2654435769


@dataclass
class SyncCall:
    """One call of a batch that is being settled; its bot's row is locked.

    nth: the number of the call in the batch. repeated: a call with this sequence number has been settled before, so
    that its report has been applied. trusted: its leases are ended without being read before. held, due: the bot's live
    leases before and after the call; what a trusted call held stays unread. ended: the attempts that the call has
    ended. fetched: the leases that it has begun. before: seconds that have surely passed between the sending of the
    call and the moment at which the rest of the session was measured. remaining: the rest of the session at that
    moment, seconds.
    """

    nth: int
    call: Call
    bot: Row[Any]
    repeated: bool
    before: float
    remaining: float
    trusted: bool = False
    held: list[Row[Any]] = field(default_factory=list)
    account: ReportOutcome = field(default_factory=ReportOutcome)
    ended: list[EndedAttempt] = field(default_factory=list)
    fetched: list[FetchedLease] = field(default_factory=list)
    due: list[Row[Any] | FetchedLease] = field(default_factory=list)
    bot_capacity: BotCapacity = field(init=False)

    def __post_init__(self) -> None:
        self.bot_capacity = BotCapacity(self.bot.capacity, self.bot.in_use, self.bot.held, self.bot.kept_units)

    @property
    def sync(self) -> Sync | None:
        """Return the bot's report; None if it has been applied before."""
        return self.call.sync if isinstance(self.call, NewCall) and not self.repeated else None

    @property
    def seq(self) -> int:
        """Return the sequence number of the call in its session."""
        return _seq(self.call)

    @property
    def actor(self) -> str:
        """Return the name of the bot in events."""
        return f"bot:{self.bot.name}"

    @property
    def leaves(self) -> bool:
        """Return whether the bot closes its session."""
        return self.sync is not None and self.sync.status == BotStatus.GONE.value

    @property
    def ends_all(self) -> bool:
        """Return whether the bot reports the ends of as many leases as it holds, and nothing else.

        Then the leases need not be read before they are ended.
        """
        reported = () if self.sync is None or self.leaves else self.sync.leases
        return (
            0 < len(reported) == self.bot.held
            and all(report.outcome is not None and _ID.fullmatch(report.job) for report in reported)
            and len({report.job for report in reported}) == len(reported)
        )

    @property
    def status(self) -> str:
        """Return the status that the bot reports. A bot that leaves keeps its status until its session is closed."""
        return str(self.bot.status if self.sync is None or self.leaves else self.sync.status)

    @property
    def changes_bot(self) -> bool:
        """Return whether the call changes anything of its bot but the end of its session."""
        bot, capacity = self.bot, self.bot_capacity
        return (self.seq, self.status, capacity.capacity, capacity.in_use, capacity.held, capacity.kept) != (
            bot.sync_seq,
            bot.status,
            bot.capacity,
            bot.in_use,
            bot.held,
            bot.kept_units,
        )

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
        bot_id, epoch, reported = self.bot.id, self.bot.epoch, self.sync.leases
        self.account = (
            take_ends(reported, bot_id=bot_id, epoch=epoch)
            if self.trusted
            else compare(self.held, reported, bot_id=bot_id, epoch=epoch, actor=self.actor, leaves=self.leaves)
        )

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


def check_call(nth: int, call: Call, bot: Row[Any] | None, *, asked_at: float) -> SyncCall:
    """Check the session of a call and its sequence number. Raises Conflict.

    asked_at: a monotonic time before the row of the bot was read.
    """
    if isinstance(call, NewCall):
        bot = check_session(bot, epoch=call.sync.epoch, secret=call.sync.secret)
        late = call.sync.seq < bot.sync_seq
    else:
        bot = _check_epoch(bot, epoch=call.epoch)
        late = call.seq != bot.sync_seq
    if late:
        raise Conflict("stale_seq", "a later call of this session has been answered")
    return SyncCall(
        nth,
        call,
        bot,
        repeated=_seq(call) == bot.sync_seq,
        before=asked_at - call.began,
        remaining=float(bot.remaining),
    )


def check_session(bot: Row[Any] | None, *, epoch: int, secret: str) -> Row[Any]:
    """Return the bot if this is its open session. Raises Conflict."""
    bot = _check_epoch(bot, epoch=epoch)
    if not hmac.compare_digest(bot.session, digest(secret)):
        raise Conflict("session_over", "this session is over: open a new one")
    return bot


def _check_epoch(bot: Row[Any] | None, *, epoch: int) -> Row[Any]:
    if bot is None or bot.session is None or bot.closing:
        raise Conflict("session_over", "this session is over: open a new one")
    if bot.epoch < epoch:
        raise Conflict("session_over", "the server has lost this session: open a new one")
    if bot.epoch != epoch:
        raise Conflict("session_superseded", "a newer session of this bot is open")
    return bot


# Answers are written without the models `SyncAnswer` and `Work`, and payloads as the database's text of them, which the
# gateway need not parse: of a call that ends and fetches ten jobs this saves about a tenth of the gateway's settling.


def answer_message(
    leases: Sequence[Row[Any] | FetchedLease], *, seq: int, expires_in: float, sync_in: float, drain: bool = False
) -> bytes:
    """Return the message `SyncAnswer` with these leases, as JSON."""
    rest = to_json({"drain": drain, "expires_in": expires_in, "sync_in": sync_in})
    return b'{"seq":%d,"leases":[%b],%b' % (seq, b",".join(map(_lease_message, leases)), rest[1:])


def _lease_message(row: Row[Any] | FetchedLease) -> bytes:
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


# Reads of the live leases of bots whose calls are settled, before and after the call.


# The bot's row has the number of its live leases. Known leases are looked up by their keys, and the rest are the latest
# ones. So entries of leases that have ended are never read.
_LEASE = "bot_id, job_id, fence, instance, state, units, delivered_at, stop_reason"


def _found(*more: str, but: str = "coalesce(c.jobs, '{}')") -> str:
    """The leases that are known, and the others of the same bots.

    more: SQL expressions for what each of the others, `l`, has beside the columns of a lease, as the known ones do.
    but: SQL expression for an array of the jobs whose leases are not among the others.
    """
    columns = ", ".join(["l.*", *more])
    latest = newest_leases("b.id", "b.held - coalesce(c.leases, 0)", columns=_LEASE, but=but)
    return f"""counted AS MATERIALIZED (
    SELECT bot_id, count(*) AS leases, array_agg(job_id) AS jobs FROM known GROUP BY bot_id
), found AS MATERIALIZED (
    SELECT * FROM known
    UNION ALL
    SELECT {columns} FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:held AS integer[])) AS b (id, held)
    LEFT JOIN counted c ON c.bot_id = b.id
    CROSS JOIN LATERAL {latest} l
)"""


# Before the call: leases that the bot reports are known, if they are live.
HELD_LEASES = text(f"""
WITH known AS MATERIALIZED (
    SELECT DISTINCT ON (l.job_id) l.*, k.job AS public_id
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS uuid[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT id FROM jobs WHERE public_id = k.job OFFSET 0) j
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = j.id AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_found("(SELECT public_id FROM jobs WHERE id = l.job_id)")}
SELECT bot_id, job_id, public_id, fence, state FROM found ORDER BY job_id
""")
# The numbers of the GPUs that a lease of a constrained job has taken; null for none.
_GPUS = r"""(
        SELECT array_agg(CAST(split_part(name, '\:', 4) AS integer) ORDER BY CAST(split_part(name, '\:', 4) AS integer))
        FROM leases t CROSS JOIN LATERAL jsonb_object_keys(t.taken) AS k (name)
        WHERE t.job_id = l.job_id AND t.fence = l.fence AND name LIKE 'bot\:%\:gpu\:%')"""
# After the call: leases that were held and have not ended are known. Those that the call has begun are left out: the
# grant has returned what the bot is told of them. Payload and checkpoint are sent until the bot reports the lease.
DUE_LEASES = text(f"""
WITH known AS MATERIALIZED (
    SELECT l.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS bigint[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = k.job AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_found(but="coalesce(c.jobs, '{}') || CAST(:fetched AS bigint[])")}
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state, l.units, i.name AS instance, j.attempts, j.timeout_seconds,
    CAST(p.payload AS text) AS payload, l.delivered_at IS NOT NULL AS delivered,
    CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason,
    CASE WHEN j.constrained AND l.state = 'pending' THEN {_GPUS} END AS gpus,
    CASE WHEN l.state = 'pending' THEN (
        SELECT CAST(checkpoint AS text) FROM job_checkpoints WHERE job_id = l.job_id) END AS checkpoint
FROM found l JOIN jobs j ON j.id = l.job_id JOIN instances i ON i.id = l.instance
LEFT JOIN job_payloads p ON p.job_id = l.job_id AND l.state = 'pending'
ORDER BY l.job_id
""")

Known = Iterable[tuple[object, int]]


def read_held_leases(connection: Connection, sync_calls: Sequence[SyncCall]) -> None:
    """Read the live leases of each bot before its call, in the order of their jobs. The bots' rows are locked."""
    _gather(connection, HELD_LEASES, sync_calls, _reported, lambda sync_call: sync_call.held)


def read_due_leases(connection: Connection, sync_calls: Sequence[SyncCall]) -> None:
    """Read the live leases of each bot after its call is settled, but for those that the call has begun."""
    for sync_call in sync_calls:
        sync_call.due = [*sync_call.fetched]
    others = [sync_call for sync_call in sync_calls if sync_call.bot_capacity.held > len(sync_call.fetched)]
    _gather(connection, DUE_LEASES, others, _left, lambda sync_call: sync_call.due)
    for sync_call in sync_calls:
        if sync_call.fetched:
            sync_call.due.sort(key=attrgetter("job_id"))


#: An id as the database writes it, which is how bots get it. A report with any other one is of no lease.
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _reported(sync_call: SyncCall) -> Known:
    leases = () if sync_call.sync is None else sync_call.sync.leases
    return ((report.job, report.fence) for report in leases if _ID.fullmatch(report.job))


def _left(sync_call: SyncCall) -> Known:
    ended = {job.job_id for job in sync_call.ended}
    return ((lease.job_id, lease.fence) for lease in sync_call.held if lease.job_id not in ended)


def _gather(
    connection: Connection,
    query: TextClause,
    sync_calls: Sequence[SyncCall],
    known: Callable[[SyncCall], Known],
    into: Callable[[SyncCall], list[Any]],
) -> None:
    by_bot = {sync_call.bot.id: sync_call for sync_call in sync_calls}
    keys = [(bot_id, job, fence) for bot_id, sync_call in by_bot.items() for job, fence in known(sync_call)]
    if not keys and not any(sync_call.bot_capacity.held for sync_call in sync_calls):
        return
    values = {
        "bot_ids": list(by_bot),
        "held": [sync_call.bot_capacity.held - len(sync_call.fetched) for sync_call in by_bot.values()],
        "fetched": [lease.job_id for sync_call in sync_calls for lease in sync_call.fetched],
        "known_bots": [bot_id for bot_id, _, _ in keys],
        "known_jobs": [job for _, job, _ in keys],
        "known_fences": [fence for _, _, fence in keys],
    }
    for row in connection.execute(query, values).all():
        into(by_bot[row.bot_id]).append(row)
