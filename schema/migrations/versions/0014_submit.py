"""Load the functions that submit jobs again, and `submit_many`: they do less for each call and each job."""

from alembic import op

from schema import sql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/submit_alone", "functions/submit_many", "functions/submit")


def downgrade() -> None:
    """Do nothing: both versions of the functions do the same."""
