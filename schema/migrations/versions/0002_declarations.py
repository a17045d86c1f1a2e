"""Add the table `declarations`: names that configuration files declare and operators cannot change by command."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLE = """
CREATE TABLE IF NOT EXISTS declarations (
    kind text NOT NULL,
    name text NOT NULL,
    CONSTRAINT declarations_pkey PRIMARY KEY (kind, name)
)
"""


def upgrade() -> None:
    op.execute(TABLE)


def downgrade() -> None:
    """Keep the table, because the baseline drops it with all others."""
