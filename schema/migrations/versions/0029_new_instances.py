"""The policy of who may make instances, and `intern_instance`, which follows it."""

from alembic import op

from schema import sql
from schema.tables.tenancy import tenancy_policy

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    tenancy_policy.create(op.get_bind(), checkfirst=True)
    sql.load(op.get_bind(), "functions/intern_instance")


def downgrade() -> None:
    """Drop the policy. The function of the version before does not ask for it."""
    tenancy_policy.drop(op.get_bind(), checkfirst=True)
