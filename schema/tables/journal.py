"""Tables of what is kept when jobs are deleted: a row for each attempt, the queues that these rows name, bot sessions.

Retention writes them in the statement that deletes the jobs (`schema/moves/retention.py`), so that a job is in `jobs`
or in `journal` and never in both. Nothing is decided by them: `leasehold simulate` and forecasts read them. No row has
payloads, outputs, results or tokens.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from schema.tables.columns import TIME, identity, metadata

# One row for each attempt of a job that is gone, and one with fence 0 for a job that had none. It is partitioned by the
# UTC day of `finished_at`, the end of the job; `keep_journal_days` makes and drops the days.
#
# `job` is null but in the row of the last attempt, which `is_last` marks: there it has what the request of the job said
# besides its queue and the columns, without what is usual. `seconds` is the run time of the command, as the bot told
# it; the rest of the time from `granted_at` to `ended_at` is the overhead of the lease. `withdrawn`: it was cancelled
# while it waited. `class` and `owner` are those of the constraints. `bot_kind` is the id of the kind
# that the bot had when the job was deleted.
journal = Table(
    "journal",
    metadata,
    Column("finished_at", TIME, nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("queued_at", TIME, nullable=False),
    Column("granted_at", TIME),
    Column("ended_at", TIME),
    Column("seconds", Double),
    Column("queue", Integer, nullable=False),
    Column("cohort", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("units", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("bot_kind", Integer),
    Column("is_last", Boolean, nullable=False),
    Column("withdrawn", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("class", Text),
    Column("owner", Text),
    Column("verdict", Text),
    Column("stop_reason", Text),
    Column("bot", Text),
    Column("job", JSONB),
    PrimaryKeyConstraint("finished_at", "job_id", "fence"),
    CheckConstraint("(fence = 0) = (granted_at IS NULL)", name="journal_attempt_has_a_grant"),
    CheckConstraint("ended_at >= granted_at", name="journal_ends_after_its_grant"),
    postgresql_partition_by="RANGE (finished_at)",
)

# What the jobs of a queue asked for, of each queue that the journal names. `used_at`: the end
# of one of its latest jobs, at most a day before that of the last.
journal_queues = Table(
    "journal_queues",
    metadata,
    Column("queue", Integer, autoincrement=False, nullable=False),
    Column("instance", Text, nullable=False),
    Column("cohort", Text, nullable=False),
    Column("properties", JSONB, nullable=False),
    Column("preferred_properties", JSONB),
    Column("terms", JSONB),
    Column("used_at", TIME, nullable=False),
    PrimaryKeyConstraint("queue"),
    Index("journal_queues_by_use", "used_at"),
)

# Sessions of bots that are over. The statements that end a session write its row.
bot_sessions = Table(
    "bot_sessions",
    metadata,
    identity(),
    Column("bot", Text, nullable=False),
    Column("opened_at", TIME, nullable=False),
    Column("ended_at", TIME, nullable=False),
    Column("kind", Integer, nullable=False),
    Column("properties", JSONB, nullable=False),
    Column("exclusive", ARRAY(Text), nullable=False),
    Column("labels", ARRAY(Text), nullable=False),
    Column("instance", Text),
    Column("pool", Text),
    Column("priority", Integer, nullable=False),
    Column("capacity", Integer, nullable=False),
    CheckConstraint("ended_at >= opened_at", name="bot_sessions_end_after_their_begin"),
    Index("bot_sessions_by_end", "ended_at"),
)
