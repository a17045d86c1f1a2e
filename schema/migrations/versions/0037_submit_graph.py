"""Load `submit_graph` again, which reads its nodes without planning for each call how."""

from alembic import op

from schema import sql

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit_graph")


def downgrade() -> None:
    """Do nothing: both versions of the function do the same."""
