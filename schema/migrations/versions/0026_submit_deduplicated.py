"""Load `submit_deduplicated` again: a key that one call names with several deduplication keys is a conflict."""

from alembic import op

from schema import sql

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit_deduplicated")


def downgrade() -> None:
    """Do nothing: the version before works with it."""
