"""Withheld: what reservations and evictions take of quotas is looked up for all of a grant's quotas at once."""

from importlib import import_module

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# Of each quota, in the order in which they are named, the units that reservations keep, and its evictions within the
# cooldown. Volatile, so that it sees what has been committed by the time of the call, when the quotas are locked. The
# first of the two comparisons of times finds what is left by an index. What the planner takes for a thousand rows would
# make it read whole tables.
WITHHELD = """
CREATE FUNCTION withheld(cohorts integer[], instances integer[], cooldown double precision)
RETURNS TABLE (kept bigint, evicted bigint) LANGUAGE plpgsql VOLATILE ROWS 1
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH keeping AS MATERIALIZED (
        SELECT j.cohort, j.instance, sum(v.units) AS units FROM reservations v
        CROSS JOIN LATERAL (
            SELECT cohort, instance FROM jobs WHERE id = v.job_id AND state = 'queued' OFFSET 0) j
        WHERE v.until >= now() AND v.until >= clock_timestamp()
        GROUP BY j.cohort, j.instance
    )
    SELECT coalesce(k.units, 0), e.evicted
    FROM unnest(withheld.cohorts, withheld.instances) WITH ORDINALITY AS w (cohort, instance, nth)
    LEFT JOIN keeping k ON k.cohort = w.cohort AND k.instance = w.instance
    CROSS JOIN LATERAL (
        SELECT count(*) AS evicted FROM evictions e
        WHERE e.cohort = w.cohort AND e.instance = w.instance
            AND e.at > now() - make_interval(secs => withheld.cooldown) OFFSET 0) e
    ORDER BY w.nth;
END $$
"""


def upgrade() -> None:
    op.execute(WITHHELD)
    op.execute("DROP FUNCTION effective_max(integer, integer, integer, integer, double precision)")
    op.execute("DROP FUNCTION kept_units(integer, integer)")


def downgrade() -> None:
    before = import_module("schema.migrations.versions.0002_tenancy")
    op.execute(before.EFFECTIVE_MAX)
    op.execute(before.KEPT_UNITS)
    op.execute("DROP FUNCTION withheld(integer[], integer[], double precision)")
