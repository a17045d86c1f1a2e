"""Have no starvation of more than a year, nor one that is not a number: every submit with a class failed by it."""

from alembic import op

revision = "0088"
down_revision = "0087"
branch_labels = None
depends_on = None

CHANGES = (
    "UPDATE scheduling SET starvation_seconds = NULL WHERE starvation_seconds > 31536000",
    "ALTER TABLE scheduling DROP CONSTRAINT IF EXISTS scheduling_starvation_positive",
    "ALTER TABLE scheduling DROP CONSTRAINT IF EXISTS scheduling_starvation_range",
    """
    ALTER TABLE scheduling ADD CONSTRAINT scheduling_starvation_range
    CHECK (starvation_seconds > 0 AND starvation_seconds <= 31536000)
    """,
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    """Do nothing: the version before works with the narrower range."""
