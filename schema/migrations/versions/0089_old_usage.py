"""Find usage that is older than the window by its index, which a bound that changes within a statement cannot use."""

from alembic import op

from schema import sql

revision = "0089"
down_revision = "0088"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/roll_usage", "functions/within_limits")


def downgrade() -> None:
    """Do nothing: the version before may use the function."""
