"""Refuse what is no name of who submits in SQL: a job without one had a history without a beginning."""

from alembic import op

from schema import sql

revision = "0090"
down_revision = "0089"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/named_actor", "functions/submit", "functions/submit_graph")


def downgrade() -> None:
    """Do nothing: the version before may use the functions."""
