"""Check what nodes of graphs hold in SQL also in the form in which requests are stored."""

from alembic import op

from schema import sql

revision = "0084"
down_revision = "0083"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), *(f"functions/{name}" for name in ("flat_requests", "normal_graph", "submit_graph")))


def downgrade() -> None:
    """Do nothing: the version before may use the functions."""
