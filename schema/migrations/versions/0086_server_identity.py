"""Add `server_identity`: the cluster in which the database lives, so that a restored dump is noticed."""

from alembic import op

from schema import sql

revision = "0086"
down_revision = "0085"
branch_labels = None
depends_on = None

TABLE = """
CREATE TABLE IF NOT EXISTS server_identity (
    is_only boolean NOT NULL DEFAULT true, system_identifier bigint, table_oid bigint NOT NULL,
    fences_from bigint NOT NULL DEFAULT 0, at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT server_identity_pkey PRIMARY KEY (is_only),
    CONSTRAINT server_identity_is_only CHECK (is_only))
"""
ROW = """
INSERT INTO server_identity (system_identifier, table_oid)
VALUES (server_identifier(), CAST(CAST('server_identity' AS regclass) AS oid)) ON CONFLICT DO NOTHING
"""


def upgrade() -> None:
    op.execute(TABLE)
    sql.load(op.get_bind(), "functions/server_identifier")
    op.execute(ROW)


def downgrade() -> None:
    """Do nothing: the version before does not read the table."""
