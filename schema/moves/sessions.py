"""Open, renew, drain and close the sessions of bots. Jobs of a closed session go back to the queue in the same
transaction.

One module because every beginning and end of a session locks the same rows and ends leases in the same way.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from leasehold.errors import NotFound
from leasehold.states import JobState
from leasehold.wire import escaped

from schema import audit
from schema.accounting.counters import declare_resources
from schema.accounting.held_rows import Quota, Trials
from schema.accounting.units import BotCapacity
from schema.moves.end import AttemptEnd, EndedAttempt, Verdict, end
from schema.moves.waiting.backoff import wake_queues_for_bots
from schema.postgres import advisory
from schema.postgres.connection import Connection
from schema.postgres.fragments import json_array, json_documents, newest_leases, newest_version
from schema.postgres.notify import wake
from schema.postgres.statements import Row, Statement
from schema.timing import KILL_GRACE
from schema.validation import MAX_FORGIVEN, RESOURCES, Properties, ResourceName

# In the order of names, so that no two transactions wait for each other's new rows.
INSERT_BOTS = Statement("""
INSERT INTO bots (name)
SELECT n.name FROM unnest(CAST(:names AS text[])) AS n (name) WHERE NOT EXISTS (SELECT FROM bots WHERE name = n.name)
ORDER BY n.name ON CONFLICT (name) DO NOTHING
""")
LOCK = Statement("""
SELECT id, name, epoch, session, expires_at, held, EXISTS (
    SELECT FROM counters WHERE name = ANY (ARRAY(
        SELECT 'bot:' || b.id || ':' || r.name FROM unnest(CAST(:resources AS text[])) AS r (name)))) AS limited
FROM bots b WHERE name = ANY (CAST(:names AS text[])) ORDER BY id FOR NO KEY UPDATE
""")
RENEW = Statement("""
UPDATE bots SET expires_at = now() + make_interval(secs => :ttl) WHERE id = ANY (CAST(:ids AS bigint[])) AND NOT closing
""")
HELD_BY = Statement(f"""
SELECT l.job_id, l.fence, l.bot_id, l.bot_epoch, b.cohort, l.instance FROM bots b
CROSS JOIN LATERAL {newest_leases("b.id", "b.held", columns="job_id, fence, bot_id, bot_epoch, instance")} l
WHERE b.id = ANY (CAST(:bot_ids AS bigint[]))
""")
# In the order of names and of properties, as those of INSERT_BOTS.
INTERN_INSTANCES = Statement("""
SELECT name, intern_instance(name) AS id FROM unnest(CAST(:names AS text[])) AS n (name)
""")
INTERN_KINDS = Statement(f"""
SELECT nth, intern_kind(properties, ARRAY(SELECT jsonb_array_elements_text(exclusive))) AS id
FROM unnest({json_array("properties")}, {json_array("exclusive")}) WITH ORDINALITY AS k (properties, exclusive, nth)
""")
# Each session that ends is told by a row: here the row of the bot is what it was before the statement.
_SESSIONS_END = """WITH told AS (
    INSERT INTO bot_sessions (bot, opened_at, ended_at, kind, properties, exclusive, labels, instance, pool, priority,
        capacity)
    SELECT b.name, b.opened_at, greatest(now(), b.opened_at), b.kind, k.properties, k.exclusive, b.labels, i.name,
        b.pool, b.priority, b.capacity
    FROM bots b JOIN kinds k ON k.id = b.kind LEFT JOIN instances i ON i.id = b.instance
    WHERE b.id = ANY (CAST(:ids AS bigint[])) AND b.session IS NOT NULL
)"""
OPEN = Statement(f"""
{_SESSIONS_END}
UPDATE bots b SET epoch = b.epoch + 1, session = o.session, sync_seq = 0, status = 'ok', closing = false,
    kept_units = 0, instance = o.instance, pool = o.pool, labels = o.labels, cohort = cohort_of(o.labels),
    priority = o.priority, capacity = greatest(o.capacity, b.in_use), kind = o.kind, host = o.host, pid = o.pid,
    version = o.version, kill_grace = o.kill_grace, opened_at = now(),
    expires_at = now() + make_interval(secs => :ttl)
