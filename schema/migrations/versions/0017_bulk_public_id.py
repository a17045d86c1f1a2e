"""Add `bulk_public_id`, which bulk submits ask, and `known_queue`, which all submits ask."""

from alembic import op

from schema import sql

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("known_queue", "bulk_public_id", "submit_alone", "submit_many")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with both."""
