"""The tables of how fast jobs may start: rates of resource classes, what operators advise, checks that failed."""

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

from schema.columns import TIME, metadata

_NAME = "[a-z0-9][a-z0-9._-]{0,62}"

# Token buckets: what is in one at a later moment is `tokens` and `rate` for each second since, up to `burst`.
rate_buckets = Table(
    "rate_buckets",
    metadata,
    Column("name", Text, nullable=False),
    Column("rate", Double, nullable=False),
    Column("burst", Integer, nullable=False),
    Column("tokens", Double, nullable=False),
    Column("refilled_at", TIME, nullable=False, server_default=func.clock_timestamp()),
    PrimaryKeyConstraint("name"),
    CheckConstraint(f"name ~ '^rate:{_NAME}(/{_NAME})?$'", name="rate_buckets_name_form"),
    CheckConstraint("rate > 0 AND rate <= 1e6", name="rate_buckets_rate_range"),
    CheckConstraint("burst BETWEEN 1 AND 1000000", name="rate_buckets_burst_range"),
    CheckConstraint("tokens >= 0 AND tokens <= burst", name="rate_buckets_tokens_range"),
)

# What operators advise for a resource class, '' for all jobs that ask for more than a place.
backpressure = Table(
    "backpressure",
    metadata,
    Column("resource_class", Text, nullable=False),
    Column("allowed", Boolean, nullable=False),
    Column("delay", Double, nullable=False, server_default=text("0")),
    Column("until", TIME),
    PrimaryKeyConstraint("resource_class"),
    CheckConstraint(f"resource_class ~ '^({_NAME})?$'", name="backpressure_class_form"),
    CheckConstraint("delay >= 0 AND delay <= 3600", name="backpressure_delay_range"),
)

# Failed checks of a job's rate limit since the last one that worked; at most so many before it is parked.
rate_skips = Table(
    "rate_skips",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("resource", Text, nullable=False),
    Column("skips", Integer, nullable=False),
    Column("last_at", TIME, nullable=False),
    PrimaryKeyConstraint("job_id"),
    CheckConstraint("skips >= 1", name="rate_skips_positive"),
    Index("rate_skips_of_resource", "resource"),
)