FROM (
    SELECT id, session, instance, pool, ARRAY(SELECT jsonb_array_elements_text(labels)) AS labels, priority, capacity,
        kind, host, pid, version, kill_grace
    FROM unnest(
        CAST(:ids AS bigint[]), CAST(:sessions AS bytea[]), CAST(:instances AS integer[]), CAST(:pools AS text[]),
        {json_array("labels")}, CAST(:priorities AS integer[]), CAST(:capacities AS integer[]),
        CAST(:bot_kinds AS integer[]), CAST(:hosts AS text[]), CAST(:pids AS integer[]),
        CAST(:versions AS text[]), CAST(:graces AS double precision[]))
        AS o (id, session, instance, pool, labels, priority, capacity, kind, host, pid, version, kill_grace)
) o
WHERE b.id = o.id RETURNING b.name, b.id, b.epoch, b.held
""")
FIRST_EXPIRY = Statement("""
SELECT extract(epoch FROM min(expires_at) - clock_timestamp()) FROM bots WHERE status <> 'gone'
""")
EXPIRED = Statement("""
SELECT id, session, held FROM bots WHERE status <> 'gone' AND expires_at < clock_timestamp() AND id > :after
ORDER BY id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")
FIRST_EXPIRED = Statement("""
SELECT id FROM bots WHERE status <> 'gone' AND expires_at < clock_timestamp() AND id > :after ORDER BY id LIMIT 1
""")
# How often a lost attempt of this job was not counted, or taken back. The limit is for a job that cuts its bot off.
SPARED = """SELECT count(*) FROM job_events e
    WHERE e.job_id = {job} AND (e.move = 'forgive' OR e.move = 'requeue' AND e.details ? 'spared')"""
