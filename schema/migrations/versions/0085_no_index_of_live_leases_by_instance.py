"""Drop the index of live leases by instance, for which each lease paid. Few acts of operators read by it."""

from alembic import op

revision = "0085"
down_revision = "0084"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DROP INDEX IF EXISTS leases_live_of_instance")


def downgrade() -> None:
    op.execute("""
        CREATE INDEX IF NOT EXISTS leases_live_of_instance ON leases (instance)
        WHERE state IN ('pending', 'active', 'cancelling')
    """)
