"""Refuse names, locks, unknown fields and circles in SQL with the words of the other ways in, and settle by keys."""

from alembic import op

from schema import sql

revision = "0082"
down_revision = "0081"
branch_labels = None
depends_on = None

FUNCTIONS = (
    *("refusal", "normal_requests", "only_flat", "normal_graph", "with_callback", "ordered_graph", "submit_graph"),
    "settle",
)


def upgrade() -> None:
    sql.load(op.get_bind(), *(f"functions/{name}" for name in FUNCTIONS))


def downgrade() -> None:
    """Do nothing: the version before may use the functions."""
