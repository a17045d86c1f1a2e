"""Queries of callers and operators on jobs, bots and graphs. Each is bounded and takes no locks."""

from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.errors import BadInput
from leasehold.states import FINAL
from leasehold.wire import COMMAND, escaped

from schema.checkpoints import PROGRESS_OF_JOB
from schema.fleet.kinds import TASK
from schema.fleet.success import PRIOR, success_rate
from schema.graphs import with_roots
from schema.postgres.connection import Connection
from schema.postgres.fragments import (
    JOB_REASON,
    JOB_RESTS_UNTIL,
    JOB_RESULT,
    SUBMISSION_FINISHED_AT,
    SUBMISSION_JOINED,
    SUBMISSION_REASON,
    SUBMISSION_STATE,
    SUBMISSIONS,
    WANTED_SUBMISSIONS,
    WITHDRAWN_SUBMISSIONS,
)
from schema.postgres.statements import Statement
from schema.predicates import ANY_PAUSE, PAUSED_UNTIL
from schema.readable import call_arguments

Rows = list[dict[str, Any]]

#: The most events shown of a job; the newest are kept.
MAX_EVENTS = 1000
#: The most labels of waiting jobs that are looked at.
MAX_LABELS = 500
#: The most failed nodes of a graph among which the first one is looked for.
MAX_FAILED = 100
#: The most versions of bots that are told.
MAX_VERSIONS = 100

# A caller sees only the instances given, null = all. A job of another instance looks like an absent job.
VISIBLE = "(CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))"

_JOB_COLUMNS = f"""
    j.id AS row_id, i.name AS instance, j.label, j.priority, j.units, j.attempts, j.max_attempts, j.created_at,
    j.queued_at, j.started_at, last.bot,
    {JOB_RESTS_UNTIL} AS schedule_after
"""
#: The columns of job `j` of instance `i` in a list, beside its id, and the bot that has it or had it last.
ROW = f"j.state, {JOB_REASON} AS reason, j.finished_at, {_JOB_COLUMNS}"

# A submission has a state of its own: several submissions may share a job, and the job of a withdrawn one may continue.
_SUBMISSION = (
    f"s.id, {SUBMISSION_STATE} AS state, {SUBMISSION_REASON} AS reason,"
    f" {SUBMISSION_FINISHED_AT} AS finished_at, {SUBMISSION_JOINED} AS joined"
)
_NAMED = f"({SUBMISSIONS}) s JOIN jobs j ON j.id = s.job_id JOIN instances i ON i.id = j.instance"

LAST_BOT = """
LEFT JOIN LATERAL (
    SELECT b.name AS bot, l.fence, l.policy FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.job_id = j.id ORDER BY l.fence DESC LIMIT 1) last ON true
"""

# One job without its events.
JOB = Statement(f"""
SELECT {_SUBMISSION}, {_JOB_COLUMNS}, coalesce(r.properties, p.properties) AS properties,
    f.properties AS wanted_properties, v.until AS prefer_until, j.instance AS instance_id, j.timeout_seconds,
    j.locality_hint, j.retry_failed, j.kills, k.looks AS considered, greatest(0,
    extract(epoch FROM {JOB_RESTS_UNTIL} - now())) AS backoff, extract(epoch FROM j.queued_at - now()) AS starts_in,
    j.dedup_key, (SELECT u.until FROM unique_keys u WHERE u.job_id = j.id) AS dedup_key_until, j.queue_deadline,
    {WANTED_SUBMISSIONS} AS submissions, last.policy,
    coalesce((SELECT jsonb_object_agg(key, value) FROM submission_metadata WHERE submission = s.id),
        (SELECT jsonb_object_agg(key, value) FROM job_metadata WHERE job_id = j.id), '{{}}') AS metadata,
    t.terms, CAST(t.estimate AS double precision) AS estimated_cost, t.service_level, n.graph,
    w.payload, CASE WHEN s.withdrawn_at IS NULL AND j.finished_at IS NOT NULL THEN {JOB_RESULT} END AS result,
    s.withdrawn_at IS NULL AND EXISTS (SELECT FROM job_results WHERE job_id = j.id) AS has_result
FROM {_NAMED} JOIN queues k ON k.id = j.queue JOIN platforms p ON p.id = j.platform
LEFT JOIN platforms r ON r.id = k.required LEFT JOIN platforms f ON f.id = j.preferred
LEFT JOIN preference_waits v ON v.job_id = j.id
LEFT JOIN LATERAL (
    SELECT g.terms, coalesce(o.estimate, 1) AS estimate, o.priority_inputs->>'level' AS service_level
    FROM constraint_sets g LEFT JOIN job_constraints o ON o.job_id = j.id
    WHERE g.id = k.constraint_set) t ON true
LEFT JOIN LATERAL (
    SELECT jsonb_build_object('id', g.public_id, 'name', g.name, 'node', m.node_no, 'depth', m.depth) AS graph
    FROM graph_nodes m JOIN graphs g ON g.id = m.graph WHERE m.job_id = j.id) n ON true
LEFT JOIN job_payloads w ON w.job_id = j.id {LAST_BOT}
WHERE {VISIBLE}
""")

