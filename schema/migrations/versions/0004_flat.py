"""Flat: a pick costs the same with many queues, and while old versions of rows cannot be cleaned up."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Picks read the front of the line of a cohort, whatever its queues; by age they look into each urgency of a queue.
# Every job has a unit: the words keep the planner from this index where a single queue is meant.
FRONT = """
CREATE INDEX jobs_ready_order ON jobs (cohort, priority, queued_at, id)
    WHERE state = 'queued' AND schedule_after IS NULL AND units >= 1;
DROP INDEX jobs_ready_age;
"""

# Bots of one kind offer the same properties: what one of them offers is known of all.
KIND = "ALTER TABLE bots ADD COLUMN kind bigint GENERATED ALWAYS AS (hashtextextended(properties::text, 0)) STORED"


def upgrade() -> None:
    for part in (FRONT, KIND):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("picks of the version before need what this removed; restore a backup instead")
