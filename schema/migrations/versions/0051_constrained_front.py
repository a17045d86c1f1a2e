"""Add `jobs_constrained_front`: the first jobs with constraints, whatever their queues.

And look up patterns of limits without a call of a function for each name.
"""

from alembic import op

from schema import sql

revision = "0051"
down_revision = "0049"
branch_labels = None
depends_on = None

INDEX = """
CREATE INDEX IF NOT EXISTS jobs_constrained_front ON jobs (cohort, rank, queued_at, id) INCLUDE (queue)
    WHERE state = 'queued' AND schedule_after IS NULL AND constrained AND priority >= -1000
"""


def upgrade() -> None:
    op.execute(INDEX)
    sql.load(op.get_bind(), *(f"functions/{name}" for name in ("matching_pattern", "limit_pattern", "charge")))


def downgrade() -> None:
    """Do nothing: the version before does not read the index, and may use the functions."""
