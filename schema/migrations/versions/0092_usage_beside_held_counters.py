"""Usage leaves the rolling window beside a counter that somebody holds: `roll_usage` may pass over it."""

from alembic import op

from schema import sql

revision = "0092"
down_revision = "0091"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DROP FUNCTION IF EXISTS roll_usage(double precision, integer)")
    sql.load(op.get_bind(), "functions/roll_usage")


def downgrade() -> None:
    """Do nothing: the version before may use the function."""
