"""Reads of the live leases of bots whose calls are settled, before and after the call."""

import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from bots.sync.call import HeldCall, SyncCall
from schema.moves.grant import FetchedLease
from schema.postgres.connection import Connection, Later
from schema.postgres.fragments import newest_leases, newest_version
from schema.postgres.statements import Row, Statement
from schema.sql import NOT_OVER
from schema.states import LeaseState

#: An id as the database writes it, which is how bots get it. A report with any other one is of no lease.
JOB_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

# The bot's row has the number of its live leases. Known leases are looked up by their keys, and the rest are the latest
# ones. So entries of leases that have ended are never read.
_JOB = ("id", "public_id", "attempts", "timeout_seconds")
_LEASE = "bot_id, bot_epoch, job_id, fence, instance, state, units, delivered_at, stop_reason"


def _found(*of_job: str, but: str = "coalesce(c.jobs, '{}')") -> str:
    """The leases that are known, and the others of the same bots.

    Of the others of bots that are `brief`, only those that the bot was not told of as they are, and those of older
    sessions.

    of_job: columns of its job that each of the others has beside those of a lease, as the known ones do.
    but: SQL expression for an array of the jobs whose leases are not among the others.
    """
    columns = ", ".join(["l.*", *(f"j.{column}" for column in of_job)])
    job = f"CROSS JOIN LATERAL (SELECT {', '.join(of_job)} FROM jobs WHERE id = l.job_id OFFSET 0) j" if of_job else ""
    latest = newest_leases("b.id", "b.held - coalesce(c.leases, 0)", columns=_LEASE, but=but)
    return f"""counted AS MATERIALIZED (
    SELECT bot_id, count(*) AS leases, array_agg(job_id) AS jobs FROM known GROUP BY bot_id
), found AS MATERIALIZED (
    SELECT * FROM known
    UNION ALL
    SELECT {columns} FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:held AS integer[]),
        CAST(:brief AS boolean[])) AS b (id, epoch, held, brief)
    LEFT JOIN counted c ON c.bot_id = b.id
    CROSS JOIN LATERAL {latest} l
    {job}
    WHERE NOT b.brief OR l.state = 'cancelling' OR l.delivered_at IS NULL OR l.bot_epoch <> b.epoch
)"""


# Before the call: leases that the bot reports are known, if they are live. Of those that run, what is read suffices to
# tell the bot of them.
HELD_LEASES = Statement(f"""
WITH known AS MATERIALIZED (
    SELECT DISTINCT ON (l.job_id) l.*, j.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS uuid[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT {", ".join(_JOB)} FROM jobs WHERE public_id = k.job OFFSET 0) j
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = j.id AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_found(*_JOB)}
SELECT l.bot_id, l.bot_epoch, l.job_id, CAST(l.public_id AS text) AS public_id, l.fence, l.state, l.units,
    i.name AS instance, l.attempts, l.timeout_seconds,
    CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason,
    NULL AS payload, NULL AS gpus, NULL AS checkpoint
FROM found l JOIN instances i ON i.id = l.instance ORDER BY l.job_id
""")
# The numbers of the GPUs that a lease of a constrained job has taken; null for none.
_GPUS = r"""(
        SELECT array_agg(CAST(split_part(name, '\:', 4) AS integer) ORDER BY CAST(split_part(name, '\:', 4) AS integer))
        FROM leases t CROSS JOIN LATERAL jsonb_object_keys(t.taken) AS k (name)
        WHERE t.job_id = l.job_id AND t.fence = l.fence AND name LIKE 'bot\:%\:gpu\:%')"""
