"""Leave room in the pages of `rate_buckets`, so that a bucket whose tokens are drawn stays in its page."""

from alembic import op

revision = "0062"
down_revision = "0061"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE rate_buckets SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01)")


def downgrade() -> None:
    op.execute("ALTER TABLE rate_buckets RESET (fillfactor, autovacuum_vacuum_scale_factor)")
