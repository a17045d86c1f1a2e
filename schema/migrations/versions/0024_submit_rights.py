"""Load `submit` again: it runs with the rights of the tables' owner, and nobody else may call it unless allowed to."""

from alembic import op

from schema import sql

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit")


def downgrade() -> None:
    """Do nothing: the version before works with it."""
