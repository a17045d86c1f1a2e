"""nothing -> queued or blocked: a graph of jobs is submitted, in the place of an older one of its name; its end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
from leasehold.errors import BadInput, Conflict
from leasehold.wire import escaped

from schema.accounting.held_rows import move_rows
from schema.moves.cancel import Cancelled, cancel
from schema.moves.submit import submitted_rows
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: What the function raises when nodes are not what a graph can be made of: a circle, a number twice, absent parents.
BAD_GRAPH = "LH002"

# The largest graphs take as long on a busy server as a client waits for an answer, and longer than a move may.
LONGER = 30.0
LONGER_TIMEOUT = Statement("""
SELECT set_config('statement_timeout', '30s', true) FROM pg_settings
WHERE name = 'statement_timeout' AND CAST(setting AS integer) BETWEEN 1 AND 30000
""")
# The function is the one implementation, for callers in SQL as well as for this one.
SUBMIT = Statement(
    "SELECT graph_id, public_id, created, same, replaced FROM submit_normal_graph(CAST(:request AS jsonb), :actor)"
)
MADE = Statement("SELECT name, nodes, edges, ready, missing FROM graphs WHERE id = :id")
NODES = Statement("""
SELECT n.node_no, j.public_id FROM graph_nodes n
CROSS JOIN LATERAL (SELECT public_id FROM jobs WHERE id = n.job_id OFFSET 0) j
WHERE n.graph = :id ORDER BY n.node_no
""")

LOCK = Statement("""
SELECT g.id, g.public_id, g.name, g.state FROM graphs g JOIN instances i ON i.id = g.instance
WHERE g.public_id = CAST(:id AS uuid)
    AND (CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))
FOR NO KEY UPDATE OF g
""")
#: Earlier than the end of any graph.
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)

GIVE_UP = Statement("UPDATE graphs SET state = 'cancelled' WHERE id = :id AND state = 'active'")

_GOING_ON = "j.state IN ('blocked', 'queued', 'parked', 'deferred', 'leased', 'running')"
UNFINISHED = Statement(f"""
SELECT j.public_id FROM graph_nodes n
CROSS JOIN LATERAL (SELECT * FROM jobs WHERE id = n.job_id OFFSET 0) j
WHERE n.graph = :id AND n.outcome IS NULL AND {_GOING_ON} ORDER BY j.id LIMIT :limit
""")
# What is left of graphs that were given up by somebody who did not cancel their jobs, and is not locked.
LEFT_OVER = Statement(f"""
SELECT j.public_id FROM graphs g
CROSS JOIN LATERAL (SELECT job_id FROM graph_nodes n WHERE n.graph = g.id AND n.outcome IS NULL OFFSET 0) n
JOIN jobs j ON j.id = n.job_id
WHERE g.finished_at IS NULL AND g.state IN ('replaced', 'cancelled') AND {_GOING_ON}
LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
""")
# Two statements: a retry that was committed before the lock may have opened nodes, which only a new snapshot shows.
_OVER = "NOT EXISTS (SELECT FROM graph_nodes n WHERE n.graph = g.id AND n.outcome IS NULL OFFSET 0)"
LOCK_FINISHED = Statement(f"""
SELECT g.id FROM graphs g WHERE g.finished_at IS NULL AND {_OVER}
ORDER BY g.id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")
FINISH = Statement(f"""
UPDATE graphs g SET finished_at = clock_timestamp(), state = CASE state WHEN 'active' THEN 'finished' ELSE state END
WHERE g.id = ANY (CAST(:ids AS bigint[])) AND {_OVER}
""")
# One graph at a time, with all its nodes and edges, once none of its jobs is kept any more. The results of its nodes go
# with these (`forget_results`). A page of graphs is looked at, so that those which are kept for their failed jobs are
# not read again and again in front of others.
DELETE_GRAPH = Statement("""
WITH page AS MATERIALIZED (
    SELECT id, finished_at FROM graphs
    WHERE finished_at IS NOT NULL AND finished_at < now() - make_interval(secs => :age) AND finished_at > :after
    ORDER BY finished_at LIMIT :limit
), old AS MATERIALIZED (
    SELECT g.id FROM page p JOIN graphs g ON g.id = p.id
    WHERE NOT EXISTS (
        SELECT FROM graph_nodes n CROSS JOIN LATERAL (SELECT FROM jobs j WHERE j.id = n.job_id OFFSET 0) j
        WHERE n.graph = g.id OFFSET 0)
    ORDER BY p.finished_at LIMIT 1 FOR UPDATE OF g SKIP LOCKED
), nodes AS (
    DELETE FROM graph_nodes WHERE graph = ANY (ARRAY(SELECT id FROM old)) RETURNING job_id
), edges AS (
    DELETE FROM graph_edges WHERE parent = ANY (ARRAY(SELECT job_id FROM nodes))
), gone AS (
    DELETE FROM graphs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING finished_at
)
SELECT (SELECT finished_at FROM gone) AS deleted, (SELECT count(*) FROM page) AS looked,
    (SELECT max(finished_at) FROM page) AS last
""")


@dataclass(frozen=True)
class SubmittedGraph:
    """One accepted graph; `created` is false if its key had been used before by an equal request.

    `jobs` are the public ids of the nodes' jobs by their numbers, as far as they are still kept; `ready` so many of
    them waited for nothing; `missing` are the numbers that nodes depend on and no node has.
    `replaced` are the jobs of an older graph of that name which were cancelled or asked to stop, None without one.
    """

    graph_id: int
    public_id: str
    name: str
    created: bool
    jobs: Mapping[int, str]
    edges: int
    ready: int
    missing: Sequence[int]
    replaced: int | None