WORN_OUT = Statement(f"""
SELECT id FROM unnest(CAST(:job_ids AS bigint[])) AS j (id) WHERE ({SPARED.format(job="j.id")}) >= {MAX_FORGIVEN}
""")
# Only what has been charged: the bot had been told of the job, and the job was queued again.
RECORD_LOST = Statement("""
INSERT INTO lost_attempts (job_id, fence, bot_id, session)
SELECT t.* FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:bot_ids AS bigint[]),
    CAST(:sessions AS bytea[])) AS t (job_id, fence, bot_id, session)
CROSS JOIN LATERAL (SELECT acknowledged_at, delivered_at FROM leases
    WHERE job_id = t.job_id AND fence = t.fence OFFSET 0) l
WHERE coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL
""")
# A failure that was counted against the bot is taken back by upkeep.
FORGIVE = Statement(f"""
WITH told AS MATERIALIZED (
    DELETE FROM lost_attempts l
    USING unnest(CAST(:bot_ids AS bigint[]), CAST(:sessions AS bytea[]), CAST(:actors AS text[]))
        AS t (bot_id, session, actor)
    WHERE l.bot_id = t.bot_id AND l.session = t.session RETURNING l.job_id, l.fence, l.bot_id, t.actor
), held AS MATERIALIZED (
    SELECT j.id, t.lost, t.actors FROM jobs j
    JOIN (SELECT job_id, array_agg(fence ORDER BY fence) AS lost, array_agg(actor ORDER BY fence) AS actors
          FROM told GROUP BY job_id) t ON t.job_id = j.id
    WHERE j.finished_at IS NULL
    ORDER BY j.id FOR NO KEY UPDATE OF j
), spared AS MATERIALIZED (
    SELECT h.id, h.lost[1 : n.left_over] AS lost, h.actors[1 : n.left_over] AS actors FROM held h
    CROSS JOIN LATERAL (SELECT {MAX_FORGIVEN} - ({SPARED.format(job="h.id")}) AS left_over) n
    WHERE n.left_over > 0
), moved AS (
    UPDATE jobs j SET kills = greatest(j.kills - cardinality(s.lost), 0),
        attempts = greatest(j.attempts - cardinality(s.lost), 0)
    FROM spared s WHERE j.id = s.id RETURNING j.id, j.state, j.fence, s.lost, s.actors
), returned AS (
    UPDATE blames b SET returned_at = clock_timestamp(), upheld_at = NULL
    FROM told t WHERE b.bot_id = t.bot_id AND b.job_id = t.job_id
)
INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
SELECT m.id, 'forgive', m.state, m.state, m.fence, e.actor,
    jsonb_build_object('reason', 'its bot was only cut off', 'lost_fence', e.lost)
FROM moved m CROSS JOIN unnest(m.lost, m.actors) AS e (lost, actor)
""")
STOP_RENEWING = Statement("UPDATE bots SET closing = true WHERE id = :id AND NOT closing")
# An older session lasted at most so long, if it was of `ttl` seconds too.
OLDER_ENDED = Statement("""
SELECT id, opened_at + make_interval(secs => :ttl) AS at FROM bots WHERE id = ANY (CAST(:ids AS bigint[]))
""")
CLOSE = Statement(f"""
{_SESSIONS_END}
UPDATE bots SET epoch = epoch + 1, session = NULL, status = 'gone', expires_at = NULL, closing = false, kept_units = 0
WHERE id = ANY (CAST(:ids AS bigint[]))
""")
# The statement reads the overdue leases, which are few, and finds their bots by id. It closes no bot for a lease of one
# of its older sessions.
CLOSE_OVERDUE = Statement("""
WITH overdue AS MATERIALIZED (
    SELECT b.id FROM bots b
    WHERE NOT b.closing AND b.status <> 'gone' AND b.id = ANY (ARRAY(
        SELECT l.bot_id FROM leases l JOIN bots h ON h.id = l.bot_id AND h.epoch = l.bot_epoch AND NOT h.closing
        WHERE l.state IN ('pending', 'active', 'cancelling') AND l.due_at < now() AND l.state = 'cancelling'))
    ORDER BY b.id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE bots b SET closing = true FROM overdue WHERE b.id = overdue.id RETURNING b.name
""")
#: Why a lease of an older session of its bot ends.
STARTED_ANEW = "its bot started anew"
#: A session is renewed at a call if less than this part of it is left.
RENEWED_BELOW = 5 / 6
#: The same while the bot's call is held: later, because a bot without leases has no work to lose. The call of a bot
#: with leases, for which `RENEWED_BELOW` was enough at its beginning, ends before.
HELD_RENEWED_BELOW = 1 / 2
#: The same at the call of a bot without leases, which will be held: the session is renewed meanwhile.
IDLE_RENEWED_BELOW = 1 / 3
# A heartbeat soon after another one does not write the expiry again. This transaction has locked the row, so that the
# version that it finds is the one to change, and can be named by its place (ctid).
RECORD_SYNCS = Statement(f"""
UPDATE bots b SET sync_seq = s.seq, status = s.status, capacity = s.capacity, in_use = s.in_use, held = s.held,
    kept_units = s.kept,
    expires_at = CASE WHEN b.expires_at < now() + make_interval(secs => :ttl * {RENEWED_BELOW})
        THEN now() + make_interval(secs => :ttl) ELSE b.expires_at END
FROM (
    SELECT s.*, place.ctid FROM unnest(
        CAST(:ids AS bigint[]), CAST(:seqs AS bigint[]), CAST(:states AS text[]), CAST(:capacities AS integer[]),
        CAST(:in_use AS integer[]), CAST(:held AS integer[]), CAST(:kept AS integer[]))
        AS s (id, seq, status, capacity, in_use, held, kept)
    CROSS JOIN LATERAL {newest_version("bots", "id", "s.id", columns="ctid")} place
) s
WHERE b.ctid = s.ctid
RETURNING b.id, extract(epoch FROM b.expires_at - clock_timestamp()) AS remaining
""")
# Rows that others have locked, or have changed since the statement began, are left for the next round. `in_use` stays
# what it is, and is written for speed: PostgreSQL reads the expression of the generated column `free` once for a
# statement that writes one of its columns, but once for each row if the statement writes none.
RENEW_HELD = Statement("""
WITH due AS MATERIALIZED (
    SELECT b.ctid FROM unnest(CAST(:ids AS bigint[]), CAST(:epochs AS bigint[])) AS held (id, epoch)
    JOIN bots b ON b.id = held.id AND b.epoch = held.epoch
    WHERE NOT b.closing AND b.status <> 'gone'
        AND b.expires_at < now() + make_interval(secs => :ttl * :below)
    ORDER BY b.id FOR NO KEY UPDATE OF b SKIP LOCKED
)
UPDATE bots b SET expires_at = now() + make_interval(secs => :ttl), in_use = b.in_use
FROM due WHERE b.ctid = due.ctid
RETURNING b.id, b.epoch
""")
# What others have locked they are about to write by the new clock.
FOLLOW_CLOCK = Statement("""
WITH ahead AS MATERIALIZED (
    SELECT id FROM bots WHERE status <> 'gone' AND expires_at > now() + make_interval(secs => :longest)
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE bots SET expires_at = expires_at - make_interval(secs => :back) WHERE id = ANY (ARRAY(SELECT id FROM ahead))
""")
DRAIN = Statement("""
UPDATE bots SET draining = :draining, kept_units = CASE WHEN :draining THEN 0 ELSE kept_units END,
    drain_deadline = CASE WHEN :draining THEN now() + make_interval(secs => CAST(:deadline AS double precision)) END
WHERE name = :name RETURNING id, capacity - in_use - kept_units AS room
""")


