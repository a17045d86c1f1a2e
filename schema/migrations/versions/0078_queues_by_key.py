"""Look queues up by an index that no other is mistaken for, and instances without reading all of them."""

from alembic import op

from schema import sql

revision = "0078"
down_revision = "0077"
branch_labels = None
depends_on = None

INDEX = """
CREATE INDEX IF NOT EXISTS queues_by_key
    ON queues ((ARRAY[constraint_set, platform, instance, units, cohort, preferred, required]))
"""
FUNCTIONS = (
    *("intern_queue", "known_queue", "lock_joined", "new_requests", "refuse_full_queues", "submit_deduplicated"),
    *("submit_many", "within_limits"),
)


def upgrade() -> None:
    op.execute(INDEX)
    sql.load(op.get_bind(), *(f"functions/{name}" for name in FUNCTIONS))


def downgrade() -> None:
    """Do nothing: the version before does not read the index, and may use the functions."""
