"""Keep the metadata of submissions that join a job, so that lists by metadata find the job for them too."""

from alembic import op

from schema import sql

revision = "0071"
down_revision = "0070"
branch_labels = None
depends_on = None

CHANGES = (
    """
    CREATE TABLE IF NOT EXISTS submission_metadata (
        submission uuid NOT NULL, job_id bigint NOT NULL, instance integer NOT NULL, key text NOT NULL,
        value text NOT NULL,
        CONSTRAINT submission_metadata_pkey PRIMARY KEY (submission, key),
        CONSTRAINT submission_metadata_key_form CHECK (key ~ '^[A-Za-z0-9_.:/-]+$' AND length(key) <= 64),
        CONSTRAINT submission_metadata_value_bounded CHECK (octet_length(value) <= 256))
    """,
    "CREATE INDEX IF NOT EXISTS submission_metadata_of_job ON submission_metadata (job_id, key, value)",
    "CREATE INDEX IF NOT EXISTS submission_metadata_of_value ON submission_metadata (instance, key, value, job_id)",
)


def upgrade() -> None:
    for change in CHANGES:
        op.get_bind().exec_driver_sql(change)
    sql.load(op.get_bind(), "functions/submit_or_join")


def downgrade() -> None:
    """Do nothing: the version before does not read the table."""