@dataclass(frozen=True)
class SyncUpdate:
    """What a bot reported about itself in call number `seq`, and its units after the call was settled."""

    bot_id: int
    seq: int
    status: str
    bot_capacity: BotCapacity


@dataclass(frozen=True)
class SessionOpening:
    """A session that a bot wants to begin.

    session: the digest of its secret.
    exclusive: names of the properties that the bot offers only to jobs that ask for them, sorted.
    instance: the only one whose jobs it runs, None = all. pool, labels: what it belongs to; labels are sorted.
    supply: the resources that the bot declares; of other resources it has any amount.
    dead: the digest of an older session. The bot knows that no job of that session runs any more, so its jobs are
        granted again at once. Jobs of any other older session wait until that session would have expired.
    cut_off: the bot lived on and lost the session `dead` because no gateway answered it. Its jobs are not charged with
        a lost bot; a charge that its expiry has made is taken back. This happens at most ten times for each job.
    host, pid, version: the agent's machine, its process id there and its version, for people; None = not told.
    kill_grace: seconds that the bot gives a job between SIGTERM and SIGKILL, at most 600.
    """

    name: str
    session: bytes
    capacity: int
    priority: int = 0
    properties: Properties = field(default_factory=dict)
    exclusive: Sequence[str] = ()
    instance: str | None = None
    pool: str | None = None
    labels: Sequence[str] = ()
    supply: Mapping[ResourceName, int] | None = None
    dead: bytes | None = None
    cut_off: bool = False
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    kill_grace: float = KILL_GRACE


@dataclass(frozen=True)
class OpenedSession:
    """A session that has begun. `ended`: the ended attempts of the session before it."""

    bot_id: int
    epoch: int
    ended: list[EndedAttempt]


@dataclass(frozen=True)
class _SessionEnd:
    """The end of a session, for all leases of the bot. hold_until: as of `end`."""

    verdict: Verdict
    actor: str
    reason: str
    hold_until: datetime | None = None


