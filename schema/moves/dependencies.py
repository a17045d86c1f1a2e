"""blocked -> queued: unblock, and blocked -> cancelled: cancel, when what a node of a graph waits for ends.

Every move that ends jobs calls `unblock` in its transaction, after all that it locks itself. Each edge is walked once,
when its parent ends. An edge is met if the parent succeeded, or if it says `run`; of a parent that ended otherwise,
`block` leaves the child blocked for ever, and `cancel` cancels it, and with it what depends on it by such edges.

A callback is a node that waits for all others of its graph. When the last of them has ended it is told how many
succeeded, failed and were cancelled. One that runs if a node fails is cancelled if none did.

Rows of nodes come last in the order of locks and are taken in one go, sorted by job. Jobs are locked by then, so that
those of children are taken only if nobody else has them: what is left is due, and upkeep's.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import structlog

from schema.accounting.held_rows import move_rows
from schema.graphs import UPSTREAM
from schema.postgres.connection import Connection
from schema.postgres.fragments import stored_seconds
from schema.postgres.statements import Statement

log = structlog.get_logger()

#: Whether there is a graph that is not over, true or null: the column with which a statement that ends jobs asks for
#: `unblock`. From the newest on, for those that are over may still stand in the index.
ANY_OPEN_GRAPH = "(SELECT true FROM graphs WHERE finished_at IS NULL ORDER BY id DESC LIMIT 1)"

# Nodes that end now, those that are cancelled with them, however deep they lie, and the rest of what is due.
_ENDING = """
told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:ids AS bigint[]), CAST(:states AS text[])) AS t (job_id, state)
), ended AS MATERIALIZED (
    SELECT t.job_id, t.state FROM told t
    CROSS JOIN LATERAL (SELECT FROM graph_nodes n WHERE n.job_id = t.job_id AND n.outcome IS NULL OFFSET 0) n
), due AS MATERIALIZED (
    SELECT n.job_id, n.pending_deps FROM unnest(CAST(:due AS bigint[])) AS t (job_id)
    CROSS JOIN LATERAL (
        SELECT * FROM graph_nodes n WHERE n.job_id = t.job_id AND n.due AND n.outcome IS NULL OFFSET 0) n
), doomed AS (
    (SELECT job_id FROM due WHERE pending_deps > 0
     UNION
     SELECT e.child FROM ended p
     CROSS JOIN LATERAL (SELECT * FROM graph_edges WHERE parent = p.job_id OFFSET 0) e
     CROSS JOIN LATERAL (SELECT FROM graph_nodes WHERE job_id = e.child AND outcome IS NULL OFFSET 0) n
     WHERE p.state <> 'succeeded' AND e.on_failure = 'cancel')
    UNION
    SELECT e.child FROM doomed p
    CROSS JOIN LATERAL (SELECT * FROM graph_edges WHERE parent = p.job_id OFFSET 0) e
    CROSS JOIN LATERAL (SELECT FROM graph_nodes WHERE job_id = e.child AND outcome IS NULL OFFSET 0) n
    WHERE e.on_failure = 'cancel'
)"""

LOCK = Statement(f"""
WITH RECURSIVE {_ENDING}, over AS MATERIALIZED (
    SELECT job_id FROM ended UNION SELECT job_id FROM doomed
), touched AS MATERIALIZED (
    SELECT job_id FROM over UNION SELECT job_id FROM due UNION
    SELECT e.child FROM over o CROSS JOIN LATERAL (SELECT child FROM graph_edges WHERE parent = o.job_id OFFSET 0) e
)
SELECT job_id, (SELECT count(*) FROM touched) AS touched FROM graph_nodes
WHERE job_id = ANY (ARRAY(SELECT job_id FROM touched)) ORDER BY job_id FOR NO KEY UPDATE
""")

# One statement, because each part counts on what those before it have locked and decided. It works on the locked nodes,
# whose counters nobody changes any more. A job that somebody else has locked stays as it is. Ids
# go into each update as one array, which leaves the planner nothing but the primary key.
UNBLOCK = Statement(f"""
WITH RECURSIVE {_ENDING}, stopped AS MATERIALIZED (
    SELECT id, public_id, fence FROM jobs
    WHERE id = ANY (ARRAY(SELECT job_id FROM doomed)) AND state = 'blocked'
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), over AS MATERIALIZED (
    SELECT job_id, state FROM ended UNION ALL SELECT id, 'cancelled' FROM stopped
), walked AS MATERIALIZED (
    SELECT e.child AS job_id, o.state = 'succeeded' OR e.on_failure = 'run' AS met
    FROM over o CROSS JOIN LATERAL (
        SELECT child, on_failure FROM graph_edges WHERE parent = o.job_id AND NOT passed OFFSET 0) e
), changed AS MATERIALIZED (
    SELECT job_id, max(outcome) AS outcome, sum(met)::integer AS met, sum(unmet)::integer AS unmet FROM (
        SELECT job_id, state AS outcome, 0 AS met, 0 AS unmet FROM over
        UNION ALL SELECT job_id, NULL, met::integer, (NOT met)::integer FROM walked
        UNION ALL SELECT job_id, NULL, 0, 0 FROM due) each GROUP BY job_id
), judged AS MATERIALIZED (
    SELECT c.*, n.pending_deps - c.met AS pending, coalesce(c.outcome, n.outcome) IS NULL AS waits,
        n.queue_timeout_seconds, n.schedule_after, n.delay, n.graph, n.callback, t.succeeded, t.failed, t.cancelled,
        coalesce(n.callback = 'failed', false) AND t.failed + t.cancelled = 0 AS needless
    FROM changed c CROSS JOIN LATERAL (SELECT * FROM graph_nodes WHERE job_id = c.job_id OFFSET 0) n
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE ends.state = 'succeeded') AS succeeded,
            count(*) FILTER (WHERE ends.state IN ('failed', 'dead')) AS failed,
            count(*) FILTER (WHERE ends.state = 'cancelled') AS cancelled
        FROM (SELECT coalesce(o.state, p.outcome) AS state FROM graph_edges e
              CROSS JOIN LATERAL (SELECT outcome FROM graph_nodes WHERE job_id = e.parent OFFSET 0) p
              LEFT JOIN over o ON o.job_id = e.parent
              -- Not for each end of one of thousands of jobs, but once, at the last.
              WHERE e.child = c.job_id AND n.callback IS NOT NULL AND n.pending_deps = c.met) ends
    ) t
), needless AS MATERIALIZED (
    SELECT id, public_id, fence FROM jobs
    WHERE id = ANY (ARRAY(SELECT job_id FROM judged WHERE waits AND pending = 0 AND needless)) AND state = 'blocked'
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), freed AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE id = ANY (ARRAY(SELECT job_id FROM judged WHERE waits AND pending = 0 AND NOT needless)) AND state = 'blocked'
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), counted AS (
    UPDATE graph_nodes n SET
        outcome = coalesce(n.outcome, j.outcome, (SELECT 'cancelled' FROM needless WHERE id = j.job_id)),
        pending_deps = j.pending,
        dead_ends = n.dead_ends + j.unmet,
        due = j.waits AND (j.pending = 0 OR j.job_id IN (SELECT job_id FROM doomed))
            AND j.job_id NOT IN (SELECT id FROM freed UNION ALL SELECT id FROM needless)
    FROM judged j WHERE n.job_id = ANY (ARRAY(SELECT job_id FROM judged)) AND n.job_id = j.job_id
    RETURNING n.due, j.waits AND j.unmet > 0 AS stuck, n.graph, n.node_no, j.job_id,
        coalesce(j.outcome, (SELECT 'cancelled' FROM needless WHERE id = j.job_id)) AS outcome
), queued AS (
    UPDATE jobs j SET state = 'queued', queued_at = s.starts_at, cohort = cohort_of(j.label),
        queue = queue_in_cohort(j.queue, cohort_of(j.label)), schedule_after = nullif(s.starts_at, s.at),
        queue_deadline = s.starts_at + {stored_seconds("w.queue_timeout_seconds")}
    FROM judged w CROSS JOIN LATERAL (SELECT clock_timestamp() AS at OFFSET 0) released
    CROSS JOIN LATERAL (
        SELECT released.at, greatest(released.at, w.schedule_after, released.at + {stored_seconds("w.delay")})
            AS starts_at OFFSET 0) s
    WHERE j.id = ANY (ARRAY(SELECT id FROM freed)) AND w.job_id = j.id
    RETURNING j.id, j.fence
), informed AS (
    UPDATE job_payloads p SET payload = p.payload || jsonb_build_object('env', coalesce(p.payload->'env', '{{}}')
        || jsonb_build_object('LEASEHOLD_GRAPH', g.public_id::text, 'LEASEHOLD_GRAPH_SUCCEEDED', w.succeeded::text,
            'LEASEHOLD_GRAPH_FAILED', w.failed::text, 'LEASEHOLD_GRAPH_CANCELLED', w.cancelled::text))
    FROM judged w CROSS JOIN LATERAL (SELECT public_id FROM graphs WHERE id = w.graph OFFSET 0) g
    WHERE p.job_id = ANY (ARRAY(SELECT f.id FROM freed f JOIN judged c ON c.job_id = f.id AND c.callback IS NOT NULL))
        AND w.job_id = p.job_id
), cancelled AS (
    UPDATE jobs j SET state = 'cancelled', finished_at = clock_timestamp(),
        reason = '{UPSTREAM}'
    WHERE j.id = ANY (ARRAY(SELECT id FROM stopped))
), left_out AS (
    UPDATE jobs j SET state = 'cancelled', finished_at = clock_timestamp(),
        reason = 'cancelled: no job that the callback waits for failed'
    WHERE j.id = ANY (ARRAY(SELECT id FROM needless))
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'unblock', 'blocked', 'queued', fence, 'graph' FROM queued
    UNION ALL
    SELECT id, 'cancel', 'blocked', 'cancelled', fence, 'graph'
    FROM (SELECT id, fence FROM stopped UNION ALL SELECT id, fence FROM needless) gone
), events AS (
    SELECT g.public_id, c.node_no, c.outcome FROM counted c JOIN graphs g ON g.id = c.graph
    WHERE c.outcome IS NOT NULL OR c.job_id IN (SELECT id FROM freed)
), told_waiting AS (
    SELECT wake('jobs') FROM queued HAVING count(*) > 0
), told_done AS (
    SELECT wake('done', string_agg(public_id::text, ','))
    FROM (SELECT public_id FROM stopped UNION ALL SELECT public_id FROM needless) gone HAVING count(*) > 0
)
SELECT (SELECT count(*) FROM queued) AS queued,
    (SELECT count(*) FROM stopped) + (SELECT count(*) FROM needless) AS cancelled,
    (SELECT count(*) FROM counted WHERE stuck) AS stuck, (SELECT count(*) FROM counted WHERE due) AS due,
    (SELECT count(*) FROM told_waiting) + (SELECT count(*) FROM told_done) AS woken,
    (SELECT jsonb_agg(jsonb_build_array(public_id, node_no, outcome) ORDER BY outcome IS NULL, public_id, node_no)
     FROM events) AS events
