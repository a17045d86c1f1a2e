"""Columns for the machine and the process id of a bot's agent. Agents that do not tell them leave them empty."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_CONSTRAINT = "bots_pid_positive"


def upgrade() -> None:
    op.execute("ALTER TABLE bots ADD COLUMN IF NOT EXISTS host text, ADD COLUMN IF NOT EXISTS pid integer")
    op.execute(f"ALTER TABLE bots DROP CONSTRAINT IF EXISTS {_CONSTRAINT}")
    op.execute(f"ALTER TABLE bots ADD CONSTRAINT {_CONSTRAINT} CHECK (pid > 0)")


def downgrade() -> None:
    op.execute("ALTER TABLE bots DROP COLUMN IF EXISTS host, DROP COLUMN IF EXISTS pid")
