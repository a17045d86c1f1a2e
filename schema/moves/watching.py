"""queued -> queued: promote a job that starves, hasten one whose deadline is near, and say that one will miss it."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

#: A job is hastened when its slack is less than this part of the time that remains.
SLACK = 0.2
#: Seconds after which a job that neither waits nor is over is looked at again.
LATER = 600

# A job is expected to run as long as it was said to, else as nine of ten of its class did. `latest` is when it has to
# start; that, and when it is hastened, do not depend on the time, so each job is looked at when something changes and
# not before. A hastened job's rank is below every priority, in the order of the slack. One that is promoted heads the
# level above, so that nothing that keeps coming in can keep it waiting.
WATCH = text(f"""
WITH due AS MATERIALIZED (
    SELECT job_id FROM job_constraints WHERE watch_at IS NOT NULL AND watch_at <= now() ORDER BY watch_at LIMIT :limit
), held AS MATERIALIZED (
    SELECT id, public_id, state, fence, rank, queued_at, constraint_set, finished_at FROM jobs
    WHERE id = ANY (ARRAY(SELECT job_id FROM due)) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), known AS MATERIALIZED (
    SELECT h.*, t.deadline, t.promoted_at, t.at_risk, s.critical, s.high, s.normal, h.state = 'queued' AS waits,
        t.price IS NOT NULL AS priced, make_interval(secs => s.starvation_seconds) AS patience,
        make_interval(secs => coalesce(t.seconds, c.seconds_high, 0)) AS expected
    FROM held h JOIN job_constraints t ON t.job_id = h.id CROSS JOIN scheduling s
    LEFT JOIN constraint_sets g ON g.id = h.constraint_set LEFT JOIN job_classes c ON c.name = g.terms->>'job_class'
), judged AS MATERIALIZED (
    SELECT k.*, deadline - expected AS latest,
        waits AND rank >= -1000 AND deadline - expected / {1 - SLACK} <= now() AS hastened,
        waits AND NOT at_risk AND deadline - expected <= now() AS endangered,
        waits AND priced AND rank > critical AND greatest(queued_at, promoted_at) + patience <= now() AS starved
    FROM known k
), ranked AS MATERIALIZED (
    SELECT j.*, CASE WHEN hastened THEN -1e6 + (extract(epoch FROM latest) - 1.7e9) / 1e4
        WHEN NOT starved IS TRUE THEN rank WHEN rank > normal THEN high + 0.5
        WHEN rank > high THEN critical + 0.5 ELSE -1000 END AS becomes,
        starved AND hastened IS NOT TRUE AS promoted
    FROM judged j
), moved AS (
    UPDATE jobs j SET rank = r.becomes FROM ranked r WHERE j.id = r.id AND r.becomes <> r.rank
), timed AS (
    UPDATE job_constraints t SET promoted_at = CASE WHEN r.promoted THEN now() ELSE t.promoted_at END,
        at_risk = t.at_risk OR r.endangered IS TRUE,
        watch_at = CASE WHEN r.finished_at IS NOT NULL THEN NULL
            WHEN NOT r.waits THEN now() + make_interval(secs => {LATER})
            ELSE greatest(now() + interval '1 s', least(
                CASE WHEN r.becomes >= -1000 THEN r.deadline - r.expected / {1 - SLACK} END,
                CASE WHEN NOT r.at_risk AND r.endangered IS NOT TRUE THEN r.latest END,
                CASE WHEN r.priced AND r.becomes > r.critical
                    THEN greatest(r.queued_at, CASE WHEN r.promoted THEN now() ELSE r.promoted_at END) + r.patience
                END)) END
    FROM ranked r WHERE t.job_id = r.id
), told AS MATERIALIZED (
    SELECT r.id, r.public_id, r.fence, w.move, w.details FROM ranked r CROSS JOIN LATERAL (
        SELECT 'promote' AS move, jsonb_build_object('from', level_of(r.rank), 'to', level_of(r.becomes),
            'waited_seconds', round(extract(epoch FROM now() - r.queued_at), 3)) AS details WHERE r.promoted
        UNION ALL
        SELECT 'hasten', jsonb_build_object('deadline', r.deadline, 'latest_start', r.latest) WHERE r.hastened
        UNION ALL
        SELECT 'at_risk', jsonb_build_object('deadline', r.deadline, 'latest_start', r.latest) WHERE r.endangered) w
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, move, 'queued', 'queued', fence, :actor, details FROM told
)
SELECT (SELECT count(*) FROM due) AS looked, t.public_id, t.move, t.details->>'to' AS level
FROM (SELECT) one LEFT JOIN told t ON true
""")


@dataclass(frozen=True)
class Warned:
    """What has become of one waiting job: `move` is `promote`, `hasten` or `at_risk`; `level`: what it was promoted
    to."""

    public_id: str
    move: str
    level: str | None


def watch(connection: Connection, limit: int, *, actor: str) -> tuple[int, list[Warned]]:
    """Look at up to `limit` jobs that are due for it; returns how many were due, and what has become of them.

    A job that has stayed in one level for as long as the policy allows moves up by one; its class stays. Rows that
    somebody else has locked are left for the next time.
    """
    rows = connection.execute(WATCH, {"limit": limit, "actor": actor}).all()
    return rows[0].looked, [Warned(str(row.public_id), row.move, row.level) for row in rows if row.move is not None]
