"""Judge names and keys of metadata by an expression that takes a tenth of the time, and changes of bots only where one
can matter.

Both forms of the condition hold for the same names, and both triggers record the same changes. Each table is locked
from the look at its rows to the end of the upgrade; only `job_metadata`, the last, can be large. The processes of the
version before work with the result, but wait meanwhile, so stop them first, as for any upgrade.
"""

from alembic import op

from schema import sql
from schema.tables.columns import name_form
from schema.tables.jobs import METADATA_KEY_FORM

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

#: Table, constraint, and its condition.
FORMS = (
    ("instances", "instances_name_form", name_form("name")),
    ("instances", "instances_pool_form", name_form("pool")),
    ("cohorts", "cohorts_name_form", name_form("name")),
    ("schedules", "schedules_name_form", name_form("name")),
    ("accounts", "accounts_unit_form", name_form("unit")),
    ("job_classes", "job_classes_name_form", name_form("name")),
    ("service_levels", "service_levels_name_form", name_form("name")),
    ("usage_meters", "usage_meters_name_form", name_form("name")),
    ("bots", "bots_name_form", name_form("name")),
    ("bots", "bots_pool_form", name_form("pool")),
    ("graphs", "graphs_name_form", name_form("name")),
    ("job_metadata", "job_metadata_key_form", METADATA_KEY_FORM),
)


def upgrade() -> None:
    for table, constraint, condition in FORMS:
        op.execute(
            f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {constraint},"
            f" ADD CONSTRAINT {constraint} CHECK ({condition})"
        )
    sql.load(op.get_bind(), "functions/mark_bot_change")


def downgrade() -> None:
    """Do nothing: the version before works with both."""
