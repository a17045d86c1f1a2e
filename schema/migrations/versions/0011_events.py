"""Let rows of payloads and leases tell submits, grants, acknowledgements and ends: `job_events` becomes a view.

What it held stays as it is, as stored events. Processes of the version before that still run read the view, and what
they insert into it is stored.
"""

from alembic import op

from schema import sql
from schema.tables import SCHEMA

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TOLD_BY_LEASES = {
    "granted_event": "bigint",
    "acknowledged_event": "bigint",
    "ended_event": "bigint",
    "decision": "jsonb",
    "acknowledged_by": "text",
    "ended_by": "text",
    "ended_from": "text",
    "ended_to": "text",
    "verdict": "text",
    "report": "jsonb",
}
_RENAME = f"""
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_class WHERE oid = to_regclass('{SCHEMA}.job_events') AND relkind = 'r') THEN
        ALTER TABLE {SCHEMA}.job_events RENAME TO stored_events;
        ALTER INDEX {SCHEMA}.job_events_pkey RENAME TO stored_events_pkey;
        ALTER SEQUENCE {SCHEMA}.job_events_id_seq RENAME TO stored_events_id_seq;
    END IF;
END $$
"""


def upgrade() -> None:
    columns = ", ".join(f"ADD COLUMN IF NOT EXISTS {name} {kind}" for name, kind in _TOLD_BY_LEASES.items())
    op.execute(f"ALTER TABLE leases {columns}")
    op.execute("ALTER TABLE job_payloads ADD COLUMN IF NOT EXISTS submitted_by text")
    op.execute("ALTER TABLE job_payloads ADD COLUMN IF NOT EXISTS origin jsonb")
    op.execute(_RENAME)
    functions = ("settle", "submit", "submit_alone", "submit_graph", "submit_or_join", "store_event")
    sql.load(op.get_bind(), *(f"functions/{name}" for name in functions), "views/job_events", "views/live")


def downgrade() -> None:
    """Do nothing: the version before reads the view and writes through it."""
