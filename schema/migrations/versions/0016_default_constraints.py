"""Load the functions that submit jobs again: a job with constraints of which no own ones were said gets no row of them.

Rows that are there stay. Processes of the version before take a missing row for these defaults too.
"""

from alembic import op

from schema import sql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("has_own_constraints", "submit_alone", "submit_all", "submit_or_join")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with both."""
