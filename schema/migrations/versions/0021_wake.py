"""Load `wake` again, which sends nothing where `leasehold.wake` is off."""

from alembic import op

from schema import sql

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/wake")


def downgrade() -> None:
    """Do nothing: the version before works with it."""
