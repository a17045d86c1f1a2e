"""Load `normal_requests` again, which refuses with `urgency` what it refuses with `priority`."""

from alembic import op

from schema import sql

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/normal_requests")


def downgrade() -> None:
    """Do nothing: the function that refuses more writes nothing that the one before could not."""
