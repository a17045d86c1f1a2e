"""Add `new_public_id`, which single submits ask. No transaction takes its number before it looks a queue up any more.

Processes of the version before go on calling `submit_alone`. Their upkeep deletes queues that it has marked itself, by
the numbers of transactions. It would delete one under a submit that has looked it up, then waits for a key without
having a number, and goes on waiting through two more rounds.
"""

from alembic import op

from schema import sql

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("wake", "new_public_id", "known_queue", "intern_queue", "submit_alone")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with all of them, but for the rare deletion that is described above."""
