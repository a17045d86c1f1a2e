"""Let a job start at a given time: `schedule_after` and `delay` of a request, kept with blocked nodes of graphs."""

import sqlalchemy as sa
from alembic import op

from schema import sql

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None

_FUNCTIONS = (
    *("refusal", "normal_requests", "read_requests", "origin_of"),
    *("submit_or_join", "submit_alone", "submit_many", "submit_graph"),
)


def upgrade() -> None:
    op.execute("ALTER TABLE graph_nodes ADD COLUMN IF NOT EXISTS schedule_after timestamptz")
    op.execute("ALTER TABLE graph_nodes ADD COLUMN IF NOT EXISTS delay double precision")
    if "starts_at" not in op.get_bind().scalar(
        sa.text("SELECT coalesce(pg_get_function_result(to_regproc('read_requests')), '')")
    ):
        # Its columns have changed, which a replacement may not do.
        op.execute("DROP FUNCTION read_requests")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in _FUNCTIONS))


def downgrade() -> None:
    """Do nothing: the version before leaves the columns alone."""
