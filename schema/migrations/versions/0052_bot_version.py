"""A bot's row has the version of its software, as its agent tells it."""

from alembic import op

revision = "0052"
down_revision = "0051"
branch_labels = None
depends_on = None

# The column is added with its check, so that both are there or neither is.
COLUMN = """
ALTER TABLE bots ADD COLUMN IF NOT EXISTS version text
    CONSTRAINT bots_version_length CHECK (length(version) BETWEEN 1 AND 64)
"""


def upgrade() -> None:
    op.execute(COLUMN)


def downgrade() -> None:
    """Do nothing: the version before does not read the column."""
