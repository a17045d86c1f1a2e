"""Store how long a bot waits between SIGTERM and SIGKILL: the deadlines of jobs that are to stop depend on it."""

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE bots ADD COLUMN IF NOT EXISTS kill_grace double precision NOT NULL DEFAULT 2,"
        " DROP CONSTRAINT IF EXISTS bots_kill_grace_range,"
        " ADD CONSTRAINT bots_kill_grace_range CHECK (kill_grace >= 0 AND kill_grace <= 600)"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE bots DROP COLUMN kill_grace")
