"""Add the table of pool samples."""

from alembic import op

from schema.tables.pool_samples import pool_samples

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A new database has it from the baseline.
    pool_samples.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    """Drop the samples. A baseline of this version drops what is left."""
    pool_samples.drop(op.get_bind(), checkfirst=True)