""")

DEAD_ENDS = Statement("""
SELECT count(*) FROM (SELECT FROM graph_nodes WHERE dead_ends > 0 AND outcome IS NULL ORDER BY graph LIMIT :limit) stuck
""")
# Whoever has the whole table of jobs for himself waits for those who have written some, and they wait for nodes.
JOBS_FIRST = Statement("LOCK TABLE jobs IN ROW EXCLUSIVE MODE")
# Locked jobs are skipped while reading, so that those in front keep no others waiting.
DUE = Statement("""
SELECT n.job_id FROM graph_nodes n JOIN jobs j ON j.id = n.job_id
WHERE n.due AND n.outcome IS NULL ORDER BY n.job_id LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
""")


class UnblockResult(NamedTuple):
    """Nodes that were queued or cancelled, those that have got a parent which will never let them run, and those that
    are left to upkeep because somebody else has their jobs."""

    queued: int = 0
    cancelled: int = 0
    stuck: int = 0
    due: int = 0


def unblock(connection: Connection, ended: Mapping[int, str], *, due: Collection[int] = ()) -> UnblockResult:
    """Tell the nodes of graphs that wait for these jobs, given with their final states, that they have ended; each is
    told once. Jobs of no graph are passed over. `due` are nodes of which something was left to do.

    The log tells of it when the transaction commits, so that a repeated transaction is told once.
    """
    where = {"ids": list(ended), "states": list(ended.values()), "due": list(due)}
    locked, before = connection.execute(LOCK, where).all(), None
    # A node whose job was replaced by a retry while we waited for it has another id now. One that is not there at the
    # next look either has no row.
    while locked and len(locked) < locked[0].touched and locked != before:
        locked, before = connection.execute(LOCK, where).all(), locked
    if not locked:
        return UnblockResult()
    row = connection.execute(UNBLOCK, where).one()
    if row.events:
        connection.on_commit(lambda: _tell(row.events))
    return UnblockResult(row.queued, row.cancelled, row.stuck, row.due)


def _tell(events: Sequence[tuple[str, int, str | None]]) -> None:
    """Log which nodes have ended, and which are ready because of that."""
    for graph, node, outcome in events:
        if outcome is None:
            log.debug("leasehold.node_ready", graph=graph, node=node)
        else:
            log.debug("leasehold.node_completed", graph=graph, node=node, state=outcome)


def unblock_due(connection: Connection, limit: int, *, tries: bool = False) -> UnblockResult:
    """Do what was left to do for up to `limit` nodes.

    tries: what cannot be done now is left: a row that it needs is held, or wrong.
    """
    connection.execute(JOBS_FIRST)
    due = [row.job_id for row in connection.execute(DUE, {"limit": limit})]
    parts = move_rows(connection, due, lambda among: unblock(connection, {}, due=among), tries=tries)
    return UnblockResult(*map(sum, zip(*parts, strict=True)))


def count_dead_ends(connection: Connection, limit: int) -> int:
    """How many nodes, up to `limit`, have a dependency that can never be met."""
    return int(connection.execute(DEAD_ENDS, {"limit": limit}).scalar_one())