def open_sessions(
    connection: Connection, openings: Sequence[SessionOpening], *, ttl: float, tries: bool = False
) -> list[OpenedSession]:
    """Begin sessions of `ttl` seconds, each under a new epoch of its bot. The names of the bots are distinct.

    The number of statements does not grow with the number of sessions. A repeated opening, with the secret of the open
    session, changes only its expiry. Otherwise every lease of the older session ends as lost, and the bot's kind and
    its resources are recorded. A bot is given no job before its first sync, which also wakes the queues that it could
    serve. Returns the sessions in the order of the openings.

    tries: a lease that cannot end now, as somebody holds a row or one is wrong, stays as it is, with the epoch of the
        older session: a sync of the new session ends it, or the end of that session. It then ends as lost, even if its
        bot was only cut off, because nothing tells that any more. What it has taken of the bot's resources stays in
        use. What was charged to jobs of a bot stays so if it cannot be taken back.
    """
    advisory.announce_sessions(connection)
    instances = _interned_instances(connection, openings)
    kinds = _interned_kinds(connection, openings)
    bots = _locked_bots(connection, [each.name for each in openings])
    found = {
        bot.name: OpenedSession(bot.id, int(bot.epoch), [])
        for bot, opening in ((bots[each.name], each) for each in openings)
        if bot.session == opening.session
    }
    if found:
        connection.execute(RENEW, {"ids": [each.bot_id for each in found.values()], "ttl": ttl})
    new = [each for each in openings if each.name not in found]
    if not new:
        return [found[each.name] for each in openings]
    trials = Trials(connection) if tries else None
    _forgive(connection, [(bots[each.name].id, each) for each in new], trials)
    ended: dict[int, list[EndedAttempt]] = {}
    ends = {bots[each.name].id: _superseded(bots[each.name], each) for each in new if bots[each.name].held}
    for attempt in _end_all(connection, ends, trials=trials):
        ended.setdefault(attempt.bot_id, []).append(attempt)
    rows = connection.execute(
        OPEN,
        {
            "ids": [bots[each.name].id for each in new],
            "sessions": [each.session for each in new],
            "instances": [None if each.instance is None else instances[each.instance] for each in new],
            "pools": [each.pool for each in new],
            "labels": json_documents(list(each.labels) for each in new),
            "priorities": [each.priority for each in new],
            "capacities": [each.capacity for each in new],
            "bot_kinds": [kinds[_kind_key(each)] for each in new],
            "hosts": [each.host for each in new],
            "pids": [each.pid for each in new],
            "versions": [each.version for each in new],
            "graces": [each.kill_grace for each in new],
            "ttl": ttl,
        },
    ).all()
    found |= {row.name: OpenedSession(row.id, int(row.epoch), ended.get(row.id, [])) for row in rows}
    supplies = {bots[each.name].id: each.supply or {} for each in new if each.supply or bots[each.name].limited}
    declare_resources(connection, supplies, keeping={row.id for row in rows if row.held})
    if ended:
        wake(connection, "jobs")
    superseded = [str(bots[each.name].id) for each in new if bots[each.name].session is not None]
    if superseded:
        wake(connection, "bots", superseded)
    return [found[each.name] for each in openings]


def _superseded(bot: Row, opening: SessionOpening) -> _SessionEnd:
    """Return how the older session of the bot ends."""
    actor = f"bot:{opening.name}"
    if opening.dead is None or opening.dead != bot.session:
        return _SessionEnd(Verdict.LOST, actor, STARTED_ANEW, bot.expires_at)
    if opening.cut_off:
        return _SessionEnd(Verdict.RELEASED, actor, "its bot was cut off")
    return _SessionEnd(Verdict.LOST, actor, STARTED_ANEW)


