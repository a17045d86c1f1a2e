"""Keep keys of submits by themselves: with the id that was answered and the time of the submit, by which they leave.

The age of keys that are there begins now. The table is locked first, so that the rows of submits that
were open are seen.
"""

from alembic import op

from schema import sql

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

FUNCTIONS = ("submit_many", "submit_alone", "submit_deduplicated")


def upgrade() -> None:
    op.execute("""
    DO $$ BEGIN
        IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'submit_keys'::regclass AND attname = 'follower') THEN
            LOCK TABLE submit_keys IN ACCESS EXCLUSIVE MODE;
            UPDATE submit_keys k SET follower = j.public_id FROM jobs j WHERE j.id = k.job_id AND k.follower IS NULL;
            DELETE FROM submit_keys WHERE follower IS NULL;
            ALTER TABLE submit_keys RENAME COLUMN follower TO public_id;
            ALTER TABLE submit_keys ALTER COLUMN public_id SET NOT NULL;
        END IF;
    END $$
    """)
    op.execute("ALTER TABLE submit_keys ADD COLUMN IF NOT EXISTS created_at timestamptz NOT NULL DEFAULT now()")
    op.execute("DROP INDEX IF EXISTS submit_keys_of_job")
    op.execute("CREATE INDEX IF NOT EXISTS submit_keys_by_age ON submit_keys (starts_with(key, 'auto:'), created_at)")
    for name in FUNCTIONS:
        sql.load(op.get_bind(), f"functions/{name}")


def downgrade() -> None:
    """Go back to keys that live as long as their jobs; the functions of that version have to be loaded again."""
    op.execute("DELETE FROM submit_keys k WHERE NOT EXISTS (SELECT FROM jobs j WHERE j.id = k.job_id)")
    op.execute("ALTER TABLE submit_keys ALTER COLUMN public_id DROP NOT NULL, DROP COLUMN created_at")
    op.execute("ALTER TABLE submit_keys RENAME COLUMN public_id TO follower")
    op.execute("CREATE INDEX submit_keys_of_job ON submit_keys (job_id)")
