"""Load `is_contended` again: it ends with the first queue that contends."""

from alembic import op

from schema import sql

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/is_contended")


def downgrade() -> None:
    """Do nothing: the version before works with it."""