def _forgive(connection: Connection, openings: Sequence[tuple[int, SessionOpening]], trials: Trials | None) -> None:
    """Take back what the expiry of sessions has charged, of bots that were only cut off.

    trials: the charges of a bot are left if they cannot be taken back now. None = all have to be.
    """

    def take_back(chosen: Sequence[tuple[int, SessionOpening]]) -> None:
        connection.execute(
            FORGIVE,
            {
                "bot_ids": [bot_id for bot_id, _ in chosen],
                "sessions": [each.dead for _, each in chosen],
                "actors": [f"bot:{each.name}" for _, each in chosen],
            },
        )

    cut_off = [(bot_id, each) for bot_id, each in openings if each.dead is not None and each.cut_off]
    if trials is None:
        if cut_off:
            take_back(cut_off)
    elif cut_off and trials.hindrance(partial(take_back, cut_off)) is not None:
        for each in cut_off:
            trials.hindrance(partial(take_back, [each]))


def _kind_key(opening: SessionOpening) -> tuple[str, str]:
    return json_documents([opening.properties]), json_documents([list(opening.exclusive)])


def _interned_kinds(connection: Connection, openings: Sequence[SessionOpening]) -> dict[tuple[str, str], int]:
    """Return the ids of the kinds of bots, by their properties and the exclusive ones among them."""
    wanted = {_kind_key(each): each for each in openings}
    keys = sorted(wanted)
    rows = connection.execute(
        INTERN_KINDS,
        {
            "properties": json_documents(wanted[key].properties for key in keys),
            "exclusive": json_documents(list(wanted[key].exclusive) for key in keys),
        },
    )
    return {keys[row.nth - 1]: row.id for row in rows}


def _interned_instances(connection: Connection, openings: Sequence[SessionOpening]) -> dict[str, int]:
    names = sorted({each.instance for each in openings if each.instance is not None})
    if not names:
        return {}
    return {row.name: row.id for row in connection.execute(INTERN_INSTANCES, {"names": names})}


def read_ends_of_older(connection: Connection, bot_ids: Sequence[int], *, ttl: float) -> dict[int, datetime]:
    """Return by bot id until when older sessions of these bots, of `ttl` seconds, may have lasted."""
    if not bot_ids:
        return {}
    return {row.id: row.at for row in connection.execute(OLDER_ENDED, {"ids": list(bot_ids), "ttl": ttl})}


def record_syncs(
    connection: Connection, words: Sequence[SyncUpdate], *, ttl: float
) -> Callable[[], Mapping[int, float]]:
    """Write the rows of bots after their calls, and renew their sessions, with the next statement.

    Returns a function that returns the seconds left of each, by bot id. This transaction has locked the rows by an
    earlier statement and has not written them.
    """
    if not words:
        return dict
    asked = connection.execute_later(
        RECORD_SYNCS,
        {
            "ids": [word.bot_id for word in words],
            "seqs": [word.seq for word in words],
            "states": [word.status for word in words],
            "capacities": [word.bot_capacity.capacity for word in words],
            "in_use": [word.bot_capacity.in_use for word in words],
            "held": [word.bot_capacity.held for word in words],
            "kept": [word.bot_capacity.kept for word in words],
            "ttl": ttl,
        },
    )
    return lambda: {bot_id: float(remaining) for bot_id, remaining in asked.result()}


def first_expiry(connection: Connection) -> float:
    """Return the seconds until the first of all sessions expires, below 0 once it has; infinity if there is no session.

    Reads every bot: no index has when sessions expire.
    """
    left = connection.execute(FIRST_EXPIRY).scalar_one()
    return math.inf if left is None else float(left)


