"""Declarations: what configuration files declare is known, so that nobody changes by command what a reload undoes."""

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
    """The table stays: the baseline drops it with all others."""
