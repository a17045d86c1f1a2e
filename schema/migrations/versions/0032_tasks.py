"""Let bots tell the tasks that they have imported, and calls of other tasks ask for bots that have."""

from alembic import op

from schema import sql

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(
        op.get_bind(),
        "functions/offers",
        "functions/is_open_to",
        "functions/platform_with_task",
        "functions/queue_with_task",
    )


def downgrade() -> None:
    """Do nothing: the version before calls is_open_to only, which does the same for bots that tell nothing."""