# What a bot is told of the leases in `found`.
_TOLD = f"""
SELECT l.bot_id, l.bot_epoch, l.job_id, CAST(j.public_id AS text) AS public_id, l.fence, l.state, l.units,
    i.name AS instance, j.attempts, j.timeout_seconds,
    CAST(p.payload AS text) AS payload, l.delivered_at IS NOT NULL AS delivered,
    CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason,
    CASE WHEN j.constrained AND l.state = 'pending' THEN {_GPUS} END AS gpus,
    CASE WHEN l.state = 'pending' THEN (
        SELECT CAST(checkpoint AS text) FROM job_checkpoints WHERE job_id = l.job_id) END AS checkpoint
FROM found l JOIN instances i ON i.id = l.instance
CROSS JOIN LATERAL (SELECT public_id, attempts, timeout_seconds, constrained FROM jobs WHERE id = l.job_id OFFSET 0) j
LEFT JOIN LATERAL (
    SELECT payload FROM job_payloads WHERE job_id = l.job_id AND l.state = 'pending' OFFSET 0) p ON true
ORDER BY l.job_id
"""
# After the call: leases that were held and have not begun to run are known. Those that run are left out, and those that
# the call has fetched: the grant has returned what the bot is told of them. Payload and checkpoint are sent until the
# bot reports the lease.
DUE_LEASES = Statement(f"""
WITH known AS MATERIALIZED (
    SELECT l.*
    FROM unnest(CAST(:known_bots AS bigint[]), CAST(:known_jobs AS bigint[]), CAST(:known_fences AS bigint[]))
        AS k (bot_id, job, fence)
    CROSS JOIN LATERAL (SELECT {_LEASE} FROM leases WHERE job_id = k.job AND fence = k.fence OFFSET 0) l
    WHERE l.bot_id = k.bot_id AND l.{NOT_OVER}
), {_found(but="coalesce(c.jobs, '{}') || CAST(:found AS bigint[])")}{_TOLD}""")
# The same for bots whose held calls have news. Bots are named, so that one round trip locks their rows and reads this.
NEWS_LEASES = Statement(f"""
WITH found AS MATERIALIZED (
    SELECT l.* FROM unnest(CAST(:names AS text[])) AS n (name)
    CROSS JOIN LATERAL {newest_version("bots", "name", "n.name", columns="id, held")} b
    CROSS JOIN LATERAL {newest_leases("b.id", "b.held", columns=_LEASE)} l
){_TOLD}""")

# The payloads of live leases, by what the answers call a job and its fence.
PAYLOADS = Statement(f"""
SELECT l.job_id, l.fence, p.payload
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS k (job, fence)
JOIN leases l ON l.job_id = k.job AND l.fence = k.fence AND l.{NOT_OVER} JOIN job_payloads p ON p.job_id = l.job_id
""")

Known = Iterable[tuple[object, int]]


def read_held_leases(connection: Connection, sync_calls: Sequence[SyncCall]) -> None:
    """Read the live leases of each bot before its call, in the order of their jobs, without unchanged ones that the bot
    does not list. The bots' rows are locked.
    """
    older = _gather(connection, HELD_LEASES, sync_calls, _reported, lambda sync_call: sync_call.held)
    for sync_call in sync_calls if older else ():
        sync_call.of_older_sessions = [lease for lease in older if lease.bot_id == sync_call.bot.id]


def ask_news(connection: Connection, calls: Sequence[HeldCall]) -> Later:
    """Read the live leases of the bots of held calls with the next statement, for `read_due_leases`."""
    return connection.execute_later(NEWS_LEASES, {"names": [call.bot for call in calls]})


def read_due_leases(connection: Connection, sync_calls: Sequence[SyncCall], news: Later | None) -> None:
    """Find the live leases of each bot after its call is settled.

    news: by `ask_news`, after the locks, if all calls were held: they change nothing, so there is nothing else to find.

    Those that the call has fetched, and those that run, are not read again: nobody else begins or ends leases of a bot
    whose row is locked. If somebody asks to stop one after it was read, the next call tells that.

    Leases that the bot does not list are left out if they are just the unchanged ones. The bot holds what it was told
    of in the answers before; so it holds the same ones if there are as many.
    """
    if news is not None:
        by_bot = {sync_call.bot.id: sync_call for sync_call in sync_calls}
        for row in news.result():
            if (sync_call := by_bot.get(row.bot_id)) is not None and row.bot_epoch == sync_call.bot.epoch:
                sync_call.due.append(row)
        return
    for sync_call in sync_calls:
        sync_call.due = _known(sync_call)
    _gather(connection, DUE_LEASES, [each for each in sync_calls if _has_unread(each)], _unread, lambda each: each.due)
    for sync_call in sync_calls:
        unchanged = sync_call.bot_capacity.held - sync_call.still_of_older_sessions - len(sync_call.due)
        sync_call.left_out = unchanged if unchanged == sync_call.unlisted else 0
    disagreeing = [each for each in sync_calls if each.unlisted != each.left_out]
    for sync_call in disagreeing:
        sync_call.due = _known(sync_call)
    _gather(connection, DUE_LEASES, disagreeing, _unread, lambda each: each.due, whole=True)
    for sync_call in sync_calls:
        if len(sync_call.due) > 1:
            sync_call.due.sort(key=attrgetter("job_id"))


