"""Patience: vacuums of the large tables take less from those who work meanwhile."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

TABLES = ("jobs", "leases", "job_events", "job_payloads")


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} SET (autovacuum_vacuum_cost_delay = 4)")


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} RESET (autovacuum_vacuum_cost_delay)")
