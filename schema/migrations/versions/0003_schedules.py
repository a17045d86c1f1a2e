"""Add the table of schedules: jobs that are submitted again and again."""

from alembic import op

from schema.tables.tenancy import schedules

revision = "0003"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schedules.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    schedules.drop(op.get_bind(), checkfirst=True)
