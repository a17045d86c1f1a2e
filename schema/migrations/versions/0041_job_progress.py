"""Add `job_progress`: how far a running job says that it is."""

from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE IF NOT EXISTS job_progress (
            job_id bigint NOT NULL, fence bigint NOT NULL, number bigint NOT NULL, share double precision NOT NULL,
            text text NOT NULL, at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT job_progress_pkey PRIMARY KEY (job_id),
            CONSTRAINT job_progress_share_bounded CHECK (share >= 0 AND share <= 1),
            CONSTRAINT job_progress_text_bounded CHECK (length(text) <= 200))
    """)


def downgrade() -> None:
    """Remove the table. Whoever runs tells its progress again."""
    op.execute("DROP TABLE IF EXISTS job_progress")
