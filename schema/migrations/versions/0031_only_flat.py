"""Take only flat requests from callers in SQL."""

from alembic import op

from schema import sql

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/only_flat", "functions/submit")


def downgrade() -> None:
    """Do nothing: the version before works with them."""
