"""Add `submit_alike`, for bulk submits of requests that differ in payload and key only, and `known_queue`, which it and
`submit_alone` ask.

Processes of the version before go on calling `submit_all`.
"""

from alembic import op

from schema import sql

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/known_queue", "functions/submit_alone", "functions/submit_alike")


def downgrade() -> None:
    """Do nothing: the version before works with both."""
