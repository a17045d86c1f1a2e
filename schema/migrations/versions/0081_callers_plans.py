"""Let submits of callers in SQL read by indexes, as those of our own sessions do, however small the tables were."""

from alembic import op

from schema import sql

revision = "0081"
down_revision = "0080"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit", "functions/submit_graph")


def downgrade() -> None:
    """Do nothing: the version before may use the functions."""
