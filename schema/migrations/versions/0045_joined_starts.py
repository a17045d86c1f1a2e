"""Load `submit_or_join` again: who joins a job that has had a bot does not change when it starts."""

from alembic import op

from schema import sql

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit_or_join")


def downgrade() -> None:
    """Do nothing: the function has the same arguments."""
