"""Remember until when a submission counts as watched, so that one whose client is gone can be withdrawn."""

from alembic import op

revision = "0069"
down_revision = "0068"
branch_labels = None
depends_on = None

CHANGES = (
    """
    CREATE TABLE IF NOT EXISTS submission_watches (
        submission uuid NOT NULL CONSTRAINT submission_watches_pkey PRIMARY KEY, watched_until timestamptz NOT NULL)
    """,
    "CREATE INDEX IF NOT EXISTS submission_watches_until ON submission_watches (watched_until)",
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    """Do nothing: the version before does not read the table."""
