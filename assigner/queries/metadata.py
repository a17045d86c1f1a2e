"""Queries by metadata: the sum of all jobs with a value, and the values of a key. Both are bounded."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.states import FINAL

from assigner.queries.listing import VISIBLE
from schema.postgres.connection import Connection
from schema.postgres.fragments import DESCRIBED
from schema.postgres.statements import Statement

#: The most jobs that a summary reads, the newest of them; the most values that one page looks at.
MOST_JOBS, MOST_VALUES = 100_000, 1_000

# The run time is that of all attempts, by their leases. The expected run time of a job is the estimate of its request,
# or what is predicted for its class, or else the average of the jobs here that succeeded.
SUMMARY = Statement(f"""
WITH named AS MATERIALIZED (
    SELECT DISTINCT m.job_id FROM unnest(CAST(:visible AS integer[])) i (id) CROSS JOIN LATERAL (
        SELECT job_id FROM {DESCRIBED} d WHERE instance = i.id AND key = :key AND value = :value
        ORDER BY job_id DESC LIMIT :most) m
    ORDER BY m.job_id DESC LIMIT :most
), found AS MATERIALIZED (
    SELECT j.state, j.queued_at, j.finished_at, NOT j.state = ANY (CAST(:final AS text[])) AS is_open,
        CASE WHEN j.state = 'running' THEN extract(epoch FROM now() - j.started_at) ELSE 0 END AS elapsed,
        CASE WHEN j.state = 'succeeded' THEN extract(epoch FROM j.finished_at - j.started_at) END AS took,
        coalesce(t.seconds, c.seconds) AS expected, ran.seconds AS ran
    FROM named n CROSS JOIN LATERAL (SELECT * FROM jobs WHERE id = n.job_id OFFSET 0) j
    LEFT JOIN LATERAL (SELECT seconds FROM job_constraints WHERE job_id = j.id OFFSET 0) t ON j.constrained
    LEFT JOIN LATERAL (
        SELECT k.seconds FROM queues q JOIN constraint_sets s ON s.id = q.constraint_set
        JOIN job_classes k ON k.name = s.terms->>'job_class' WHERE q.id = j.queue OFFSET 0) c ON j.constrained
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(extract(epoch FROM coalesce(ended_at, now()) - acknowledged_at)), 0) AS seconds
        FROM leases WHERE job_id = j.id) ran
    WHERE NOT EXISTS (
        SELECT FROM jsonb_each_text(CAST(:others AS jsonb)) o WHERE NOT EXISTS (
            SELECT FROM {DESCRIBED} d WHERE d.job_id = j.id AND d.key = o.key AND d.value = o.value OFFSET 0))
), usual AS MATERIALIZED (
    SELECT avg(took) AS seconds FROM found
)
SELECT (SELECT count(*) FROM named) AS read,
    (SELECT coalesce(jsonb_object_agg(state, jobs), '{{}}')
     FROM (SELECT state, count(*) AS jobs FROM found GROUP BY state) s) AS jobs,
    count(*) FILTER (WHERE is_open) AS unfinished, min(queued_at) AS first_queued_at, max(finished_at) AS last_ended_at,
    CAST(coalesce(sum(ran), 0) AS float8) AS run_seconds,
    CAST(coalesce(sum(greatest(0, coalesce(expected, usual.seconds) - elapsed)) FILTER (WHERE is_open), 0) AS float8)
        AS remaining_seconds,
    count(*) FILTER (WHERE is_open AND coalesce(expected, usual.seconds) IS NULL) AS unestimated
FROM found CROSS JOIN usual
""")

# A loose index scan: one step for each value, however many jobs have it.
_NEXT = f"""
    SELECT min(v.value) AS value FROM unnest(CAST(:visible AS integer[])) i (id) CROSS JOIN LATERAL (
        SELECT value FROM {DESCRIBED} d WHERE instance = i.id AND key = :key AND {{}} ORDER BY value LIMIT 1) v"""
_VALUES = f"""
WITH RECURSIVE walk AS (
    ({_NEXT.format("{first}")})
    UNION ALL
    SELECT n.value FROM walk w CROSS JOIN LATERAL ({_NEXT.format("value > w.value")}) n WHERE w.value IS NOT NULL
)
SELECT value FROM walk WHERE value IS NOT NULL LIMIT :most
"""
# Two statements, because a plan for both would read all values up to `after`.
FIRST_VALUES, NEXT_VALUES = (
    Statement(_VALUES.format(first=first)) for first in ("true", "value > CAST(:after AS text)")
)


def _visible(connection: Connection, instances: Sequence[str] | None, instance: str | None) -> list[int]:
    names = None if instances is None else list(instances)
    return list(connection.execute(VISIBLE, {"instances": names, "instance": instance}).scalars())


def summary(
    connection: Connection, metadata: Mapping[str, str], *, instances: Sequence[str] | None, instance: str | None
) -> dict[str, Any]:
    """The jobs with all of `metadata`, which must not be empty: counts by state, times in seconds, and what is left.

    `more` is true if more than `MOST_JOBS` have the first of them, so that only the newest are counted.
    """
    (key, value), *others = metadata.items()
    where = {
        "visible": _visible(connection, instances, instance),
        "key": key,
        "value": value,
        "others": json.dumps(dict(others)),
        "most": MOST_JOBS + 1,
        "final": sorted(FINAL),
    }
    row = dict(connection.execute(SUMMARY, where).mappings().one())
    return row | {"more": row["read"] > MOST_JOBS}


def values(
    connection: Connection,
    key: str,
    *,
    contains: str | None,
    after: str | None,
    limit: int,
    instances: Sequence[str] | None,
    instance: str | None,
) -> tuple[list[str], str | None]:
    """Distinct values of a key in their order, from the first after `after`, and the `after` of the next page.

    contains: only values with this text in them, in whatever case.
    """
    where = {"visible": _visible(connection, instances, instance), "key": key, "most": MOST_VALUES}
    following = {} if after is None else {"after": after}
    read = list(connection.execute(NEXT_VALUES if following else FIRST_VALUES, where | following).scalars())
    wanted = "" if contains is None else contains.casefold()
    found = [value for value in read if wanted in value.casefold()]
    if len(found) > limit:
        return found[:limit], found[limit - 1]
    return found, read[-1] if len(read) == MOST_VALUES else None
