"""Insert jobs with the priority of their points, which a trigger gave them by a second version of each row."""

from alembic import op

from schema import sql

revision = "0083"
down_revision = "0082"
branch_labels = None
depends_on = None

FUNCTIONS = (
    *("points_of", "own_constraints", "replace_held", "submit_or_join", "submit_alone", "submit_many"),
    "submit_graph",
)
# They go last: from then on until the end of the transaction, submits of jobs with constraints wait.
GONE = """
DROP FUNCTION IF EXISTS own_constraints(jsonb);
DROP FUNCTION IF EXISTS rank_of(jsonb);
DROP FUNCTION IF EXISTS priced(jsonb);
DROP FUNCTION IF EXISTS watch_constraints() CASCADE;
DROP FUNCTION IF EXISTS apply_points() CASCADE
"""


def upgrade() -> None:
    sql.load(op.get_bind(), *(f"functions/{name}" for name in FUNCTIONS))
    op.execute(GONE)


def downgrade() -> None:
    """Make the function that the version before calls; it may use the others."""
    op.execute("""
        CREATE OR REPLACE FUNCTION priced(priority_inputs jsonb) RETURNS integer LANGUAGE sql AS
        $$ SELECT price FROM points_of(priority_inputs) $$
    """)
