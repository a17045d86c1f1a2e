"""Leave room in the pages of counters, so that a change of a counter makes no new index entries.

Rows that are there move to pages with room as they are changed. Nothing is rewritten, and processes of the version
before go on working meanwhile.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE counters SET (autovacuum_vacuum_scale_factor = 0.01, fillfactor = 25)")


def downgrade() -> None:
    """Do nothing: the version before works with both."""
