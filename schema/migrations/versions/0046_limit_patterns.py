"""Add `limit_patterns`, and to counters of locks and to buckets of rates whence they have their limit."""

from alembic import op

from schema import sql

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None

# Of a lock with one slot it is not stored whether an operator has set that. The audit tells, for as long as it is kept.
CHANGES = """
ALTER TABLE counters ADD COLUMN IF NOT EXISTS limited_by text;
ALTER TABLE rate_buckets ADD COLUMN IF NOT EXISTS limited_by text;
UPDATE counters c SET limited_by = '' WHERE name LIKE 'lock:%' AND limited_by IS NULL AND (most <> 1 OR EXISTS (
    SELECT FROM audit a WHERE a.action = 'limit.set' AND a.subject = c.name));
CREATE TABLE IF NOT EXISTS limit_patterns (
    prefix text NOT NULL, most numeric(30, 6), rate double precision, burst integer,
    CONSTRAINT limit_patterns_pkey PRIMARY KEY (prefix),
    CONSTRAINT limit_patterns_prefix_form CHECK (prefix ~ '^(lock:[a-z0-9][a-z0-9._-]{0,62}:[a-z0-9][a-z0-9._-]{0,61}|'
        'rate:([a-z0-9][a-z0-9._-]{0,61}|[a-z0-9][a-z0-9._-]{0,62}/([a-z0-9][a-z0-9._-]{0,61})?))$'),
    CONSTRAINT limit_patterns_most_positive CHECK (most >= 0 AND most <> 'NaN'),
    CONSTRAINT limit_patterns_rate_range CHECK (rate > 0 AND rate <= 1e6 AND burst BETWEEN 1 AND 1000000),
    CONSTRAINT limit_patterns_limit_given CHECK (
        CASE WHEN prefix LIKE 'lock:%' THEN most IS NOT NULL AND num_nonnulls(rate, burst) = 0
        ELSE most IS NULL AND num_nulls(rate, burst) = 0 END))
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(CHANGES, execution_options={"no_parameters": True})
    op.execute("DROP FUNCTION IF EXISTS charge(text[], numeric[], boolean)")
    sql.load(op.get_bind(), "functions/limit_pattern", "functions/charge", "functions/refusal")
    sql.load(op.get_bind(), "functions/normal_requests")


def downgrade() -> None:
    """Remove the patterns. Locks and rates that have their limit from one keep it."""
    op.execute("DROP FUNCTION IF EXISTS charge(text[], numeric[], boolean, numeric[])")
    op.execute("DROP FUNCTION IF EXISTS limit_pattern(text)")
    op.execute("DROP FUNCTION IF EXISTS matching_pattern(text)")
    op.execute("DROP TABLE IF EXISTS limit_patterns")
    op.execute("ALTER TABLE counters DROP COLUMN IF EXISTS limited_by")
    op.execute("ALTER TABLE rate_buckets DROP COLUMN IF EXISTS limited_by")
