"""Add `unique_keys`, and let a request say what becomes of a job that has its deduplication key."""

import sqlalchemy as sa
from alembic import op

from schema import sql

revision = "0048"
down_revision = "0047"
branch_labels = None
depends_on = None

TABLE = """
CREATE TABLE IF NOT EXISTS unique_keys (
    instance integer NOT NULL, dedup_key text NOT NULL, job_id bigint NOT NULL, public_id uuid NOT NULL,
    until timestamptz NOT NULL,
    CONSTRAINT unique_keys_pkey PRIMARY KEY (instance, dedup_key),
    CONSTRAINT unique_keys_key_bounded CHECK (octet_length(dedup_key) BETWEEN 1 AND 200));
CREATE INDEX IF NOT EXISTS unique_keys_until ON unique_keys (until);
CREATE INDEX IF NOT EXISTS unique_keys_of_job ON unique_keys (job_id);
"""
_FUNCTIONS = (
    *("kept_key", "on_conflict", "replace_held", "submit_or_join", "submit_deduplicated"),
    *("new_requests", "refuse_full_queues", "refusal", "normal_requests"),
)


def upgrade() -> None:
    op.execute(TABLE)
    if "replaced_label" not in op.get_bind().scalar(
        sa.text("SELECT coalesce(pg_get_function_result(to_regproc('new_requests')), '')")
    ):
        # Its columns have changed, which a replacement may not do.
        op.execute("DROP FUNCTION new_requests")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in _FUNCTIONS))


def downgrade() -> None:
    """Remove the function that takes a row of jobs. The version before leaves the table alone."""
    op.execute("DROP FUNCTION IF EXISTS replace_held(jsonb, jobs, integer, boolean, boolean, timestamptz, text)")
