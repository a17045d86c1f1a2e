"""Ask whether others wait for what evictions have taken off the maximum of an instance."""

from alembic import op

from schema import sql

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/is_contended")


def downgrade() -> None:
    """Do nothing: the version before does not call it."""
