"""Load the function `submit` again: it looks up each key of a large repeated request by itself."""

from alembic import op

from schema import sql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit")


def downgrade() -> None:
    """Do nothing: both versions of the function do the same."""
