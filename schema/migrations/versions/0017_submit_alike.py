"""Add `submit_alike`, for bulk submits of requests that differ in payload and key only, `known_queue`, which it and
`submit_alone` ask, and `bulk_public_id`, which it and `submit_all` ask.

Processes of the version before go on calling `submit_all`.
"""

from alembic import op

from schema import sql

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("known_queue", "bulk_public_id", "submit_alone", "submit_all", "submit_alike")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with both."""
