"""Give tokens a note, which tells operators who holds a token or what it is for."""

from alembic import op

revision = "0068"
down_revision = "0067"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE tokens ADD COLUMN IF NOT EXISTS note text")


def downgrade() -> None:
    """Do nothing: the version before works with one column more."""
