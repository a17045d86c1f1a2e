"""Load the functions that callers call again, with the search path of a session of this version and without
compilation, and those that had a search path of their own, without it.
"""

from alembic import op

from schema import sql

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("submit", "submit_graph", "submit_many", "recent_evictions")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with them."""
