"""Let `normal_requests` refuse `urgency`, and give the stored jobs of schedules the priority that it stood for."""

from alembic import op

from schema import sql

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


PRIORITIES = """
UPDATE schedules SET request = request - 'urgency' || CASE
    WHEN request->>'urgency' IS NULL THEN '{}'
    ELSE jsonb_build_object('priority', 100 - (request->>'urgency')::integer) END
WHERE request ? 'urgency'
"""


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/normal_requests")
    op.execute(PRIORITIES)


def downgrade() -> None:
    """Do nothing: the version before reads a priority too."""