@dataclass(frozen=True)
class CancelledGraph:
    """What a cancel found: the state afterwards, and how many jobs it cancelled or asked to stop."""

    public_id: str
    name: str
    state: str
    jobs: int


def allow_longer(connection: Connection) -> None:
    """Let the statements of this transaction take up to `LONGER` seconds, unless the server has set no limit."""
    connection.execute(LONGER_TIMEOUT)
    connection.allow(LONGER)


def submit_graph(connection: Connection, request: Mapping[str, Any], *, sync: float, actor: str) -> SubmittedGraph:
    """Take a whole graph, or nothing. What depends on nothing is queued, the other nodes are blocked.

    `request` holds name, nodes and optionally instance, key, priority, on_failure, on_phantom and fair_share. A node
    has its number `node`, the numbers it comes `after`, payload, and what else a job may have but for instance, key and
    dedup_key. An unfinished graph of the same name in the instance is replaced: what waits is cancelled, what runs is
    asked to stop.
    Raises BadInput for a circle, a number twice, or absent parents with `on_phantom` reject; Conflict `key_reused`
    for a key that was used with another content; QueueFull. `sync` is the bots' sync period in seconds.
    """
    allow_longer(connection)
    try:
        values = {"request": json.dumps(request), "actor": actor}
        (row,) = submitted_rows(connection, SUBMIT, values, requests=request["nodes"], place="nodes")
    except psycopg.Error as error:
        if error.sqlstate == BAD_GRAPH:
            raise BadInput("nodes", error.diag.message_primary or "") from None
        raise
    if not row.same:
        key = escaped(str(request.get("key")), 80)
        raise Conflict("key_reused", f"key: '{key}' was used before for a different graph")
    replaced = None if row.replaced is None else _stop(connection, row.replaced, sync=sync, actor=actor)
    made = connection.execute(MADE, {"id": row.graph_id}).one()
    jobs = {node.node_no: str(node.public_id) for node in connection.execute(NODES, {"id": row.graph_id})}
    return SubmittedGraph(
        row.graph_id,
        str(row.public_id),
        made.name,
        row.created,
        jobs,
        made.edges,
        made.ready,
        tuple(made.missing),
        replaced,
    )


def cancel_graph(
    connection: Connection, public_id: str, *, instances: Sequence[str] | None, sync: float, actor: str
) -> CancelledGraph | None:
    """Cancel what waits in the graph and ask bots to stop what runs; None if there is none to see. Once is as good as
    several times, and a graph that is over stays what it is."""
    allow_longer(connection)
    where = {"id": public_id, "instances": None if instances is None else list(instances)}
    graph = connection.execute(LOCK, where).one_or_none()
    if graph is None:
        return None
    connection.execute(GIVE_UP, {"id": graph.id})
    jobs = _stop(connection, graph.id, sync=sync, actor=actor)
    return CancelledGraph(public_id, graph.name, "cancelled" if graph.state == "active" else graph.state, jobs)


def cancel_left_over(connection: Connection, limit: int, *, sync: float, actor: str, tries: bool = False) -> int:
    """Cancel up to `limit` jobs of graphs that were given up; returns how many were cancelled or asked to stop.

    tries: what cannot be cancelled now is left: a row that it needs is held, or wrong.
    """
    found = [str(row.public_id) for row in connection.execute(LEFT_OVER, {"limit": limit})]
    parts = move_rows(connection, found, lambda among: _cancel(connection, among, sync=sync, actor=actor), tries=tries)
    return sum(map(_changed, parts))


def finish_graphs(connection: Connection, limit: int) -> int:
    """Note of up to `limit` graphs that their last node has ended; returns how many."""
    ids = [row.id for row in connection.execute(LOCK_FINISHED, {"limit": limit})]
    return connection.execute(FINISH, {"ids": ids}).rowcount if ids else 0


@dataclass(frozen=True)
class DeletedGraph:
    """Whether a graph was deleted, and the end of the last one after which others are to be looked at; None = there
    are no others."""

    deleted: bool
    after: datetime | None


def delete_graph(connection: Connection, *, age: float, after: datetime = BEGINNING, limit: int) -> DeletedGraph:
    """Delete the first graph that has been over for `age` seconds and of which no job is kept, out of `limit` that
    ended later than `after`."""
    row = connection.execute(DELETE_GRAPH, {"age": age, "after": after, "limit": limit}).one()
    if row.deleted is not None:
        return DeletedGraph(True, row.deleted)
    return DeletedGraph(False, row.last if row.looked == limit else None)


def _stop(connection: Connection, graph_id: int, *, sync: float, actor: str) -> int:
    rows = connection.execute(UNFINISHED, {"id": graph_id, "limit": None})
    return _changed(_cancel(connection, [str(row.public_id) for row in rows], sync=sync, actor=actor))


def _cancel(connection: Connection, jobs: Sequence[str], *, sync: float, actor: str) -> list[Cancelled]:
    return cancel(connection, jobs, instances=None, sync=sync, actor=actor, all_submissions=True) if jobs else []


def _changed(answers: Sequence[Cancelled]) -> int:
    return sum(answer.changed for answer in answers)
