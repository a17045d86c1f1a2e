"""Load the function `charge` again: it changes counters that exist by the places of their rows."""

from alembic import op

from schema import sql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/charge")


def downgrade() -> None:
    """Do nothing: both versions of the function do the same."""
