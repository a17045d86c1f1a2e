"""queued -> dead, for jobs that nobody started in time; leased, running -> (asked to stop), for what ran too long.

Times that a request gives, and the ceilings of operators: of a queue age, and of a run time.
"""

from collections.abc import Sequence

from leasehold.states import JobState

from schema.accounting.held_rows import move_rows
from schema.moves.dependencies import ANY_OPEN_GRAPH, unblock
from schema.postgres.connection import Connection
from schema.postgres.fragments import kill_seconds, newest_leases
from schema.postgres.statements import Statement
from schema.predicates import ready_in

#: The condition of a job that has waited too long.
LATE = "state = 'queued' AND queue_deadline IS NOT NULL AND queue_deadline < now()"
# Judged on the locked rows: what somebody else is about to grant, to park or to cancel is left to them.
FIND_LATE = Statement(f"""
SELECT id FROM jobs WHERE {LATE} ORDER BY queue_deadline LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")
_GIVE_UP = """
WITH moved AS (
    UPDATE jobs j SET state = 'dead', finished_at = clock_timestamp(), schedule_after = NULL, reason = '{reason}'
    WHERE j.id = ANY (CAST(:ids AS bigint[])) AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.fence, j.queue_deadline, j.instance, j.label
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT m.id, 'time_out', 'queued', 'dead', m.fence, :actor, {details}
), done AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM moved HAVING count(*) > 0
)
SELECT id, {graphs} AS graphs, (SELECT count(*) FROM done) FROM moved
"""
GIVE_UP_LATE = Statement(
    _GIVE_UP.format(
        reason="waited longer than its queue timeout",
        details="jsonb_build_object('queue_deadline', m.queue_deadline) FROM moved m",
        graphs=ANY_OPEN_GRAPH,
    )
)


def time_out(connection: Connection, limit: int, *, actor: str, tries: bool = False) -> int:
    """Give up on up to `limit` jobs that have been queued beyond their deadline; returns how many.

    A job that has been started once has no deadline any more, and a parked one is not queued. Rows that somebody else
    has locked are left for the next time. tries: see `_given_up`.
    """
    late = [row.id for row in connection.execute(FIND_LATE, {"limit": limit})]
    return _given_up(connection, GIVE_UP_LATE, late, actor=actor, tries=tries)


def _given_up(connection: Connection, statement: Statement, ids: Sequence[int], *, actor: str, tries: bool) -> int:
    """Give up on these jobs, which are locked; returns how many.

    tries: what cannot be moved now is left: a row that it needs is held, or wrong, such as that of a node that waits
    for it.
    """

    def give_up(among: Sequence[int]) -> int:
        rows = connection.execute(statement, {"ids": list(among), "actor": actor}).all()
        if rows and rows[0].graphs:
            unblock(connection, {row.id: JobState.DEAD.value for row in rows})
        return len(rows)

    return sum(move_rows(connection, ids, give_up, tries=tries))


# queued -> dead: what has waited longer than the ceiling of its queue age, whenever it was submitted.


#: The condition that job `w` has waited for longer than `{age}` seconds for its first start. The time in which it was
#: held aside does not count. A job that was started once has no such ceiling any more, as it has no queue timeout.
_AGED = """w.queued_at < now() - make_interval(secs => {age}) AND w.kills = 0
            AND (w.fence = 0 OR NOT EXISTS (SELECT FROM leases l WHERE l.job_id = w.id
                AND (l.acknowledged_at IS NOT NULL OR l.state = 'completed')))
            AND w.queued_at < now() - make_interval(secs => {age}) - make_interval(secs => (
                SELECT coalesce(sum((e.details->>'held_seconds')::double precision), 0) FROM stored_events e
                WHERE e.job_id = w.id AND e.move = 'release'))"""
# Ceilings of labels are judged by the index of waiting labels, all others queue by queue. A job that waits to be tried
# again is judged when it is ready again. Without ceilings, no queue is read. Locked jobs are skipped while reading, so
# that those in front keep no others waiting. What has changed since it was judged has another fence and is left alone.
FIND_AGED = Statement(f"""
WITH aged AS MATERIALIZED (
    SELECT w.id, w.fence FROM (
        SELECT q.id, q.constraint_set, min(c.max_queue_age) AS age
        FROM ceilings c JOIN queues q ON c.instance IS NULL OR q.instance = c.instance
        WHERE c.label IS NULL AND c.max_queue_age IS NOT NULL
            AND EXISTS (SELECT FROM ceilings WHERE max_queue_age IS NOT NULL)
        GROUP BY q.id, q.constraint_set) k
    CROSS JOIN LATERAL (
        SELECT w.id, w.fence FROM jobs w WHERE {ready_in("k")} AND {_AGED.format(age="k.age")}
        ORDER BY w.queue LIMIT :limit FOR NO KEY UPDATE OF w SKIP LOCKED) w
    UNION ALL
    SELECT w.id, w.fence FROM ceilings c
    CROSS JOIN LATERAL (
        SELECT w.id, w.fence FROM jobs w
        WHERE w.label = c.label AND w.label <> '' AND w.state = 'queued'
            AND (c.instance IS NULL OR w.instance = c.instance) AND {_AGED.format(age="c.max_queue_age")}
        LIMIT :limit FOR NO KEY UPDATE OF w SKIP LOCKED) w
    WHERE c.label IS NOT NULL AND c.max_queue_age IS NOT NULL
    LIMIT :limit
)
SELECT j.id FROM jobs j JOIN aged a ON a.id = j.id AND a.fence = j.fence WHERE j.state = 'queued'
""")
GIVE_UP_AGED = Statement(
    _GIVE_UP.format(
        reason="waited longer than the ceiling of its queue age",
        details="""jsonb_build_object('max_queue_age', c.max_queue_age)
    FROM moved m CROSS JOIN LATERAL ceiling_of(m.instance, m.label) c""",
        graphs=ANY_OPEN_GRAPH,
    )
)


def age_out(connection: Connection, limit: int, *, actor: str, tries: bool = False) -> int:
    """Give up on up to `limit` jobs that have waited longer than the ceiling of their queue age; returns how many.

    Rows that somebody else has locked are left for the next time. tries: see `_given_up`.
    """
    aged = [row.id for row in connection.execute(FIND_AGED, {"limit": limit})]
    return _given_up(connection, GIVE_UP_AGED, aged, actor=actor, tries=tries)


# leased, running -> (asked to stop) -> queued: what a bot or an instance still runs when its drain's time is over.


# The jobs are locked with their leases, so that the event names the state that the job is in. Both are taken without
# their bot, hence SKIP LOCKED.
_STOP = """
WITH late AS MATERIALIZED (
    SELECT j.id, j.state, l.fence, l.bot_id, jsonb_build_object({details}) AS details
    FROM leases l JOIN jobs j ON j.id = l.job_id AND j.fence = l.fence {of}
    WHERE l.state IN ('pending', 'active') AND j.state IN ('leased', 'running') AND {where}
    LIMIT :limit FOR NO KEY UPDATE OF j, l SKIP LOCKED
), asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = '{reason}',
        due_at = now() + make_interval(secs => :sync + {seconds})
    FROM late d WHERE l.job_id = d.id AND l.fence = d.fence
    RETURNING l.job_id, l.bot_id
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT d.id, '{reason}', d.state, d.state, d.fence, :actor, d.details
    FROM late d JOIN asked a ON a.job_id = d.id
), told AS (
    SELECT wake('bots', string_agg(DISTINCT bot_id::text, ',')) FROM asked HAVING count(*) > 0
)
SELECT count(*), (SELECT count(*) FROM told) FROM asked
"""


def _stop(reason: str, details: str, of: str, where: str) -> Statement:
    return Statement(_STOP.format(reason=reason, details=details, of=of, where=where, seconds=kill_seconds("l.bot_id")))


_DRAIN_IS_OVER = "d.draining AND d.drain_deadline IS NOT NULL AND d.drain_deadline < now()"
_GOING_ON = "state IN ('pending', 'active')"
_OF_BOTS = f"""SELECT n.job_id FROM bots d
    CROSS JOIN LATERAL {newest_leases("d.id", "d.held", columns="job_id, state")} n
    WHERE {_DRAIN_IS_OVER} AND d.held > 0 AND n.{_GOING_ON}"""
# No index has the instances of live leases, for each lease would pay for it. So such a drain reads all that run, once.
_OF_INSTANCES = f"""SELECT n.job_id FROM leases n JOIN instances d ON d.id = n.instance
    WHERE {_DRAIN_IS_OVER} AND n.{_GOING_ON}"""
_ANY_INSTANCE = f"EXISTS (SELECT FROM instances d WHERE {_DRAIN_IS_OVER})"
#: Whether anything is left for `stop_drained`, by the deadlines of drains.
ANY_DRAINED = f"""coalesce(
    ({_OF_BOTS} ORDER BY d.drain_deadline LIMIT 1),
    CASE WHEN {_ANY_INSTANCE} THEN ({_OF_INSTANCES} LIMIT 1) END) IS NOT NULL"""
# Arrays of ids leave the planner nothing but the leases of these jobs. They have all of them, so that locked ones are
# skipped before the limit.
STOP_OF_BOTS = _stop(
    "drain",
    "'drained', 'bot:' || b.name",
    "JOIN bots b ON b.id = l.bot_id",
    f"l.job_id = ANY (ARRAY({_OF_BOTS}))",
)
STOP_OF_INSTANCES = _stop(
    "drain",
    "'drained', 'instance:' || i.name",
    "JOIN instances i ON i.id = l.instance",
    f"l.job_id = ANY (ARRAY({_OF_INSTANCES}))",
)
ANY_INSTANCE_OVER = Statement(f"SELECT {_ANY_INSTANCE}")
#: Seconds after the deadline of an instance's drain by which every grant from before the drain has committed.
SERVED_AFTER = 600.0
# Else each round would read all leases that run until somebody ends the drain. Nothing starts while it lasts.
FORGET_SERVED = Statement(f"""
WITH served AS MATERIALIZED (
    SELECT d.id FROM instances d
    WHERE {_DRAIN_IS_OVER} AND d.drain_deadline < now() - make_interval(secs => :served_after)
        AND NOT EXISTS (SELECT FROM leases n WHERE n.instance = d.id AND n.{_GOING_ON})
    ORDER BY d.id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE instances SET drain_deadline = NULL WHERE id = ANY (ARRAY(SELECT id FROM served))
""")


def stop_drained(connection: Connection, limit: int, *, sync: float, actor: str) -> int:
    """Ask for up to `limit` leases of bots, and as many of instances, whose time to drain is over; returns how many.

    What is stopped goes back to the queue uncharged, once its bot confirms. The deadline of an instance is forgotten
    when nothing of it runs any more. `sync` is the bots' sync period in seconds.
    """
    values = {"limit": limit, "sync": sync, "actor": actor}
    asked = int(connection.execute(STOP_OF_BOTS, values).one()[0])
    if connection.execute(ANY_INSTANCE_OVER).scalar_one():
        asked += int(connection.execute(STOP_OF_INSTANCES, values).one()[0])
        connection.execute(FORGET_SERVED, {"served_after": SERVED_AFTER})
    return asked


# running -> (asked to stop) -> dead: what runs longer than the ceiling of its timeout, whenever it was submitted. A job
# whose own timeout keeps the ceiling is left to its bot, which stops it first.
ANY_CEILING = "EXISTS (SELECT FROM ceilings WHERE max_timeout IS NOT NULL)"
STOP_OVER_CEILING = _stop(
    "ceiling",
    "'max_timeout', c.max_timeout",
    "CROSS JOIN LATERAL ceiling_of(j.instance, j.label) c",
    f"{ANY_CEILING} AND l.state = 'active'"
    " AND (j.timeout_seconds IS NULL OR j.timeout_seconds > c.max_timeout)"
    " AND l.acknowledged_at < now() - make_interval(secs => c.max_timeout)",
)


def stop_over_ceiling(connection: Connection, limit: int, *, sync: float, actor: str) -> int:
    """Ask for up to `limit` leases that run longer than the ceiling of their timeout to stop; returns how many.

    The jobs are dead once their bots confirm. `sync` is the bots' sync period in seconds.
    """
    return int(connection.execute(STOP_OVER_CEILING, {"limit": limit, "sync": sync, "actor": actor}).one()[0])