def expire(
    connection: Connection, *, after: int, limit: int, actor: str, job_id: int | None = None
) -> tuple[list[int], list[EndedAttempt]]:
    """Close up to `limit` sessions that have expired, of bots with an id above `after`. Their attempts end as lost.

    job_id: end only this attempt of one bot. If others are left, its session is not closed, but is over for the bot.
    Returns the ids of the bots whose sessions were closed, and the ended attempts. Expiry is judged on the locked row.
    """
    found = connection.execute(EXPIRED, {"after": after, "limit": limit}).all()
    if not found:
        return [], []
    sessions = {row.id: row.session for row in found}
    bot_ids, lost = list(sessions), _SessionEnd(Verdict.LOST, actor, "its bot was lost")
    ended = _end_all(connection, dict.fromkeys(bot_ids, lost), only=job_id)
    if job_id is not None and found[0].held > len(ended):
        connection.execute(STOP_RENEWING, {"id": bot_ids.pop()})
    connection.execute(CLOSE, {"ids": bot_ids})
    wake(connection, "jobs")
    again = [attempt for attempt in ended if attempt.state == JobState.QUEUED]
    if again:
        connection.execute(
            RECORD_LOST,
            {
                "job_ids": [attempt.job_id for attempt in again],
                # The end has raised the fence by one.
                "fences": [attempt.fence - 1 for attempt in again],
                "bot_ids": [attempt.bot_id for attempt in again],
                "sessions": [sessions[attempt.bot_id] for attempt in again],
            },
        )
    return bot_ids, ended


def first_expired(connection: Connection, *, after: int) -> list[int]:
    """Return the id of the first bot above `after` whose session has expired, locked or not."""
    return [*connection.execute(FIRST_EXPIRED, {"after": after}).scalars()]


def follow_clock(connection: Connection, *, back: float, longest: float) -> None:
    """The clock was set back by at least `back` seconds: let the sessions that were renewed before end so much earlier.
    These are all that would end in more than `longest` seconds, which must be more than any session lasts."""
    connection.execute(FOLLOW_CLOCK, {"back": back, "longest": longest})


def held_jobs(connection: Connection, *, bot_id: int) -> list[int]:
    """Return the ids of the jobs that the bot holds leases for, in order."""
    return sorted(row.job_id for row in connection.execute(HELD_BY, {"bot_ids": [bot_id]}))


def close(connection: Connection, bot_id: int, *, keeps_leases: bool) -> None:
    """End the session of a bot that leaves. The caller has locked the bot, and ended its leases.

    keeps_leases: some of them cannot end now. Then the session is over for the bot, and is closed when it expires:
        these leases end as lost, although the bot has given them back.
    """
    connection.execute(STOP_RENEWING if keeps_leases else CLOSE, {"id": bot_id, "ids": [bot_id]})
    wake(connection, "jobs")


def close_overdue(connection: Connection, limit: int) -> list[str]:
    """Stop renewing the sessions of bots that ignore a stop. Returns their names.

    Such a session ends when it expires. Until then the bot may still run the job, so that it is not queued again
    before.
    """
    return [row.name for row in connection.execute(CLOSE_OVERDUE, {"limit": limit})]


def drain(
    connection: Connection, name: str, *, draining: bool, actor: str, reason: str, deadline: float | None = None
) -> None:
    """Stop giving jobs to the bot, or end that. Raises NotFound.

    deadline: seconds after which its running jobs are asked to stop; None = never.
    """
    bot = connection.execute(DRAIN, {"name": name, "draining": draining, "deadline": deadline}).one_or_none()
    if bot is None:
        raise NotFound(f"bot: no bot '{escaped(name, 63)}'")
    action = "drain" if draining else "undrain"
    details = {"reason": reason} | ({"deadline": deadline} if deadline is not None else {})
    audit.write(connection, action, actor=actor, subject=f"bot:{name}", details=details)
    if not draining:
        wake_queues_for_bots(connection, {bot.id: bot.room})
    wake(connection, "bots", [str(bot.id)])
    wake(connection, "jobs")


def _locked_bots(connection: Connection, names: Sequence[str]) -> dict[str, Row]:
    """Lock the rows of the bots in the order of their ids, and return them by name.

    A row that retention deletes meanwhile is inserted again. If that comes to a deadlock, `Database.run` repeats the
    transaction.
    """
    found: dict[str, Row] = {}
    while missing := sorted(set(names) - found.keys()):
        connection.execute(INSERT_BOTS, {"names": missing})
        found |= {row.name: row for row in connection.execute(LOCK, {"names": missing, "resources": list(RESOURCES)})}
    return found


