"""Call `submit_many` what was `submit_all`, and let all functions that insert jobs name their columns by one list.

`submit_many` does what `submit_alike` did.
"""

from alembic import op

from schema import sql

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

FUNCTIONS = (
    "read_requests", "submit", "submit_alone", "submit_deduplicated", "submit_graph", "submit_many",
    "submit_or_join",
)  # fmt: skip


def upgrade() -> None:
    sql.load(op.get_bind(), *(f"functions/{name}" for name in FUNCTIONS))
    op.execute(
        "DROP FUNCTION IF EXISTS submit_all(jsonb, text, boolean, boolean), submit_alike(jsonb, jsonb, jsonb, text)"
    )


def downgrade() -> None:
    """Do nothing: the functions of the version before have to be loaded again."""
