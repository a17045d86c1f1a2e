"""Keep the number of slots of an instance in the row that counts its running jobs; load `charge`, which checks it.

Assigners of the version before exceed no slots, but repeat transactions in vain while an instance is at its slots, and
slots that they or their commands set are not looked at. So stop them first, as for any upgrade.
"""

from alembic import op

from schema import sql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# Rows of slots stay, without a limit, because live leases have taken of them.
STATEMENTS = (
    "ALTER TABLE counters ADD COLUMN IF NOT EXISTS slots numeric(30, 6)",
    "ALTER TABLE counters DROP CONSTRAINT IF EXISTS counters_slots_positive",
    "ALTER TABLE counters ADD CONSTRAINT counters_slots_positive CHECK (slots >= 0 AND slots <> 'NaN')",
    """
    INSERT INTO counters (name, slots)
    SELECT regexp_replace(name, 'slots$', 'jobs'), most FROM counters
    WHERE name LIKE 'instance:%' AND split_part(name, ':', 3) = 'slots' AND most IS NOT NULL
    ORDER BY name COLLATE "C" ON CONFLICT (name) DO UPDATE SET slots = excluded.slots
    """,
    """
    UPDATE counters SET most = NULL
    WHERE name LIKE 'instance:%' AND split_part(name, ':', 3) = 'slots' AND most IS NOT NULL
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    sql.load(op.get_bind(), "functions/charge")


def downgrade() -> None:
    """Do nothing: the slots have to be set again for the version before."""
