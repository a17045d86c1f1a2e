"""Results of nodes go with their graph, also where a process of the version before deletes it."""

from alembic import op

from schema import sql

revision = "0091"
down_revision = "0090"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/forget_results")


def downgrade() -> None:
    """Do nothing: the version before may use the function."""
