"""Let an edge of a graph be passed: its child had started when its parent was tried again."""

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE graph_edges ADD COLUMN IF NOT EXISTS passed boolean NOT NULL DEFAULT false")


def downgrade() -> None:
    """Do nothing: the version before leaves the column alone."""
