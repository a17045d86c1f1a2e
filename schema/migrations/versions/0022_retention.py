"""Indexes for retention: finished jobs by state, and blames by age.

What is kept of one state no longer stands in front of what is due of another.
"""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE INDEX IF NOT EXISTS jobs_finished_by_state ON jobs (state, finished_at) WHERE finished_at IS NOT NULL"
    )
    op.execute("CREATE INDEX IF NOT EXISTS blames_old ON blames (at)")


def downgrade() -> None:
    op.execute("DROP INDEX jobs_finished_by_state, blames_old")
