"""Find the jobs that were made like another one, so that a requeue by a filter makes no second copy."""

from alembic import op

revision = "0074"
down_revision = "0071"
branch_labels = None
depends_on = None

INDEX = """
CREATE INDEX IF NOT EXISTS job_payloads_like ON job_payloads ((origin->>'from')) WHERE (origin->>'from') IS NOT NULL
"""


def upgrade() -> None:
    op.execute(INDEX)


def downgrade() -> None:
    """Do nothing: the index costs the version before little, and it is needed again by the next upgrade."""
