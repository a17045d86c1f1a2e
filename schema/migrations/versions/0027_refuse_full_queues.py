"""Load `refuse_full_queues` again, which looks at the requests once for all limits together."""

from alembic import op

from schema import sql

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/refuse_full_queues")


def downgrade() -> None:
    """Do nothing: the version before works with it."""
