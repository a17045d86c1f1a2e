"""Add `new_public_id` and `is_awaited`, which single submits ask. No transaction takes its number before it looks a
queue up any more.

Processes of the version before go on calling `submit_alone`. Their upkeep deletes queues as before; it would lose a
queue under a submit that began to look it up before one round of upkeep and inserts its job after the next one, an hour
later.
"""

from alembic import op

from schema import sql

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("is_awaited", "wake", "new_public_id", "known_queue", "intern_queue", "submit_alone", "submit_alike")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with all of them."""
