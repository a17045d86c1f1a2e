"""Add the table of schedules, and callbacks of graphs."""

from alembic import op

from schema import sql
from schema.tables.tenancy import schedules

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

CALLBACKS = """
ALTER TABLE graph_nodes ADD COLUMN IF NOT EXISTS callback text;
ALTER TABLE graph_nodes DROP CONSTRAINT IF EXISTS graph_nodes_callback_known;
ALTER TABLE graph_nodes
    ADD CONSTRAINT graph_nodes_callback_known CHECK (callback IN ('done', 'succeeded', 'failed'));
"""


def upgrade() -> None:
    schedules.create(op.get_bind(), checkfirst=True)
    op.execute(CALLBACKS)
    sql.load(op.get_bind(), "functions/with_callback", "functions/normal_graph", "functions/submit_graph")


def downgrade() -> None:
    op.execute("ALTER TABLE graph_nodes DROP COLUMN IF EXISTS callback")
    schedules.drop(op.get_bind(), checkfirst=True)