#: The name of the task that job `j` calls; null if it runs a command.
TASK_OF_CALL = f"""(SELECT p.payload->'command'->>2 FROM job_payloads p
    WHERE p.job_id = j.id AND p.payload->'command'->>0 = '{COMMAND}' OFFSET 0)"""
#: The most words of a command, and the most characters of each, that a list tells: of more, as many first as last ones.
WORDS, LETTERS = 12, 80
#: The most characters that are read of the arguments of a task's call.
ARGUMENTS = 2000
# The payload `p` of a job, with the words of its command; none if another version stored something else.
_PAYLOAD = """(SELECT payload, CASE WHEN jsonb_typeof(payload->'command') = 'array' THEN payload->'command'
    ELSE '[]' END AS words FROM job_payloads WHERE job_id = {job}) p"""
# What a list tells of what a job runs, by its payload `p`.
_COMMAND = f"""ARRAY(
        SELECT CASE WHEN length(word) <= {LETTERS} THEN word
            ELSE left(word, {LETTERS // 2}) || '…' || right(word, {LETTERS // 2 - 1}) END
        FROM (SELECT CASE WHEN jsonb_array_length(p.words) > {WORDS} AND nth = {WORDS // 2} + 1
            THEN '…' ELSE coalesce(word, 'null') END AS word, nth
            FROM jsonb_array_elements_text(p.words) WITH ORDINALITY c (word, nth)) w
        WHERE nth <= {WORDS // 2} + 1 OR nth > jsonb_array_length(p.words) - {WORDS // 2 - 1}
        ORDER BY nth) AS command,
    CASE WHEN p.payload->'command'->>0 = '{COMMAND}' THEN left(p.payload->>'stdin', {ARGUMENTS}) END AS arguments"""
# What a list tells of each job beside its row: what it runs, how long it has waited and run, what holds it up.
LISTED = Statement(f"""
SELECT j.id AS row_id, j.queue, coalesce(w.command, '{{}}') AS command, w.arguments, j.constrained, i.draining,
    greatest(0, CAST(extract(epoch FROM coalesce(j.started_at, j.finished_at, now()) - j.queued_at) AS float8))
        AS waited_seconds, CAST(extract(epoch FROM j.queued_at - now()) AS double precision) AS starts_in,
    CAST(extract(epoch FROM coalesce(j.finished_at, now()) - j.started_at) AS double precision) AS ran_seconds,
    CAST(extract(epoch FROM nullif(j.schedule_after, {PAUSED_UNTIL}) - now()) AS double precision) AS retry_seconds,
    z.kind AS paused, (SELECT reason FROM pauses WHERE kind = 'instance' AND name = i.name) AS drain_reason,
    z.name AS paused_name, z.reason AS pause_reason
FROM jobs j JOIN instances i ON i.id = j.instance
LEFT JOIN LATERAL pause_of(j.id, j.label, j.instance) z ON {ANY_PAUSE} AND j.state = 'queued'
LEFT JOIN LATERAL (SELECT {_COMMAND} FROM {_PAYLOAD.format(job="j.id")}) w ON true
WHERE j.id = ANY (CAST(:ids AS bigint[]))
""")

# The history of one job, oldest first, the newest MAX_EVENTS of it.
EVENTS = Statement("""
SELECT move, "from", "to", at, actor, fence, details FROM (
    SELECT id, move, from_state AS "from", to_state AS "to", at, actor, fence, details
    FROM job_events WHERE job_id = :job_id ORDER BY id DESC LIMIT :limit) newest
ORDER BY id
""")

# How far the attempt of a job has told that it is that runs, or that has ended the job.
PROGRESS_TOLD = Statement(f"""
SELECT p.share, p.text, p.at FROM jobs j JOIN job_progress p ON {PROGRESS_OF_JOB}
WHERE p.job_id = :job_id
""")