def _end_all(
    connection: Connection,
    ends: Mapping[int, _SessionEnd],
    *,
    only: int | None = None,
    trials: Trials | None = None,
) -> list[EndedAttempt]:
    """End the leases of bots, given by bot id; `only` that of this job, None = all.

    trials: leases that cannot be ended now are left. None = all have to be.
    """
    if not ends:
        return []
    held = connection.execute(HELD_BY, {"bot_ids": list(ends)}).all()
    endings = [
        AttemptEnd(row.job_id, row.fence, row.bot_id, row.bot_epoch, each.verdict, _told(each))
        for row, each in ((row, ends[row.bot_id]) for row in held)
        if only in (None, row.job_id)
    ]
    held_until = {bot_id: each.hold_until for bot_id, each in ends.items() if each.hold_until is not None}

    def ended(chosen: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        return end(connection, chosen, actor=[ends[one.bot_id].actor for one in chosen], hold_until=held_until)

    endings = limit_spared(connection, endings)
    if trials is None:
        return ended(endings)
    return _ended_if_possible(trials, endings, {row.job_id: (row.cohort, row.instance) for row in held}, ended)


def _ended_if_possible(
    trials: Trials,
    endings: Sequence[AttemptEnd],
    quotas: Mapping[int, Quota],
    end_all: Callable[[Sequence[AttemptEnd]], Sequence[EndedAttempt]],
) -> list[EndedAttempt]:
    """Make those of the ends that can be made now: all of a bot together, and each alone only if that fails.

    quotas: those that they need, by job.
    """
    found, by_bot = list[EndedAttempt](), dict[int, list[AttemptEnd]]()
    for ending in endings:
        by_bot.setdefault(ending.bot_id, []).append(ending)

    def hindrance(chosen: Sequence[AttemptEnd]) -> Exception | None:
        needed, ended = {quotas[each.job_id] for each in chosen}, list[EndedAttempt]()
        quota = needed.pop() if len(needed) == 1 else None
        error = trials.hindrance(lambda: ended.extend(end_all(chosen)), quota=quota)
        found.extend(ended if error is None else ())
        return error

    for of_bot in by_bot.values():
        own = [ending for ending in of_bot if quotas[ending.job_id] not in trials.held]
        if own and hindrance(own) is not None and len(own) > 1:
            for each in own:
                hindrance([each])
    return found


def _told(session_end: _SessionEnd) -> dict[str, Any]:
    return {"reason": session_end.reason} | ({"spared": True} if session_end.verdict is Verdict.RELEASED else {})


def limit_spared(connection: Connection, endings: Sequence[AttemptEnd]) -> list[AttemptEnd]:
    """Return the endings; those whose details say `spared`, of jobs that were spared ten times before, end as lost."""
    asked = [ending.job_id for ending in endings if ending.details.get("spared")]
    if not asked:
        return list(endings)
    worn_out = set(connection.execute(WORN_OUT, {"job_ids": asked}).scalars())
    return [
        ending._replace(verdict=Verdict.LOST, details={"reason": ending.details["reason"]})
        if ending.details.get("spared") and ending.job_id in worn_out
        else ending
        for ending in endings
    ]


def renew(
    connection: Connection, held: Iterable[tuple[int, int]], *, ttl: float, below: float = HELD_RENEWED_BELOW
) -> set[tuple[int, int]]:
    """Renew the sessions of bots whose calls are held, given as (bot id, epoch); returns those that were renewed.

    Renewed are sessions that have less than the part `below` of their `ttl` seconds left, are not closing and have not
    been superseded. Bots whose rows others have locked are skipped.
    """
    found = sorted(held)
    parameters = {"ids": [bot for bot, _ in found], "epochs": [epoch for _, epoch in found], "ttl": ttl}
    parameters["below"] = below
    return {(row.id, int(row.epoch)) for row in connection.execute(RENEW_HELD, parameters)}
