"""Make the secret that hides row ids in cursors."""

from alembic import op

from schema.tables.tenancy import secrets

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    secrets.create(op.get_bind(), checkfirst=True)
    op.execute("INSERT INTO secrets (name) VALUES ('cursor') ON CONFLICT DO NOTHING")


def downgrade() -> None:
    op.drop_table("secrets")
