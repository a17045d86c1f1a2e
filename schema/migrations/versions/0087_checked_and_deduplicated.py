"""Check graphs of every actor in SQL, and submit deduplicated requests without the statement for the others."""

from alembic import op

from schema import sql

revision = "0087"
down_revision = "0086"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), *(f"functions/{name}" for name in ("submit_normal_graph", "submit_graph", "submit_many")))


def downgrade() -> None:
    """Do nothing: the version before may use the functions, but for graphs with a callback."""
