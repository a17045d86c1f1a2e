"""The tables as they are now. The migrations, replayed, must give the same (a test compares the catalogs).

Instances and platforms are small dictionaries whose rows are never deleted, so `jobs` and `leases` carry their ids
without foreign keys: on the hottest tables each would cost a lookup and a row lock per insert.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP, UUID

SCHEMA = "leasehold"

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={"pk": "%(table_name)s_pkey"},
)

NAME_FORM = "name ~ '^[a-z0-9][a-z0-9._-]{0,62}$'"
LIVE = "state IN ('pending', 'active', 'cancelling')"
READY = "state = 'queued' AND schedule_after IS NULL"
BACKOFF = "state = 'queued' AND schedule_after IS NOT NULL"

_time = TIMESTAMP(timezone=True)
_now = text("now()")


def _id(kind: type[BigInteger] | type[Integer] = BigInteger) -> Column[int]:
    return Column("id", kind, Identity(), primary_key=True)


instances = Table(
    "instances",
    metadata,
    _id(Integer),
    Column("name", Text, nullable=False),
    Column("created_at", _time, nullable=False, server_default=_now),
    UniqueConstraint("name", name="instances_name_key"),
    CheckConstraint(NAME_FORM, name="instances_name_form"),
)

platforms = Table(
    "platforms",
    metadata,
    _id(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("properties", JSONB, nullable=False),
    Column("created_at", _time, nullable=False, server_default=_now),
    UniqueConstraint("digest", name="platforms_digest_key"),
)

jobs = Table(
    "jobs",
    metadata,
    _id(),
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
    Column("created_at", _time, nullable=False, server_default=_now),
    Column("queued_at", _time, nullable=False, server_default=_now),
    Column("schedule_after", _time),
    Column("started_at", _time),
    Column("finished_at", _time),
    UniqueConstraint("public_id", name="jobs_public_id_key"),
    CheckConstraint(
        "state IN ('queued', 'leased', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled', 'dead')",
        name="jobs_state_known",
    ),
    CheckConstraint(
        "(finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled', 'dead'))",
        name="jobs_finished_at_iff_final",
    ),
    CheckConstraint("schedule_after IS NULL OR state = 'queued'", name="jobs_backoff_only_queued"),
    CheckConstraint("priority BETWEEN -1000 AND 1000", name="jobs_priority_range"),
    CheckConstraint("octet_length(label) <= 64", name="jobs_label_bounded"),
    CheckConstraint("octet_length(locality_hint) <= 200", name="jobs_locality_hint_bounded"),
    CheckConstraint("units >= 1", name="jobs_units_positive"),
    CheckConstraint("max_attempts >= 1", name="jobs_max_attempts_positive"),
    CheckConstraint("attempts BETWEEN 0 AND max_attempts", name="jobs_attempts_bounded"),
    CheckConstraint("kills BETWEEN 0 AND 3", name="jobs_kills_bounded"),
    CheckConstraint("fence >= 0", name="jobs_fence_positive"),
    CheckConstraint("result_fence IS NULL OR result_fence = fence", name="jobs_result_is_current"),
    CheckConstraint("timeout_seconds > 0 AND timeout_seconds <= 31536000", name="jobs_timeout_finite"),
    Index(
        "jobs_ready_priority",
        "instance", "platform", "priority", "queued_at", "id",
        postgresql_where=text(READY),
    ),
    Index("jobs_ready_age", "instance", "platform", "queued_at", "id", postgresql_where=text(READY)),
    Index(
        "jobs_backoff_priority",
        "instance", "platform", "priority", "queued_at", "id",
        postgresql_where=text(BACKOFF),
    ),
    Index("jobs_backoff_due", "schedule_after", postgresql_where=text(f"{BACKOFF} AND considered > 0")),
    Index("jobs_retry_due", "schedule_after", postgresql_where=text(f"{BACKOFF} AND considered = 0")),
    Index("jobs_finished", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
)  # fmt: skip

job_payloads = Table(
    "job_payloads",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("result", JSONB),
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
    PrimaryKeyConstraint("instance", "key"),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 200", name="submit_keys_key_bounded"),
    Index("submit_keys_of_job", "job_id"),
)

bots = Table(
    "bots",
    metadata,
    _id(),
    Column("name", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("session", LargeBinary),
    Column("sync_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("status", Text, nullable=False, server_default="gone"),
    Column("draining", Boolean, nullable=False, server_default=text("false")),
    Column("closing", Boolean, nullable=False, server_default=text("false")),
    Column("instance", Integer),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("capacity", Integer, nullable=False, server_default=text("0")),
    Column("in_use", Integer, nullable=False, server_default=text("0")),
    Column("properties", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("sample_key", Double, nullable=False, server_default=func.random()),
    Column("opened_at", _time),
    Column("expires_at", _time),
    Column(
        "free",
        Boolean,
        Computed("status = 'ok' AND NOT draining AND NOT closing AND in_use < capacity", persisted=True),
    ),
    UniqueConstraint("name", name="bots_name_key"),
    CheckConstraint(NAME_FORM, name="bots_name_form"),
    CheckConstraint("status IN ('ok', 'unhealthy', 'draining', 'gone')", name="bots_status_known"),
    CheckConstraint("0 <= in_use AND in_use <= capacity", name="bots_capacity_kept"),
    CheckConstraint("(session IS NULL) = (status = 'gone')", name="bots_session_iff_present"),
    CheckConstraint("(expires_at IS NULL) = (session IS NULL)", name="bots_expiry_with_session"),
    CheckConstraint("priority BETWEEN -1000 AND 1000", name="bots_priority_range"),
    CheckConstraint("sample_key >= 0 AND sample_key < 1", name="bots_sample_key_range"),
    Index("bots_present", "id", postgresql_where=text("status <> 'gone'")),
    Index("bots_free", "sample_key", postgresql_where=text("free")),
)

bot_answers = Table(
    "bot_answers",
    metadata,
    Column("bot_id", BigInteger, autoincrement=False, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("sync_seq", BigInteger, nullable=False),
    Column("answer", LargeBinary),
    PrimaryKeyConstraint("bot_id"),
)

bot_platforms = Table(
    "bot_platforms",
    metadata,
    Column("platform", Integer, nullable=False),
    Column("bot_id", BigInteger, nullable=False),
    Column("sample_key", Double, nullable=False),
    PrimaryKeyConstraint("platform", "bot_id"),
    Index("bot_platforms_sample", "platform", "sample_key", postgresql_include=["bot_id"]),
    Index("bot_platforms_of_bot", "bot_id"),
)

bot_localities = Table(
    "bot_localities",
    metadata,
    Column("bot_id", BigInteger, nullable=False),
    Column("hint", Text, nullable=False),
    Column("seq", BigInteger, Identity(), nullable=False),
    PrimaryKeyConstraint("bot_id", "hint"),
)

leases = Table(
    "leases",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("bot_id", BigInteger, nullable=False),
    Column("bot_epoch", BigInteger, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("state", Text, nullable=False, server_default="pending"),
    Column("units", Integer, nullable=False),
    Column("assigner", Text, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("stop_reason", Text),
    Column("granted_at", _time, nullable=False, server_default=_now),
    Column("delivered_at", _time),
    Column("acknowledged_at", _time),
    Column("due_at", _time),
    Column("ended_at", _time),
    PrimaryKeyConstraint("job_id", "fence"),
    CheckConstraint(
        "state IN ('pending', 'active', 'cancelling', 'completed', 'cancelled')", name="leases_state_known"
    ),
    CheckConstraint("(ended_at IS NOT NULL) = (state IN ('completed', 'cancelled'))", name="leases_ended_iff_over"),
    CheckConstraint("stop_reason IN ('cancel', 'unacknowledged', 'timeout')", name="leases_stop_reason_known"),
    CheckConstraint("units >= 1", name="leases_units_positive"),
    Index("leases_one_live_per_job", "job_id", unique=True, postgresql_where=text(LIVE)),
    Index("leases_live_of_bot", "bot_id", postgresql_where=text(LIVE)),
    Index("leases_live_due", "due_at", postgresql_where=text(f"{LIVE} AND due_at IS NOT NULL")),
)

job_events = Table(
    "job_events",
    metadata,
    _id(),
    Column("job_id", BigInteger, nullable=False),
    Column("at", _time, nullable=False, server_default=func.clock_timestamp()),
    Column("move", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("details", JSONB),
    Index("job_events_of_job", "job_id", "id"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("instance", Text),
    Column("bot", Text),
    Column("priority_ceiling", Integer),
    Column("properties", JSONB),
    Column("created_at", _time, nullable=False, server_default=_now),
    Column("expires_at", _time),
    Column("revoked_at", _time),
    PrimaryKeyConstraint("id"),
    CheckConstraint("kind IN ('submitter', 'bot', 'operator')", name="tokens_kind_known"),
)

ticks = Table(
    "ticks",
    metadata,
    Column("name", Text, nullable=False),
    Column("at", _time, nullable=False),
    Column("grace_until", _time, nullable=False),
    PrimaryKeyConstraint("name"),
)

audit = Table(
    "audit",
    metadata,
    _id(),
    Column("at", _time, nullable=False, server_default=func.clock_timestamp()),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("details", JSONB),
    Index("audit_of_actor", "actor", "action", "subject", "at"),
)
