"""Count the ticks that a schedule has left out because its previous job has not ended, and since which tick."""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE schedules ADD COLUMN IF NOT EXISTS left_out integer NOT NULL DEFAULT 0,"
        " ADD COLUMN IF NOT EXISTS left_out_since timestamptz,"
        " DROP CONSTRAINT IF EXISTS schedules_left_out_since_told,"
        " ADD CONSTRAINT schedules_left_out_since_told"
        " CHECK (left_out >= 0 AND (left_out > 0) = (left_out_since IS NOT NULL))"
    )
    op.execute("CREATE INDEX IF NOT EXISTS schedules_left_out ON schedules (left_out) WHERE left_out >= 3")


def downgrade() -> None:
    op.execute("ALTER TABLE schedules DROP COLUMN left_out, DROP COLUMN left_out_since")