JOB_ROW_ID = Statement(f"""
SELECT j.id, CASE WHEN s.withdrawn_at IS NOT NULL THEN {SUBMISSION_REASON} END AS withdrawn
FROM {_NAMED} WHERE {VISIBLE}
""")

# States of many submissions, with results where there are any. `job` is the public id of the shared job.
SUBMISSION_STATES = Statement(f"""
SELECT {_SUBMISSION}, j.id AS row_id, j.public_id AS job, j.attempts, j.created_at, j.started_at,
    CASE WHEN s.withdrawn_at IS NULL AND j.finished_at IS NOT NULL THEN {JOB_RESULT} END AS result
FROM {_NAMED}
WHERE {VISIBLE}
""")

# What the commands of many jobs left, in the order of `ids`. Results are read until together they have `room` bytes,
# and `fits` says so; the first always fits. A withdrawn submission has none.
RESULTS = Statement(f"""
WITH asked AS MATERIALIZED (
    SELECT n.nth, s.id, {SUBMISSION_STATE} AS state, {SUBMISSION_REASON} AS reason, j.id AS job_id,
        CASE WHEN s.withdrawn_at IS NULL AND j.finished_at IS NOT NULL THEN {JOB_RESULT}->'exit_code' END AS exit_code,
        r.fence, sum(r.size) OVER (ORDER BY n.nth) AS up_to
    FROM {_NAMED} CROSS JOIN LATERAL (SELECT array_position(CAST(:ids AS uuid[]), s.id) AS nth) n
    LEFT JOIN job_results r ON r.job_id = j.id AND s.withdrawn_at IS NULL
    WHERE {VISIBLE}
)
SELECT id, job_id AS row_id, state, CASE WHEN state = ANY (:final) THEN reason END AS reason, exit_code, fence,
    coalesce(up_to, 0) <= :room AS fits,
    CASE WHEN up_to <= :room AND fence IS NOT NULL THEN (
        SELECT CAST(result AS text) FROM job_results WHERE job_id = asked.job_id) END AS result
FROM asked ORDER BY nth
""")

# One attempt of a job, for its output; null = the newest. Attempts are numbered by leases, including those that cost no
# attempt. No fence: there is no such attempt.
ATTEMPT = Statement(f"""
SELECT j.id AS row_id, j.public_id AS job, {SUBMISSION_STATE} AS state, l.fence, coalesce(l.attempt, 0) AS attempt,
    {SUBMISSION_FINISHED_AT} IS NOT NULL OR CAST(:attempt AS integer) IS NOT NULL AND l.ended_at IS NOT NULL AS final,
    coalesce(l.verdict = 'lost', false) AS lost
FROM {_NAMED}
LEFT JOIN LATERAL (
    SELECT * FROM (
        SELECT fence, ended_at, verdict, row_number() OVER (ORDER BY fence) AS attempt FROM leases WHERE job_id = j.id
    ) n WHERE coalesce(n.attempt = CAST(:attempt AS integer), true) ORDER BY fence DESC LIMIT 1) l ON true
WHERE {VISIBLE}
""")

# The progress of jobs for which callers wait: end, withdrawn submissions, attempt, bytes of output. Jobs are given by
# their own public ids.
PROGRESS = Statement(f"""
SELECT j.public_id AS id, j.finished_at IS NOT NULL AS final, {WITHDRAWN_SUBMISSIONS} AS withdrawn, l.attempt,
    coalesce(o.written, 0) AS written
FROM jobs j
CROSS JOIN LATERAL (SELECT max(fence) AS fence, count(*) AS attempt FROM leases WHERE job_id = j.id) l
LEFT JOIN LATERAL (
    SELECT start + length(data) AS written FROM job_outputs
    WHERE job_id = j.id AND fence = l.fence ORDER BY start DESC LIMIT 1) o ON true
WHERE j.public_id = ANY (CAST(:ids AS uuid[]))
""")

