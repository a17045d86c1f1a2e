"""queued -> leased: grant."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic_core import to_json

from schema.accounting.quotas import EVICTION_COOLDOWN, LIMIT, Cooldown
from schema.accounting.units import BotCapacity, ReturnedUnits
from schema.postgres import fragments
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_quota, newest_version
from schema.postgres.statements import Statement
from schema.predicates import DRAIN, HEALTHY, PAUSE, REQUIREMENTS, STATE, serves
from schema.states import LeaseState

#: The strategy of a lease for which preemption has freed the units (BuildGrid).
PREEMPTION = "preemption"

#: How the bot of a job with preferred properties was chosen: among the bots that offer them, or among all that offer
#: what the job requires. Decisions keep it as their `phase`.
PREFERRED, REQUIRED = "preferred", "required"

#: Amounts by counter name.
Amounts = Mapping[str, float]
NO_AMOUNTS: Mapping[int, Amounts] = MappingProxyType({})


class Placement(NamedTuple):
    """A chosen bot for a job. `decision` is stored with the lease and explains the choice later."""

    job_id: int
    bot_id: int
    decision: Mapping[str, Any]


class Granted(NamedTuple):
    """A lease that has begun."""

    job_id: int
    public_id: str
    bot_id: int
    fence: int
    units: int
    instance: int


class FetchedLease(NamedTuple):
    """A lease that has begun, with all that its bot needs to start it.

    instance: the name of the instance. timeout_seconds: of an attempt. payload, checkpoint: JSON; the checkpoint is the
    latest of the job, which an earlier attempt has left. The other fields are the same for every new lease of a job
    without constraints.
    """

    job_id: int
    public_id: str
    bot_id: int
    fence: int
    units: int
    instance_id: int
    instance: str
    attempts: int
    timeout_seconds: float | None
    payload: str
    checkpoint: str | None
    state: str = LeaseState.PENDING
    delivered: bool = True
    stop_reason: str | None = None
    gpus: Sequence[int] | None = None


# The statement that grants placements. Jobs and bots are looked up once and then changed at their places (ctid).
# Placements and quotas are brought together by sorting, because a join of two sets of unknown size might compare every
# pair.

#: The placements whose jobs are still queued. The caller has locked the jobs, so that they stay at their places.
_WANTED = f"""
    SELECT w.job_id, w.bot_id, w.actor, w.decision, w.taking, w.nth, j.ctid AS place, j.units, j.cohort, j.instance,
        i.pool, j.platform, j.fence AS last_fence, i.name AS instance_name
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:bot_ids AS bigint[]), CAST(:actors AS text[]),
                {fragments.json_array("decisions")}, CAST(:taking AS integer[]))
        WITH ORDINALITY AS w (job_id, bot_id, actor, decision, taking, nth)
    CROSS JOIN LATERAL (
        SELECT ctid, units, cohort, instance, platform, fence FROM jobs
        WHERE id = w.job_id AND {STATE.of(job="jobs")} AND {PAUSE.of(job="jobs")} OFFSET 0) j
    JOIN instances i ON i.id = j.instance AND {DRAIN.of(instance="i")}"""

#: The bots, with what they have left. A bot on probation has room for one lease alone.
_ROOM = """
    SELECT b.id, b.epoch, b.cohort, b.instance, b.pool, b.kind,
        coalesce(r.unused, b.capacity - b.in_use) AS free, coalesce(r.kept, b.kept_units) AS kept, b.kept_for,
        b.probation_until IS NULL AS trusted, b.ctid
    FROM unnest(CAST(:rooms AS bigint[]), CAST(:unused AS integer[]), CAST(:kept AS integer[])) AS r (id, unused, kept)
    CROSS JOIN LATERAL {bot}
    WHERE b.probation_until IS NULL OR coalesce(r.unused, b.capacity - b.in_use) = b.capacity"""
# Bots are locked after jobs, out of order, hence SKIP LOCKED. The last condition drops a bot with a version that the
# statement does not see and so could not change. Such a bot stays locked until the transaction ends.
_LOCKED_BOT = f"""{newest_version("bots", "id", "r.id", columns="ctid")} seen
    JOIN LATERAL (
        SELECT *, ctid FROM bots WHERE ctid = seen.ctid AND {HEALTHY.of(bot="")} FOR NO KEY UPDATE SKIP LOCKED) b
        ON b.ctid = seen.ctid"""
_BOT_OF_CALLER = f"{newest_version('bots', 'id', 'r.id', columns='*, ctid')} b"

#: The placements whose bot may have the job, each with the units of those on its bot up to it. The row of the bot
#: decides, because a new session may have changed its properties or its instance since it was chosen. Only placements
#: on kept units use what a bot keeps for an instance (`own_units`), and only once all of it is free.
_FILLED = f"""
    SELECT w.*, r.epoch, r.free, r.kept, r.trusted, sum(w.units) OVER upto AS upto, own.units AS own_units,
        sum(own.units) OVER upto AS own_upto
    FROM wanted w JOIN room r ON r.id = w.bot_id AND r.cohort = w.cohort
        AND {serves("r", "w")}{{offers}}
    CROSS JOIN LATERAL (
        SELECT CASE WHEN {{on_kept}} AND r.kept_for = w.instance AND r.kept <= r.free
            THEN w.units ELSE 0 END) own (units)
    WINDOW upto AS (PARTITION BY w.bot_id ORDER BY w.nth)"""

#: Those that fit into the room of their bot, which takes them in the given order.
_SEATED = """
    SELECT f.*, greatest(least(f.own_units, f.kept + f.own_units - f.own_upto), 0) AS taken_of_kept FROM filled f
    WHERE f.upto + greatest(f.kept - f.own_upto, 0) <= f.free AND (f.trusted OR f.upto = f.units)"""

#: Those that fit into the quotas of their instances (`fits`), which take them in the given order too.
_WITHIN = """
    SELECT w.*, CASE WHEN bool_or(busy) OVER quota IS NULL THEN true WHEN bool_or(busy) OVER quota THEN false
        WHEN max(headroom) OVER quota IS NULL THEN true
        ELSE sum(units) OVER upto <= max(headroom) OVER quota END AS fits
    FROM weighed w
    WINDOW quota AS (PARTITION BY cohort, instance), upto AS (PARTITION BY cohort, instance ORDER BY nth)"""
#: The same if no quota has to be looked at: the units are among those that ended leases of this transaction have
#: returned, and that quotas still count as used.
_COVERED = """
    SELECT *, true AS fits FROM seated"""


def _quota_steps(*, again: bool) -> dict[str, str]:
    """The steps from `seated` to `within`: the instances that have a quota, their quotas, locked in the order of locks,
    what these leave, and the placements beside it."""
    lock = f"FOR NO KEY UPDATE {'SKIP LOCKED' if again else ''}"
    return {
        "limited AS MATERIALIZED": f"""
    SELECT d.cohort, d.instance FROM (SELECT DISTINCT cohort, instance FROM seated) d
    CROSS JOIN LATERAL {newest_quota("d", columns="usage")} q ORDER BY d.cohort, d.instance""",
        "allowed AS MATERIALIZED": f"""
    SELECT d.cohort, d.instance, q.min_quota, q.max_quota, q.usage FROM limited d
    LEFT JOIN LATERAL {newest_quota("d", columns="min_quota, max_quota, usage", lock=lock)} q ON true""",
        "left_over AS MATERIALIZED": f"""
    SELECT q.cohort, q.instance, q.usage IS NULL AS busy, {LIMIT} - q.usage AS headroom
    FROM (
        SELECT array_agg(cohort) AS cohorts, array_agg(instance) AS instances, array_agg(min_quota) AS minima,
            array_agg(max_quota) AS maxima, array_agg(usage) AS usages
        FROM allowed HAVING count(*) > 0) a
    CROSS JOIN LATERAL ROWS FROM (
        unnest(a.cohorts, a.instances, a.minima, a.maxima, a.usages),
        recent_evictions(a.cohorts, a.instances, :cooldown)
    ) AS q (cohort, instance, min_quota, max_quota, usage, evicted)""",
        "weighed AS MATERIALIZED": """
    SELECT cohort, instance, nth, place, bot_id, epoch, actor, decision, taking, units, taken_of_kept,
        last_fence, instance_name, CAST(NULL AS boolean) AS busy, CAST(NULL AS bigint) AS headroom FROM seated
    UNION ALL
    SELECT cohort, instance, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, busy, headroom
    FROM left_over""",
        "within AS MATERIALIZED": _WITHIN,
    }


#: Move the jobs. A fence is of the server's timeline, so that it never repeats after a failover, and of the last
#: restore; the sub-select reads both once.
_JOBS = f"""
    UPDATE jobs j SET state = 'leased',
        fence = greatest(j.fence + 1, (SELECT fences_from + first_fence() FROM server_identity)),
        attempts = j.attempts + 1, schedule_after = NULL, reason = NULL
    FROM within f
    WHERE j.ctid = f.place AND f.fits AND {STATE.of(job="j")}
    RETURNING j.id, j.public_id, j.cohort, j.instance, j.fence, j.units, f.bot_id, f.epoch, f.actor,
        f.decision, f.taking, f.taken_of_kept, f.nth, j.attempts, j.timeout_seconds, f.last_fence, f.instance_name"""
_LEASES = """
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, cohort, instance, units, assigner, strategy, due_at,
                        delivered_at, taken, granted_event, decision, policy)
    SELECT id, fence, bot_id, epoch, cohort, instance, units, actor,
        :strategy, now() + make_interval(secs => :ack), CASE WHEN NOT :tell THEN clock_timestamp() END,
        CAST(:takings AS jsonb) -> taking, nextval('stored_events_id_seq'), decision, CAST(:policy AS integer)
    FROM moved ORDER BY nth"""
_BOTS = """
    UPDATE bots b SET in_use = b.in_use + s.units, kept_units = b.kept_units - s.kept, held = b.held + s.leases
    FROM (SELECT r.ctid, sum(m.units) AS units, sum(m.taken_of_kept) AS kept, count(*) AS leases
          FROM moved m JOIN room r ON r.id = m.bot_id GROUP BY r.ctid) s
    WHERE b.ctid = s.ctid"""
_QUOTAS = """
    UPDATE quotas q SET usage = q.usage + s.units
    FROM (SELECT cohort, instance, sum(units) AS units FROM moved GROUP BY cohort, instance) s
    WHERE q.cohort = s.cohort AND q.instance = s.instance"""
#: Wake the calls of the bots.
_TOLD = """
    SELECT wake('bots', string_agg(DISTINCT bot_id::text, ',')) FROM moved WHERE :tell HAVING count(*) > 0"""

_GRANTED = "SELECT id, public_id::text, bot_id, fence, units, instance, (SELECT count(*) FROM told)"
# What the answer to the bot tells. Only a job that was granted before, and so had a fence, can have a checkpoint.
_FETCHED = """SELECT id, public_id::text, bot_id, fence, units, instance, instance_name, attempts, timeout_seconds,
    (SELECT payload::text FROM job_payloads WHERE job_id = id) AS payload,
    CASE WHEN last_fence > 0 THEN (SELECT checkpoint::text FROM job_checkpoints WHERE job_id = id) END AS checkpoint"""


def _grant(*, again: bool, held: bool = False, covered: bool = False) -> Statement:
    """`held`: the caller has locked the bots before it picked the jobs for them, knows what they have left, writes
    their rows and answers their calls. `covered`: quotas stay as they are."""
    offers = "" if held else f" AND {REQUIREMENTS.of(bot='r', want='w')}"
    steps = {
        "wanted AS MATERIALIZED": _WANTED,
        "room AS MATERIALIZED": _ROOM.format(bot=_BOT_OF_CALLER if held else _LOCKED_BOT),
        "filled AS MATERIALIZED": _FILLED.format(
            offers=offers, on_kept="false" if held else "CAST(:on_kept AS boolean)"
        ),
        "seated AS MATERIALIZED": _SEATED,
        **({"within AS MATERIALIZED": _COVERED} if covered else _quota_steps(again=again)),
        "moved AS": _JOBS,
        **({} if held else {"taken AS": _BOTS}),
        "leased AS": _LEASES,
        **({} if covered else {"counted AS": _QUOTAS}),
        **({} if held else {"told AS": _TOLD}),
    }
    parts = ", ".join(f"{name} ({query}\n)" for name, query in steps.items())
    return Statement(f"\nWITH {parts}\n{_FETCHED if held else _GRANTED} FROM moved\n")


GRANT = {again: _grant(again=again) for again in (False, True)}
GRANT_LOCKED = {covered: _grant(again=True, held=True, covered=covered) for covered in (False, True)}


def grant(
    connection: Connection,
    placements: Sequence[Placement],
    *,
    assigner: str | Sequence[str],
    strategy: str,
    ack: float,
    again: bool = False,
    cooldown: Cooldown = EVICTION_COOLDOWN,
    taken: Mapping[int, Amounts] = NO_AMOUNTS,
    on_kept: bool = False,
    policy: int | None = None,
) -> list[Granted]:
    """Grant the placements that are still possible and wake the calls of their bots; the others have lost a race, and
    their jobs are unchanged.

    A placement is possible if the bot is healthy, has room, may have the job and is not locked by another transaction,
    and if the quota of the job's instance allows it. The caller has locked the jobs.

    assigner: the name of who chose, one for all or one for each.
    ack: seconds within which the bot has to acknowledge.
    again: this transaction may hold locks on quotas. Then quotas that others have locked count as used up, because to
        wait for them out of order could deadlock.
    taken: amounts of counters that the leases of constrained jobs take, by job. The caller charges the counters.
    on_kept: the placements use units that bots keep for the instances of the jobs.
    policy: the version of the policy by which the caller works.
    """
    if not placements:
        return []
    values = {
        **_values(placements, assigner=assigner, strategy=strategy, ack=ack, notify=True, taken=taken),
        **cooldown.values(),
        "on_kept": on_kept,
        "policy": policy,
    }
    rooms = sorted(set(values["bot_ids"]))
    rows = connection.execute(GRANT[again], {**values, "rooms": rooms, "unused": [], "kept": []}).all()
    return [Granted._make(row[: len(Granted._fields)]) for row in rows]


def grant_locked(
    connection: Connection,
    placements: Sequence[Placement],
    capacities: Mapping[int, BotCapacity],
    returned: ReturnedUnits,
    *,
    cohort: int,
    wanted: Mapping[int, int],
    assigner: Sequence[str],
    strategy: str,
    ack: float,
    cooldown: Cooldown,
    policy: int | None = None,
) -> list[FetchedLease]:
    """Grant as `grant` does, with `again`, for bots of a cohort whose calls are being settled: the answers tell them.

    The caller has locked the bots, found them healthy, and writes their rows later. Since then it has picked jobs that
    the kinds of the bots can run, so that this is not checked again.

    capacities: what each of the bots has left; it is brought up to date.
    returned: units that the calls have returned, brought up to date. If they are enough, no quota is looked at: the
        caller has seen that none is near its maximum. Otherwise they are written first.
    wanted: the units of the placements, by instance.
    """
    if not placements:
        return []
    values = {
        **_values(placements, assigner=assigner, strategy=strategy, ack=ack, notify=False, taken=NO_AMOUNTS),
        **cooldown.values(),
        "policy": policy,
    }
    bots = sorted(set(values["bot_ids"]))
    left = {
        "unused": [capacities[bot_id].unused for bot_id in bots],
        "kept": [capacities[bot_id].kept for bot_id in bots],
    }
    covered = returned.covers({(cohort, instance): units for instance, units in wanted.items()})
    if not covered:
        returned.write(connection, before_grant=True)
    rows = connection.execute(GRANT_LOCKED[covered], {**values, **left, "rooms": bots}).all()
    fetched = [FetchedLease(*row) for row in rows]
    for lease in fetched:
        capacities[lease.bot_id].take(lease.units)
        if covered:
            returned.take(cohort, lease.instance_id, lease.units)
    return fetched


_LOCK = newest_version(
    "bots", "id", "w.id", columns="id", where=HEALTHY.of(bot=""), lock="FOR NO KEY UPDATE SKIP LOCKED"
)
LOCK = Statement(f"""
SELECT b.id FROM (SELECT DISTINCT id FROM unnest(CAST(:bot_ids AS bigint[])) AS w (id) ORDER BY id) w
CROSS JOIN LATERAL {_LOCK} b
""")


def lock_bots(connection: Connection, placements: Sequence[Placement]) -> list[Placement]:
    """Lock the bots of the placements as `grant` does, so that the caller can read first what they have declared.

    Returns the placements on bots that could be locked; the others are lost.
    """
    rows = connection.execute(LOCK, {"bot_ids": [placement.bot_id for placement in placements]})
    locked = {row.id for row in rows.all()}
    return [placement for placement in placements if placement.bot_id in locked]


def _values(
    placements: Sequence[Placement],
    *,
    assigner: str | Sequence[str],
    strategy: str,
    ack: float,
    notify: bool,
    taken: Mapping[int, Amounts],
) -> dict[str, Any]:
    # Jobs of one queue take the same amounts, mostly as one object. Each object is sent once. What is not in the list,
    # `unnest` fills up with nulls.
    different: dict[int, tuple[int, Amounts]] = {}
    taking: list[int | None] = []
    for placement in placements if taken else ():
        amounts = taken.get(placement.job_id)
        taking.append(None if amounts is None else different.setdefault(id(amounts), (len(different), amounts))[0])
    return {
        "taking": taking,
        "takings": to_json([amounts for _, amounts in different.values()]).decode(),
        "job_ids": [placement.job_id for placement in placements],
        "bot_ids": [placement.bot_id for placement in placements],
        "decisions": fragments.json_documents(placement.decision for placement in placements),
        "actors": [assigner] * len(placements) if isinstance(assigner, str) else list(assigner),
        "strategy": strategy,
        "ack": ack,
        "tell": notify,
    }
