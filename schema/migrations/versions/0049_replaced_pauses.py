"""A job that a pause has set aside starts when its replacement says, and not at once when the pause ends.

Its time of the start was taken for one that had to stay.
"""

from alembic import op

from schema import sql

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sql.load(op.get_bind(), "functions/replace_held")


def downgrade() -> None:
    """Do nothing: the version before may use the function."""