_BOTS = f"""
SELECT b.name, b.status, b.draining, i.name AS instance, b.pool, b.labels, c.name AS cohort, b.priority, b.capacity,
    b.in_use, CASE jsonb_typeof(k.properties) WHEN 'object' THEN k.properties - '{TASK}'
        ELSE coalesce(k.properties, '{{}}') END AS properties, coalesce(k.exclusive, '{{}}') AS exclusive,
    b.epoch, b.opened_at, b.host, b.pid, b.version,
    extract(epoch FROM b.expires_at - now()) AS expires_in, b.held AS leases,
    extract(epoch FROM b.probation_until - now()) AS probation, s.success_rate, s.avg_latency_ms
FROM bots b JOIN cohorts c ON c.id = b.cohort LEFT JOIN instances i ON i.id = b.instance
LEFT JOIN kinds k ON k.id = b.kind
LEFT JOIN LATERAL (
    SELECT (sum(successes) + {PRIOR}) / (sum(successes + failures) + {PRIOR}) AS success_rate,
        1000 * sum(seconds) / nullif(sum(finished), 0) AS avg_latency_ms
    FROM bot_success WHERE bot_id = b.id) s ON true
"""
BOTS = Statement(f"{_BOTS} WHERE b.name > :after ORDER BY b.name LIMIT :limit")
BOT = Statement(f"{_BOTS} WHERE b.name = :name")
# How many of the bots that have a session tell which version. The most frequent versions come first.
BOT_VERSIONS = Statement("""
SELECT version, count(*) AS bots FROM bots WHERE status <> 'gone' GROUP BY version
ORDER BY bots DESC, version LIMIT :most
""")

# The success statistics of one bot by label, the latest first.
BOT_SUCCESS = Statement(f"""
SELECT s.label, s.successes, s.failures, s.returned, {success_rate("s")} AS success_rate,
    1000 * s.seconds / nullif(s.finished, 0) AS avg_latency_ms, s.at
FROM bot_success s JOIN bots b ON b.id = s.bot_id WHERE b.name = :name ORDER BY s.at DESC, s.label
""")


# Labels of waiting jobs, in their order: a loose index scan, one step for each label, however many jobs have it.
_LABELLED = "state IN ('queued', 'parked') AND label <> ''"
WAITING_LABELS = Statement(f"""
WITH RECURSIVE walk AS (
    (SELECT label, 1 AS nth FROM jobs WHERE {_LABELLED} ORDER BY label LIMIT 1)
    UNION ALL
    SELECT n.label, w.nth + 1 FROM walk w
    CROSS JOIN LATERAL (SELECT label FROM jobs WHERE {_LABELLED} AND label > w.label ORDER BY label LIMIT 1) n
    WHERE w.nth < :most
)
SELECT label FROM walk w
WHERE CAST(:instances AS text[]) IS NULL OR EXISTS (
    SELECT FROM instances i CROSS JOIN unnest(ARRAY['queued', 'parked']) s (state)
    CROSS JOIN LATERAL (
        SELECT FROM jobs WHERE {_LABELLED} AND label = w.label AND state = s.state AND instance = i.id LIMIT 1) j
    WHERE {VISIBLE})
ORDER BY label
""")


def waiting_labels(connection: Connection, *, instances: Sequence[str] | None) -> list[str]:
    """The labels of the queued and parked jobs of these instances, of the first `MAX_LABELS` that any jobs have."""
    return list(connection.execute(WAITING_LABELS, {"most": MAX_LABELS, "instances": instances}).scalars())


def job_row_id(connection: Connection, job: str, *, instances: Sequence[str] | None) -> int | None:
    """The row id of the job with this public id; None if the caller sees none."""
    found: int | None = connection.execute(JOB_ROW_ID, {"ids": [job], "instances": instances}).scalar_one_or_none()
    return found


def withdrawn_reason(connection: Connection, job: str, *, instances: Sequence[str] | None) -> str | None:
    """The reason text of a withdrawn submission; None if it was not withdrawn, or if the caller sees none."""
    row = connection.execute(JOB_ROW_ID, {"ids": [job], "instances": instances}).one_or_none()
    return None if row is None else row.withdrawn


def job(connection: Connection, job: str, *, instances: Sequence[str] | None) -> dict[str, Any] | None:
    """A submission's job with `events`; None if the caller sees none."""
    row = connection.execute(JOB, {"ids": [job], "instances": instances}).mappings().one_or_none()
    if row is None:
        return None
    events = connection.execute(EVENTS, {"job_id": row["row_id"], "limit": MAX_EVENTS}).mappings()
    (found,) = with_roots(connection, [row])
    found["events"] = [dict(event) for event in events]
    told = connection.execute(PROGRESS_TOLD, {"job_id": row["row_id"]}).mappings().one_or_none()
    found["progress"] = None if told is None else dict(told)
    return found


