"""An open submit holds nothing that others need: no lock on keys, on limited labels or on requirement sets.

`lock_joined` takes the place of `prepare_submit`. The column `linked` of `platforms` is false of what is new. The sets
that are there were linked under a lock, so upkeep need not look at them again.
"""

from alembic import op

from schema import sql

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE platforms ADD COLUMN IF NOT EXISTS linked boolean NOT NULL DEFAULT true")
    op.execute("ALTER TABLE platforms ALTER COLUMN linked SET DEFAULT false")
    op.execute("CREATE INDEX IF NOT EXISTS platforms_unlinked ON platforms (id) WHERE NOT linked")
    op.execute(
        "DROP FUNCTION IF EXISTS prepare_submit(jsonb, text), submit_all(jsonb, text, boolean),"
        " submit_or_join(jsonb, integer, integer, text)"
    )
    functions = (
        "intern_kind", "intern_platform", "lock_joined", "new_requests", "refuse_full_queues", "submit_many",
        "submit_alone", "submit_deduplicated", "submit_graph", "submit_or_join",
    )  # fmt: skip
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with them."""
