"""Add `pauses`: labels, tasks, instances and schedules of which no further job starts."""

from alembic import op

from schema import sql

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE IF NOT EXISTS pauses (
            kind text NOT NULL, name text NOT NULL, instance text NOT NULL, reason text NOT NULL, actor text NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT pauses_pkey PRIMARY KEY (kind, name, instance),
            CONSTRAINT pauses_kind_known CHECK (kind IN ('label', 'task', 'instance', 'schedule')))
    """)
    sql.load(op.get_bind(), "functions/pause_of")


def downgrade() -> None:
    """Remove the table, and let the jobs that were set aside be ready."""
    op.execute("UPDATE jobs SET schedule_after = NULL WHERE state = 'queued' AND schedule_after = '9999-01-01T00:00Z'")
    op.execute("DROP FUNCTION IF EXISTS pause_of(bigint, text, integer)")
    op.execute("DROP TABLE IF EXISTS pauses")
