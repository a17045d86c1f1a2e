"""Drop `is_awaited`, which only `wake` asks now, and load `wake` again, which does so itself."""

from alembic import op

from schema import sql

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/wake")
    op.execute("DROP FUNCTION IF EXISTS is_awaited(text)")


def downgrade() -> None:
    """Do nothing: the functions of the version before have to be loaded again."""
