"""A column for the source that declares a schedule: an app or the configuration. All schedules of before have none."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_CONSTRAINT = "schedules_declared_by_known"


def upgrade() -> None:
    op.execute("ALTER TABLE schedules ADD COLUMN IF NOT EXISTS declared_by text")
    op.execute(f"ALTER TABLE schedules DROP CONSTRAINT IF EXISTS {_CONSTRAINT}")
    op.execute(
        f"ALTER TABLE schedules ADD CONSTRAINT {_CONSTRAINT} "
        "CHECK (declared_by = 'config' OR declared_by LIKE 'app:_%')"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE schedules DROP COLUMN IF EXISTS declared_by")
