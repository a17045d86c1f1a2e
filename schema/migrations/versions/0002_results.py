"""Create the tables of results and checkpoints, which a new database has from the baseline."""

from alembic import op

from schema.tables.jobs import job_checkpoints, job_results

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in (job_results, job_checkpoints):
        table.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    """Drop the tables, with all results and checkpoints."""
    for table in (job_checkpoints, job_results):
        table.drop(op.get_bind(), checkfirst=True)
