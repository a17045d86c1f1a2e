"""another pool -> nothing queued: a new, private database gets what operators have set in another one.

Only simulations do this. Jobs and leases are not copied.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.sql import SCHEMA

#: The tables of what operators have set, in an order in which they can be filled; what of them is read as it was at the
#: begin, because a simulation begins with nothing in use.
IN_FORCE: Mapping[str, Mapping[str, Any]] = {
    "cohorts": {},
    "instances": {"draining": False, "drain_deadline": None},
    "tenancy_policy": {},
    "quotas": {"usage": 0},
    "accounts": {"lift": 0, "demand_at": "-infinity", "lifted_at": "-infinity"},
    "limit_patterns": {},
    "rate_buckets": {},
    "counters": {"used": 0, "charged_at": None},
    "job_classes": {},
    "class_reserves": {},
    "service_levels": {},
    "scheduling": {},
    "windows": {"meter": None, "usage_threshold": None},
    "success_policy": {},
    # So a configuration can remove what another one has declared.
    "declarations": {},
}
#: Which rows of a table are read. Other counters are made by the jobs that use them.
_AMONG = {"counters": "most IS NOT NULL OR slots IS NOT NULL"}
_READ = {
    table: Statement(
        f"SELECT coalesce(jsonb_agg(to_jsonb(t) || CAST(:reset AS jsonb)), '[]')::text FROM {table} t"
        f" WHERE {_AMONG.get(table, 'true')}"
    )
    for table in IN_FORCE
}
_COLUMNS = Statement("""
SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
WHERE attrelid = CAST(:name AS regclass) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
""")
_SEQUENCES = Statement(f"""
SELECT c.relname AS table_name, a.attname AS column_name FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = '{SCHEMA}'::regnamespace AND c.relname = ANY (CAST(:names AS text[])) AND a.attidentity <> ''
""")


def read_in_force(connection: Connection) -> dict[str, str]:
    """Return the rows of the tables of what operators have set, as JSON by the name of the table."""
    return {
        table: str(connection.execute(_READ[table], {"reset": to_json(dict(reset)).decode()}).scalar_one())
        for table, reset in IN_FORCE.items()
    }


def put_in_force(connection: Connection, kept: Mapping[str, str]) -> None:
    """Put into a new database what `read_in_force` returned, in place of what is there. Buckets of rates are full."""
    for table, rows in kept.items():
        columns = connection.execute(_COLUMNS, {"name": table}).scalar_one()
        connection.execute_sql(f"DELETE FROM {table}")
        filled = Statement(
            f"INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE"
            f" SELECT {columns} FROM jsonb_populate_recordset(NULL::{table}, CAST(:rows AS jsonb))"
        )
        connection.execute(filled, {"rows": rows})
    connection.execute_sql("UPDATE rate_buckets SET tokens = burst, refilled_at = now()")
    for row in connection.execute(_SEQUENCES, {"names": list(kept)}):
        name, column = row.table_name, row.column_name
        sequence, following = f"pg_get_serial_sequence('{name}', '{column}')", f"SELECT max({column}) + 1 FROM {name}"
        connection.execute_sql(f"SELECT setval({sequence}, ({following}), false)")
