"""Find the jobs that have run an action by its key, for results of which no door has seen the end."""

from alembic import op

revision = "0070"
down_revision = "0069"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
    CREATE INDEX IF NOT EXISTS jobs_of_action ON jobs (dedup_key, id)
    WHERE state = 'succeeded' AND dedup_key LIKE 'a:%'
    """)


def downgrade() -> None:
    """Do nothing: the version before does not need the index, and is not disturbed by it."""
