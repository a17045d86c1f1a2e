"""Tables of jobs, bots and leases, with all that belongs to them: payloads, outputs, keys, events, reservations.

The baseline revision creates all tables from this package; later revisions must lead to the same tables. `jobs` and
`leases` hold ids of instances, cohorts and platforms without foreign keys. Those rows are hardly ever deleted, and on
the most written tables each foreign key would cost a lookup and a row lock per insert.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

from schema import sql
from schema.tables.columns import NOW, TIME, identity, metadata

#: The check of a job's row, by the function in `schema/sql/checks/job_is_sound.sql`.
CHECK = """
job_is_sound(state, finished_at, schedule_after, fence, result_fence, priority, label, locality_hint, units,
    max_attempts, attempts, kills, evictions, dedup_key, timeout_seconds)
"""


@event.listens_for(metadata, "before_create")
def _load_checks(_: object, connection: Connection, **__: Any) -> None:
    sql.load_all(connection, "checks")


QUEUED = "state = 'queued'"
READY = "state = 'queued' AND schedule_after IS NULL AND constraint_set IS NULL"
GATED = "state = 'queued' AND schedule_after IS NULL AND constraint_set IS NOT NULL"
QUEUE = "cohort instance platform"
ORDER = "cohort priority queued_at id"
SHARED = "dedup_key IS NOT NULL AND state IN ('queued', 'parked', 'leased', 'running')"
BACKOFF = "state = 'queued' AND schedule_after IS NOT NULL"

platforms = Table(
    "platforms",
    metadata,
    identity(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("properties", JSONB, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    UniqueConstraint("digest", name="platforms_digest_key"),
)

jobs = Table(
    "jobs",
    metadata,
    identity(),
    Column("public_id", UUID(as_uuid=True), nullable=False, server_default=func.gen_random_uuid()),
    Column("instance", Integer, nullable=False),
    Column("platform", Integer, nullable=False),
    Column("label", Text, nullable=False, server_default=""),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("units", Integer, nullable=False, server_default=text("1")),
    Column("state", Text, nullable=False, server_default="queued"),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("result_fence", BigInteger),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", Integer, nullable=False, server_default=text("5")),
    Column("kills", Integer, nullable=False, server_default=text("0")),
    Column("considered", Integer, nullable=False, server_default=text("0")),
    Column("retry_failed", Boolean, nullable=False, server_default=text("false")),
    Column("timeout_seconds", Double),
    Column("locality_hint", Text),
    Column("reason", Text),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("queued_at", TIME, nullable=False, server_default=NOW),
    Column("schedule_after", TIME),
    Column("started_at", TIME),
    Column("finished_at", TIME),
    Column("cohort", Integer, nullable=False, server_default=text("0")),
    Column("evictions", Integer, nullable=False, server_default=text("0")),
    Column("queue_deadline", TIME),
    Column("dedup_key", Text),
    Column("abandoned_at", TIME),
    Column("constraint_set", Integer),
    Column("rank", Double),
    UniqueConstraint("public_id", name="jobs_public_id_key"),
    CheckConstraint(CHECK, name="jobs_sound"),
    Index("jobs_ready_priority", *f"{QUEUE} priority queued_at id".split(), postgresql_where=text(READY)),
    Index("jobs_ready_order", *ORDER.split(), postgresql_where=text(f"{READY} AND units >= 1")),
    Index("jobs_ready_units", *f"{QUEUE} units priority queued_at id".split(), postgresql_where=text(READY)),
    Index("jobs_constrained", *f"{QUEUE} constraint_set rank queued_at id".split(), postgresql_where=text(GATED)),
    Index("jobs_backoff_priority", *f"{QUEUE} priority queued_at id".split(), postgresql_where=text(BACKOFF)),
    Index("jobs_backoff_due", "schedule_after", postgresql_where=text(f"{BACKOFF} AND considered > 0")),
    Index("jobs_retry_due", "schedule_after", postgresql_where=text(f"{BACKOFF} AND considered = 0")),
    Index("jobs_queue_deadline", "queue_deadline", postgresql_where=text(f"{QUEUED} AND queue_deadline IS NOT NULL")),
    Index(
        "jobs_waiting_label",
        "label", "state", "instance", "priority",
        postgresql_where=text("state IN ('queued', 'parked') AND label <> ''"),
    ),
    Index("jobs_parked", "instance", "priority", postgresql_where=text("state = 'parked'")),
    Index("jobs_deferred", *["queued_at", "id", "instance"], postgresql_where=text("state = 'deferred'")),
    Index("jobs_dedup", "instance", "dedup_key", unique=True, postgresql_where=text(SHARED)),
    Index("jobs_finished", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
)  # fmt: skip

job_payloads = Table(
    "job_payloads",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("payload", JSONB, nullable=False),
    PrimaryKeyConstraint("job_id"),
)

job_outputs = Table(
    "job_outputs",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("job_id", "fence", "start"),
    CheckConstraint("start >= 0", name="job_outputs_start_positive"),
)

submit_keys = Table(
    "submit_keys",
    metadata,
    Column("instance", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("request_hash", LargeBinary, nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("follower", UUID(as_uuid=True)),
    PrimaryKeyConstraint("instance", "key"),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 200", name="submit_keys_key_bounded"),
    Index("submit_keys_of_job", "job_id"),
)

job_events = Table(
    "job_events",
    metadata,
    Column("id", BigInteger, Identity(), nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("at", TIME, nullable=False, server_default=func.clock_timestamp()),
    Column("move", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("details", JSONB),
    PrimaryKeyConstraint("job_id", "id"),
)

job_followers = Table(
    "job_followers",
    metadata,
    Column("public_id", UUID(as_uuid=True), nullable=False, server_default=func.gen_random_uuid()),
    Column("job_id", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("cancelled_at", TIME),
    PrimaryKeyConstraint("public_id"),
    Index("job_followers_of_job", "job_id"),
)
