"""Requests that callers submit in SQL may not name what is reserved for the farm door."""

from alembic import op

from schema import sql

revision = "0066"
down_revision = "0065"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/normal_requests", "functions/submit_graph")


def downgrade() -> None:
    """Do nothing: the version before does not submit for the farm door."""
