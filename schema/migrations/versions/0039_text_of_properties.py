"""Load `submit_graph` again, and drop `store_event`: nothing writes into the view of events any more.

A graph of which two nodes asked for the same property as 1 and as 1.0 lost one of them.
"""

from alembic import op

from schema import sql

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit_graph")
    op.execute("DROP FUNCTION IF EXISTS store_event() CASCADE")


def downgrade() -> None:
    """Do nothing: both versions do the same for the processes of the version before."""
