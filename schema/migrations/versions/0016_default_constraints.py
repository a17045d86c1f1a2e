"""Load the functions that submit jobs again: a constrained job gets a row of `job_constraints` only if its request says
something for it, an estimate, a deadline or what gives its points.

Rows that are there stay. Processes of the version before place jobs without a row as if one with an estimate of 1 were
there. They show no estimated cost of such a job, and do not count it in the accuracy of its class.
"""

from alembic import op

from schema import sql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    functions = ("has_own_constraints", "submit_alone", "submit_many", "submit_or_join")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions))


def downgrade() -> None:
    """Do nothing: the version before works with both."""
