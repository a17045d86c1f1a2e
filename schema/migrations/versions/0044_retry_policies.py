"""Let a request say how failed attempts are tried again, and how often the bot of its job may be lost."""

from alembic import op

from schema import sql

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "checks/job_is_sound", "functions/refusal", "functions/normal_requests")


def downgrade() -> None:
    """Do nothing: what the version before stores passes these checks."""