def read_payloads(connection: Connection, leases: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """Return the payloads of those of these leases that are live, given and returned by job and fence."""
    keys = list(leases)
    asked = {"job_ids": [job for job, _ in keys], "fences": [fence for _, fence in keys]}
    return {(row.job_id, row.fence): row.payload for row in connection.execute(PAYLOADS, asked)}


def _reported(sync_call: SyncCall) -> Known:
    leases = () if sync_call.sync is None else sync_call.sync.leases
    return ((report.job, report.fence) for report in leases if JOB_ID.fullmatch(report.job))


def _unread(sync_call: SyncCall) -> Known:
    gone = {job.job_id for job in sync_call.ended} | {lease.job_id for lease in sync_call.due}
    return ((lease.job_id, lease.fence) for lease in sync_call.held if lease.job_id not in gone)


def _has_unread(sync_call: SyncCall) -> bool:
    """Whether leases may be due that are not known yet. Those that the bot does not list were read if they changed."""
    if sync_call.unlisted > 0:
        return any(_unread(sync_call))
    return sync_call.bot_capacity.held - sync_call.still_of_older_sessions > len(sync_call.due)


def _known(sync_call: SyncCall) -> list[Row | FetchedLease]:
    """The leases that the call has fetched, and those that have begun to run and have not ended."""
    ended = {job.job_id for job in sync_call.ended}
    found: list[Row | FetchedLease] = [*sync_call.fetched]
    for lease in sync_call.held:
        if lease.job_id in ended:
            continue
        if lease.state != LeaseState.PENDING:
            found.append(lease)
        elif lease.job_id in sync_call.started:
            found.append(lease._replace(state=LeaseState.ACTIVE))
    return found


def _gather(
    connection: Connection,
    query: Statement,
    sync_calls: Sequence[SyncCall],
    known: Callable[[SyncCall], Known],
    into: Callable[[SyncCall], list[Any]],
    *,
    whole: bool = False,
) -> Sequence[Row]:
    """Read leases by the query, but for those that are due already; return those of older sessions of the bots.

    whole: also those for which nothing has changed, of bots that do not list them.
    """
    by_bot = {sync_call.bot.id: sync_call for sync_call in sync_calls}
    keys = [(bot_id, job, fence) for bot_id, sync_call in by_bot.items() for job, fence in known(sync_call)]
    if not keys and not any(sync_call.bot_capacity.held for sync_call in sync_calls):
        return ()
    values = {
        "bot_ids": list(by_bot),
        "epochs": [sync_call.bot.epoch for sync_call in by_bot.values()],
        "held": [sync_call.bot_capacity.held - len(sync_call.due) for sync_call in by_bot.values()],
        "brief": [sync_call.unlisted > 0 and not whole for sync_call in by_bot.values()],
        "found": [lease.job_id for sync_call in by_bot.values() for lease in sync_call.due],
        "known_bots": [bot_id for bot_id, _, _ in keys],
        "known_jobs": [job for _, job, _ in keys],
        "known_fences": [fence for _, _, fence in keys],
    }
    older = list[Row]()
    for row in connection.execute(query, values).all():
        sync_call = by_bot[row.bot_id]
        (into(sync_call) if row.bot_epoch == sync_call.bot.epoch else older).append(row)
    return older
