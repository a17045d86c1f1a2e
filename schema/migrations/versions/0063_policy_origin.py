"""How a version of the policy came into force, for rollbacks and repeated requests, and which versions are drafts."""

from alembic import op

revision = "0063"
down_revision = "0062"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE policy_in_force ADD COLUMN IF NOT EXISTS origin jsonb")
    op.execute("ALTER TABLE policies ADD COLUMN IF NOT EXISTS drafted boolean NOT NULL DEFAULT false")


def downgrade() -> None:
    """Do nothing: the version before reads neither column."""
