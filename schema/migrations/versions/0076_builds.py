"""Count what builds ask of the farm door, for the page of builds."""

from alembic import op

revision = "0076"
down_revision = "0074"
branch_labels = None
depends_on = None

CHANGES = (
    """
    CREATE TABLE IF NOT EXISTS builds (
        instance integer NOT NULL, invocation text NOT NULL, tool text NOT NULL, cached bigint NOT NULL,
        joined bigint NOT NULL, made bigint NOT NULL, began_at timestamptz NOT NULL, seen_at timestamptz NOT NULL,
        CONSTRAINT builds_pkey PRIMARY KEY (instance, invocation))
    """,
    "CREATE INDEX IF NOT EXISTS builds_by_age ON builds (seen_at)",
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    """Do nothing: the version before does not read the table."""
