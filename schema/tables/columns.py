"""The MetaData of all tables, column helpers that several tables share, and storage parameters.

Storage parameters are for tables whose rows change often. A fill factor below 100 leaves room on each page, so that a
changed row stays on its page and its index entries stay valid. A scale factor of 0.01 starts a vacuum when 1 % of the
rows are dead instead of 20 %. A cost delay of 4 ms instead of 2 makes a vacuum of a large table take twice as long, and
slows other work less.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Identity, Integer, MetaData, event, text
from sqlalchemy.dialects.postgresql import TIMESTAMP

from schema.sql import SCHEMA

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={"pk": "%(table_name)s_pkey"},
)

TIME = TIMESTAMP(timezone=True)
NOW = text("now()")
NO_LABELS = text("'{}'::text[]")


def name_form(column: str = "name") -> str:
    """The SQL condition that a column holds a legal name.

    Every change of a row judges it again. A bound on the repetition would take the server ten times as long.
    """
    return f"{column} ~ '^[a-z0-9][a-z0-9._-]*$' AND length({column}) <= 63"


def identity(kind: type[BigInteger] | type[Integer] = BigInteger) -> Column[int]:
    """An `id` column that the database numbers."""
    return Column("id", kind, Identity(), primary_key=True)


#: Table → storage parameters. A table that is not listed has those of the server.
STORAGE: Mapping[str, Mapping[str, float]] = {
    "jobs": {
        "autovacuum_vacuum_scale_factor": 0.01,
        "autovacuum_analyze_scale_factor": 0.02,
        "fillfactor": 45,
        "autovacuum_vacuum_cost_delay": 4,
    },
    "leases": {"autovacuum_vacuum_scale_factor": 0.01, "fillfactor": 45, "autovacuum_vacuum_cost_delay": 4},
    "stored_events": {"autovacuum_vacuum_cost_delay": 4},
    "job_payloads": {"autovacuum_vacuum_cost_delay": 4},
    "bots": {"autovacuum_vacuum_scale_factor": 0.01, "fillfactor": 20},
    "bot_success": {"fillfactor": 50, "autovacuum_vacuum_scale_factor": 0.01},
    "counters": {"autovacuum_vacuum_scale_factor": 0.01, "fillfactor": 25},
    "quotas": {"fillfactor": 50, "autovacuum_vacuum_scale_factor": 0.01},
    "rate_buckets": {"fillfactor": 50, "autovacuum_vacuum_scale_factor": 0.01},
    "graph_nodes": {"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.01},
}


@event.listens_for(metadata, "after_create")
def _set_parameters(_: object, connection: Connection, **__: Any) -> None:
    for table, parameters in STORAGE.items():
        listed = ", ".join(f"{name} = {value:g}" for name, value in parameters.items())
        connection.exec_driver_sql(f"ALTER TABLE {SCHEMA}.{table} SET ({listed})")
