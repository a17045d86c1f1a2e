"""Add to forecasts what two simple guesses said, and what these are made from: rates of ends, and waits."""

from alembic import op

revision = "0077"
down_revision = "0076"
branch_labels = None
depends_on = None

CHANGES = (
    """
    ALTER TABLE lease_times ADD COLUMN IF NOT EXISTS per_second double precision NOT NULL DEFAULT 0,
        ADD COLUMN IF NOT EXISTS waited double precision
    """,
    """
    ALTER TABLE forecasts ADD COLUMN IF NOT EXISTS by_rate double precision,
        ADD COLUMN IF NOT EXISTS by_waits double precision
    """,
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    """Do nothing: the version before does not read these columns."""
