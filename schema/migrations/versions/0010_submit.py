"""Load the function `submit` again: it looks up once what many requests have in common, as texts."""

from alembic import op

from schema import sql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit")


def downgrade() -> None:
    """Do nothing: both versions of the function do the same."""
