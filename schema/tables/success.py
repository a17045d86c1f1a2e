"""Tables of the success of bots: the policy, counts per bot and label, and the bots charged with failures.

While `success_policy` is empty, nothing is counted.
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
    func,
    text,
)

from schema.tables.columns import TIME, metadata

ZERO = text("0")

success_policy = Table(
    "success_policy",
    metadata,
    Column("one", Boolean, nullable=False, server_default=text("true")),
    Column("memory", Double, nullable=False),
    Column("probation_failures", Integer, nullable=False),
    Column("probation_seconds", Double, nullable=False),
    PrimaryKeyConstraint("one"),
    CheckConstraint("one", name="success_policy_one_row"),
    CheckConstraint("memory >= 1 AND memory <= 1000000", name="success_policy_memory_range"),
    CheckConstraint("probation_failures >= 0", name="success_policy_failures_positive"),
    CheckConstraint("probation_seconds >= 0 AND probation_seconds <= 31536000", name="success_policy_probation_finite"),
)

bot_success = Table(
    "bot_success",
    metadata,
    Column("bot_id", BigInteger, nullable=False),
    Column("label", Text, nullable=False),
    Column("successes", Double, nullable=False, server_default=ZERO),
    Column("failures", Double, nullable=False, server_default=ZERO),
    Column("returned", Double, nullable=False, server_default=ZERO),
    Column("finished", Double, nullable=False, server_default=ZERO),
    Column("seconds", Double, nullable=False, server_default=ZERO),
    Column("at", TIME, nullable=False, server_default=func.clock_timestamp()),
    PrimaryKeyConstraint("bot_id", "label"),
    CheckConstraint("successes >= 0 AND failures >= 0", name="bot_success_counts_positive"),
)

blames = Table(
    "blames",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("bot_id", BigInteger),
    Column("at", TIME, nullable=False, server_default=func.clock_timestamp()),
    Column("upheld_at", TIME),
    Column("returned_at", TIME),
    PrimaryKeyConstraint("job_id"),
    Index("blames_old", "at"),
    Index("blames_returned", "bot_id", postgresql_where=text("returned_at IS NOT NULL AND bot_id IS NOT NULL")),
    Index("blames_upheld", "bot_id", postgresql_where=text("upheld_at IS NOT NULL")),
)