def listed(connection: Connection, rows: Sequence[dict[str, Any]]) -> Rows:
    """The rows of a list, each with what a list tells beside it."""
    found = connection.execute(LISTED, {"ids": [row["row_id"] for row in rows]}).mappings()
    more = {row["row_id"]: _called(row) for row in found}
    return [row | more[row["row_id"]] for row in with_roots(connection, rows) if row["row_id"] in more]


def submission_states(
    connection: Connection, ids: Sequence[str], *, instances: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """State and result of each submission that the caller sees, by id."""
    rows = connection.execute(SUBMISSION_STATES, {"ids": list(ids), "instances": instances}).mappings()
    return {str(row["id"]): row for row in with_roots(connection, list(rows))}


def results(
    connection: Connection, ids: Sequence[str], *, instances: Sequence[str] | None, room: int
) -> dict[str, dict[str, Any]]:
    """State and result (its JSON text) of each submission that the caller sees, by id, in the order of `ids`.

    Not `fits`: its result is left out, because those before it have `room` bytes together with it.
    """
    where = {"ids": list(ids), "instances": instances, "room": room, "final": sorted(FINAL)}
    rows = with_roots(connection, list(connection.execute(RESULTS, where).mappings()))
    return {str(row["id"]): row for row in rows}


def bots(connection: Connection, *, after: str, limit: int) -> Rows:
    """One page of bots ordered by name, from the first name after `after`."""
    return [dict(row) for row in connection.execute(BOTS, {"after": after, "limit": limit}).mappings()]


def bot_versions(connection: Connection) -> Rows:
    """The versions of the bots that have a session, at most `MAX_VERSIONS`, with the number of bots of each."""
    return [dict(row) for row in connection.execute(BOT_VERSIONS, {"most": MAX_VERSIONS}).mappings()]


def bot(connection: Connection, name: str) -> dict[str, Any] | None:
    """One bot with its success statistics (`success`); None if there is no bot of this name."""
    row = connection.execute(BOT, {"name": name}).mappings().one_or_none()
    if row is None:
        return None
    known = connection.execute(BOT_SUCCESS, {"name": name}).mappings()
    return dict(row) | {"success": [dict(each) for each in known]}


# Graphs.


_GRAPH_COLUMNS = """
SELECT s.public_id AS id, s.graph, s.instance, s.name, s.state, s.priority, s.nodes, s.edges, s.missing, s.actor,
    s.created_at, s.finished_at, s.blocked, s.blocked_forever, s.queued, s.parked, s.active, s.succeeded, s.failed,
    s.cancelled, s.dead, k.callback, CASE WHEN k.callback IS NOT NULL THEN k.outcome END AS callback_outcome
FROM graph_stats s
CROSS JOIN LATERAL (
    SELECT callback, outcome FROM graph_nodes n WHERE n.graph = s.graph ORDER BY n.node_no DESC LIMIT 1) k
"""
GRAPH = Statement(f"{_GRAPH_COLUMNS} WHERE s.graph = :graph")
# Of a graph, the node that ended badly first. The query looks at some of the nodes of the least depth. A job that was
# deleted ended before those that are kept. Of nodes that were cancelled together the one of the least depth is the
# first. A callback that had nothing to do is left out.
FIRST_FAILED = Statement(f"""
SELECT n.node_no AS node, j.public_id AS job, n.outcome AS state, j.reason
FROM (
    SELECT job_id, node_no, depth, outcome FROM graph_nodes
    WHERE graph = :graph AND outcome = ANY (CAST(:outcomes AS text[]))
        AND (callback = 'failed' AND outcome = 'cancelled') IS NOT TRUE
    ORDER BY depth, node_no LIMIT {MAX_FAILED}) n
LEFT JOIN LATERAL (SELECT public_id, reason, finished_at FROM jobs WHERE id = n.job_id OFFSET 0) j ON true
ORDER BY j.finished_at NULLS FIRST, n.depth, n.node_no LIMIT 1
""")

BY_ID = Statement(f"""
SELECT g.id, g.public_id FROM graphs g JOIN instances i ON i.id = g.instance
WHERE g.public_id = CAST(:id AS uuid) AND {VISIBLE}
""")
# The newest graph of the name in each instance. Two rows are enough to see that the name is ambiguous.
BY_NAME = Statement(f"""
SELECT g.id, g.public_id FROM instances i CROSS JOIN LATERAL (
    SELECT id, public_id FROM graphs WHERE instance = i.id AND name = :name ORDER BY id DESC LIMIT 1) g
WHERE {VISIBLE} AND (CAST(:instance AS text) IS NULL OR i.name = :instance) LIMIT 2
""")
# One page, newest first; `before` is the row of the last graph of the page before.
GRAPH_PAGE = Statement(f"""
WITH page AS MATERIALIZED (
    SELECT g.id FROM graphs g JOIN instances i ON i.id = g.instance
    WHERE {VISIBLE} AND (CAST(:instance AS text) IS NULL OR i.name = :instance)
        AND (NOT CAST(:open AS boolean) OR g.finished_at IS NULL)
        AND (CAST(:before AS bigint) IS NULL OR g.id < :before)
    ORDER BY g.id DESC LIMIT :limit
)
{_GRAPH_COLUMNS} WHERE s.graph = ANY (ARRAY(SELECT id FROM page)) ORDER BY s.graph DESC
""")
# One page of a graph's nodes, by number. A node without a job ended so long ago that its job was deleted.
NODES = Statement(f"""
SELECT n.job_id AS row_id, n.node_no AS node, j.public_id AS job, coalesce(j.state, n.outcome) AS state, n.depth,
    j.priority, n.callback, n.pending_deps AS waits_for, n.missing, j.reason, j.label,
    n.dead_ends > 0 AND n.outcome IS NULL AS dead_end,
    ARRAY(SELECT p.node_no FROM graph_edges e JOIN graph_nodes p ON p.job_id = e.parent
        WHERE e.child = n.job_id ORDER BY p.node_no) AS after,
    coalesce(w.command, '{{}}') AS command, w.arguments
FROM graph_nodes n LEFT JOIN LATERAL (SELECT {_COMMAND} FROM {_PAYLOAD.format(job="n.job_id")}) w ON true
LEFT JOIN LATERAL (SELECT * FROM jobs WHERE id = n.job_id OFFSET 0) j ON true
WHERE n.graph = :graph AND n.node_no > :after
    AND (CAST(:states AS text[]) IS NULL OR coalesce(j.state, n.outcome) = ANY (CAST(:states AS text[])))
ORDER BY n.node_no LIMIT :limit
""")


def find_graph(
    connection: Connection, *, public_id: str | None, name: str, instance: str | None, instances: Sequence[str] | None
) -> tuple[int, str] | None:
    """Row id and public id of the graph with this public id, or else the newest of this name.

    Returns None if the caller sees none. Raises BadInput if several instances have a graph of the name.
    """
    where: dict[str, Any] = {"instances": instances}
    if public_id is not None:
        rows = connection.execute(BY_ID, where | {"id": public_id}).all()
        if rows:
            return rows[0].id, str(rows[0].public_id)
    rows = connection.execute(BY_NAME, where | {"name": name, "instance": instance}).all()
    if len(rows) > 1:
        raise BadInput("instance", f"several instances have a graph '{escaped(name, 80)}': say which one is meant")
    return (rows[0].id, str(rows[0].public_id)) if rows else None


def graph(connection: Connection, row_id: int) -> dict[str, Any]:
    """One graph, with the number of its nodes in each state, and the first of them that did not succeed."""
    found = dict(connection.execute(GRAPH, {"graph": row_id}).mappings().one())
    # What was cancelled may be so because of what failed.
    outcomes = [name for name in ("failed", "dead") if found[name]] or [name for name in ("cancelled",) if found[name]]
    where = {"graph": row_id, "outcomes": outcomes}
    first = connection.execute(FIRST_FAILED, where).mappings().one_or_none() if outcomes else None
    return found | {"first_failed": first and dict(first)}


def nodes(connection: Connection, row_id: int, *, states: Sequence[str] = (), after: int, limit: int) -> Rows:
    """One page of a graph's nodes by number, from the first after `after`. states: only nodes in one of these; none
    given: all."""
    where = {"graph": row_id, "states": list(states) or None, "after": after, "limit": limit}
    rows = with_roots(connection, list(connection.execute(NODES, where).mappings()))
    return [_called(row) for row in rows]


def _called(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the arguments of the task that its job calls in words."""
    arguments = row["arguments"]
    return {**row, "arguments": None if arguments is None else call_arguments(arguments)}


def graph_page(connection: Connection, *, instances: Sequence[str] | None, filters: Mapping[str, Any]) -> Rows:
    """One page of graphs; `filters` are instance, open, before (a row id) and limit."""
    return [dict(row) for row in connection.execute(GRAPH_PAGE, {"instances": instances} | dict(filters)).mappings()]
