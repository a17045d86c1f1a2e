"""Tables of jobs, bots and leases, with all that belongs to them: payloads, outputs, keys, events.

The baseline revision creates all tables from this package; later revisions must lead to the same tables. `jobs` and
`leases` hold ids of queues, instances and cohorts without foreign keys. Those rows are hardly ever deleted, and on
the most written tables each foreign key would cost a lookup and a row lock per insert.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Connection,
    Double,
    ForeignKey,
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
from sqlalchemy.dialects.postgresql import JSON, JSONB, UUID

from schema import sql
from schema.sql import OF_CLIENTS
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
READY = f"{QUEUED} AND schedule_after IS NULL AND units >= 1"
FRONT = f"{QUEUED} AND schedule_after IS NULL AND NOT constrained AND priority >= -1000"
CONSTRAINED_FRONT = f"{QUEUED} AND schedule_after IS NULL AND constrained AND priority >= -1000"
#: Jobs that have run an action of the farm door, whose keys nobody else may use.
OF_ACTION = "state = 'succeeded' AND dedup_key LIKE 'a:%'"
SHARED = "dedup_key IS NOT NULL AND state IN ('queued', 'parked', 'leased', 'running')"
BACKOFF = f"{QUEUED} AND schedule_after IS NOT NULL"

# Requirement sets. Jobs that prefer more than they require have a set of their own, with the set of what they require
# and prefer together as `preferred`: its bots are those of either, because a bot may keep properties for jobs that ask
# for them.
platforms = Table(
    "platforms",
    metadata,
    identity(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("properties", JSONB, nullable=False),
    Column("preferred", Integer, ForeignKey("platforms.id")),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    # Upkeep has seen to it that no kind of bots is missing in `kind_platforms`.
    Column("linked", Boolean, nullable=False, server_default=text("false")),
    UniqueConstraint("digest", name="platforms_digest_key"),
    Index("platforms_of_preferred", "preferred", postgresql_where=text("preferred IS NOT NULL")),
    Index("platforms_unlinked", "id", postgresql_where=text("NOT linked")),
)

# One row for each kind of job: all jobs of a queue are alike for the choice of a bot. `preferred` is the requirement
# set that also has the properties which the jobs prefer. Where `required` is set, jobs insist on a preferred bot:
# `platform` is the preferred set then, and the job is moved to the queue that only requires the set `required` when its
# wait is over (`preference_waits`). A queue rests as a whole until `schedule_after` when no bot could take a job of it,
# `looks` times in a row. Upkeep marks queues without ready jobs by `idle_since`, and deletes them later
# (`schema/moves/retention.py`).
queues = Table(
    "queues",
    metadata,
    identity(Integer),
    Column("cohort", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("platform", Integer, ForeignKey("platforms.id"), nullable=False),
    Column("units", Integer, nullable=False),
    Column("constraint_set", Integer, ForeignKey("constraint_sets.id")),
    Column("preferred", Integer, ForeignKey("platforms.id")),
    Column("required", Integer, ForeignKey("platforms.id")),
    Column("schedule_after", TIME),
    Column("looks", Integer, nullable=False, server_default=text("0")),
    Column("reason", Text),
    Column("idle_since", BigInteger),
    UniqueConstraint(
        "instance", "cohort", "platform", "units", "constraint_set", "preferred", "required",
        name="queues_key", postgresql_nulls_not_distinct=True,
    ),
    # By this one alone queues are looked up: see `schema/sql/functions/intern_queue.sql`.
    Index(
        "queues_by_key", text("(ARRAY[constraint_set, platform, instance, units, cohort, preferred, required])")
    ),
    CheckConstraint("required IS NULL OR (preferred IS NOT NULL AND platform = preferred)", name="queues_insist"),
    CheckConstraint("looks >= 0 AND (looks > 0 OR schedule_after IS NULL)", name="queues_rest_after_looks"),
    Index("queues_resting", "schedule_after", postgresql_where=text("schedule_after IS NOT NULL")),
    Index("queues_of_platform", "platform"),
    Index("queues_of_preferred", "preferred", postgresql_where=text("preferred IS NOT NULL")),
    Index("queues_of_required", "required", postgresql_where=text("required IS NOT NULL")),
    Index("queues_of_constraint_set", "constraint_set", postgresql_where=text("constraint_set IS NOT NULL")),
)  # fmt: skip

# `cohort`, `instance`, `platform`, `units`, `preferred` and `constrained` repeat what the job's queue says, so that
# neither a pick nor a grant looks the queue of each job up. What every job has comes first, the widest columns before
# the others: then rows have no gaps, and their columns are found by fixed offsets. The first ones up to `queued_at`
# differ from job to job, those after them mostly not: the first change of a page after a checkpoint logs the whole
# page, which is compressed sooner where alike bytes lie together. What a grant changes lies together, because of a new
# version the server logs what is between the first and the last change.
jobs = Table(
    "jobs",
    metadata,
    identity(),
    Column("public_id", UUID(as_uuid=True), nullable=False, server_default=func.gen_random_uuid()),
    Column("queue", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("platform", Integer, nullable=False),
    Column("cohort", Integer, nullable=False, server_default=text("0")),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("queued_at", TIME, nullable=False, server_default=NOW),
    Column("rank", Double, nullable=False, server_default=text("0")),
    Column("units", Integer, nullable=False, server_default=text("1")),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", Integer, nullable=False, server_default=text("5")),
    Column("kills", Integer, nullable=False, server_default=text("0")),
    Column("evictions", Integer, nullable=False, server_default=text("0")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("constrained", Boolean, nullable=False, server_default=text("false")),
    Column("retry_failed", Boolean, nullable=False, server_default=text("false")),
    Column("state", Text, nullable=False, server_default="queued"),
    Column("label", Text, nullable=False, server_default=""),
    Column("schedule_after", TIME),
    Column("started_at", TIME),
    Column("finished_at", TIME),
    Column("abandoned_at", TIME),
    Column("queue_deadline", TIME),
    Column("timeout_seconds", Double),
    Column("result_fence", BigInteger),
    Column("locality_hint", Text),
    Column("reason", Text),
    Column("dedup_key", Text),
    Column("preferred", Integer),
    UniqueConstraint("public_id", name="jobs_public_id_key"),
    CheckConstraint(CHECK, name="jobs_sound"),
    Index("jobs_of_queue", "constrained", "queue", "rank", "queued_at", "id", postgresql_where=text(READY)),
    Index(
        "jobs_front",
        "cohort", "rank", "queued_at", "id",
        postgresql_include=["queue"],
        postgresql_where=text(FRONT),
    ),
    Index(
        "jobs_constrained_front",
        "cohort", "rank", "queued_at", "id",
        postgresql_include=["queue"],
        postgresql_where=text(CONSTRAINED_FRONT),
    ),
    Index("jobs_retry_due", "schedule_after", postgresql_where=text(BACKOFF)),
    Index("jobs_queue_deadline", "queue_deadline", postgresql_where=text(f"{QUEUED} AND queue_deadline IS NOT NULL")),
    Index(
        "jobs_waiting_label",
        "label", "state", "instance", "priority",
        postgresql_where=text("state IN ('queued', 'parked') AND label <> ''"),
    ),
    Index("jobs_parked", "instance", "priority", postgresql_where=text("state = 'parked'")),
    Index("jobs_deferred", *["queued_at", "id", "instance"], postgresql_where=text("state = 'deferred'")),
    Index("jobs_dedup", "instance", "dedup_key", unique=True, postgresql_where=text(SHARED)),
    Index("jobs_of_action", "dedup_key", "id", postgresql_where=text(OF_ACTION)),
    Index("jobs_finished", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
    Index("jobs_finished_by_state", "state", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
)  # fmt: skip

# Jobs that insist on a preferred bot until a time, and the seconds for which they do so after they were queued.
preference_waits = Table(
    "preference_waits",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("until", TIME, nullable=False),
    PrimaryKeyConstraint("job_id"),
    CheckConstraint("seconds > 0", name="preference_waits_positive"),
    Index("preference_waits_until", "until"),
)

# `submitted_by` and `origin` are the actor and the details of the job's submit, for the view `job_events`. They are
# null if the submit is among the stored events.
job_payloads = Table(
    "job_payloads",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("submitted_by", Text),
    Column("origin", JSONB),
    PrimaryKeyConstraint("job_id"),
    # Which job was made like which: few are.
    Index("job_payloads_like", text("(origin->>'from')"), postgresql_where=text("(origin->>'from') IS NOT NULL")),
)

#: The condition of a legal key, without a bound on the repetition as in `name_form`.
METADATA_KEY_FORM = "key ~ '^[A-Za-z0-9_.:/-]+$' AND length(key) <= 64"

# A row for each key, none for a job without. They are apart from the jobs because they never change: as a column, each
# change of the job would write them again, and all entries of their index.
job_metadata = Table(
    "job_metadata",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("job_id", "key"),
    CheckConstraint(METADATA_KEY_FORM, name="job_metadata_key_form"),
    CheckConstraint("octet_length(value) <= 256", name="job_metadata_value_bounded"),
    Index("job_metadata_of_value", "instance", "key", "value", "job_id"),
)

# The metadata of submissions that have joined a job.
submission_metadata = Table(
    "submission_metadata",
    metadata,
    Column("submission", UUID(as_uuid=True), nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("submission", "key"),
    CheckConstraint(METADATA_KEY_FORM, name="submission_metadata_key_form"),
    CheckConstraint("octet_length(value) <= 256", name="submission_metadata_value_bounded"),
    Index("submission_metadata_of_job", "job_id", "key", "value"),
    Index("submission_metadata_of_value", "instance", "key", "value", "job_id"),
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

# JSON that commands leave, as the text that they wrote. `size` bounds an answer with many results without reading
# them.
job_results = Table(
    "job_results",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("size", Integer, Computed("octet_length(CAST(result AS text))", persisted=True), nullable=False),
    Column("result", JSON, nullable=False),
    PrimaryKeyConstraint("job_id"),
    CheckConstraint("octet_length(CAST(result AS text)) <= 65536", name="job_results_result_bounded"),
)

job_checkpoints = Table(
    "job_checkpoints",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("checkpoint", JSON, nullable=False),
    PrimaryKeyConstraint("job_id"),
    CheckConstraint("octet_length(CAST(checkpoint AS text)) <= 65536", name="job_checkpoints_checkpoint_bounded"),
)

job_progress = Table(
    "job_progress",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("share", Double, nullable=False),
    Column("text", Text, nullable=False),
    Column("at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("job_id"),
    CheckConstraint("share >= 0 AND share <= 1", name="job_progress_share_bounded"),
    CheckConstraint("length(text) <= 200", name="job_progress_text_bounded"),
)

# A key outlives its job: `public_id` is what its submit has answered.
submit_keys = Table(
    "submit_keys",
    metadata,
    Column("instance", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("request_hash", LargeBinary, nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("public_id", UUID(as_uuid=True), nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("instance", "key"),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 200", name="submit_keys_key_bounded"),
    Index("submit_keys_by_age", text(OF_CLIENTS), "created_at"),
)

# A deduplication key that a job keeps until a time, also when it has succeeded. `public_id` is what its submit has
# answered. Retention deletes the row when the time is over, or with a job that has not succeeded.
unique_keys = Table(
    "unique_keys",
    metadata,
    Column("instance", Integer, nullable=False),
    Column("dedup_key", Text, nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("public_id", UUID(as_uuid=True), nullable=False),
    Column("until", TIME, nullable=False),
    PrimaryKeyConstraint("instance", "dedup_key"),
    CheckConstraint("octet_length(dedup_key) BETWEEN 1 AND 200", name="unique_keys_key_bounded"),
    Index("unique_keys_until", "until"),
    Index("unique_keys_of_job", "job_id"),
)

# What has happened to jobs and is not told by the rows of jobs and leases: the view `job_events` has the whole history.
stored_events = Table(
    "stored_events",
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

# What clients of the farm door have asked for, by the invocation that they name: actions answered from the cache, that
# have joined a job, and that have made one.
builds = Table(
    "builds",
    metadata,
    Column("instance", Integer, nullable=False),
    Column("invocation", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("cached", BigInteger, nullable=False),
    Column("joined", BigInteger, nullable=False),
    Column("made", BigInteger, nullable=False),
    Column("began_at", TIME, nullable=False),
    Column("seen_at", TIME, nullable=False),
    PrimaryKeyConstraint("instance", "invocation"),
    Index("builds_by_age", "seen_at"),
)

# Until when submissions count that do so only while a client watches them.
submission_watches = Table(
    "submission_watches",
    metadata,
    Column("submission", UUID(as_uuid=True), nullable=False),
    Column("watched_until", TIME, nullable=False),
    PrimaryKeyConstraint("submission"),
    Index("submission_watches_until", "watched_until"),
)
