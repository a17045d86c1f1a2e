"""Tables of constrained jobs and their limits: constraint sets, counters, rates, classes, windows, meters.

A job without constraints has no row in any of them; in the row of its queue, `constraint_set` is null.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from schema.tables.columns import NO_LABELS, NOW, TIME, identity, metadata, name_form

#: Type of every counted amount. It is exact, so that charges that are returned leave no remainder.
AMOUNT = Numeric(30, 6)

# One row for each distinct set of constraints. Jobs with the same set are admitted together.
constraint_sets = Table(
    "constraint_sets",
    metadata,
    identity(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("terms", JSONB, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    UniqueConstraint("digest", name="constraint_sets_digest_key"),
)

# Constraints that a job does not share with others: estimates, deadline, and the inputs of its points. A job without
# any of them has no row, and its cost is estimated at 1.
job_constraints = Table(
    "job_constraints",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("estimate", AMOUNT, nullable=False, server_default=text("1")),
    Column("seconds", Double),
    Column("deadline", TIME),
    Column("priority_inputs", JSONB),
    Column("price", Integer),
    Column("watch_at", TIME),
    Column("promoted_at", TIME),
    Column("at_risk", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("job_id"),
    Index("job_constraints_watch", "watch_at", postgresql_where=text("watch_at IS NOT NULL")),
    CheckConstraint("estimate BETWEEN 0 AND 1e12", name="job_constraints_estimate_range"),
    CheckConstraint("seconds > 0 AND seconds <= 31536000", name="job_constraints_seconds_range"),
)

# Amounts in use: live leases of an instance, cost in the rolling window, holders of a lock. `most` null means no limit.
counters = Table(
    "counters",
    metadata,
    Column("name", Text, nullable=False),
    Column("used", AMOUNT, nullable=False, server_default=text("0")),
    Column("most", AMOUNT),
    # A second limit on the running jobs of an instance: its slots. Null means no limit.
    Column("slots", AMOUNT),
    # When a lease last took of it.
    Column("charged_at", TIME),
    # Of a lock: whence `most` comes. '' = an operator has set it by the lock's name; a text = by a pattern with this
    # prefix; null = from the jobs that hold it.
    Column("limited_by", Text),
    PrimaryKeyConstraint("name"),
    CheckConstraint("used >= 0 AND used <> 'NaN'", name="counters_used_positive"),
    CheckConstraint("most >= 0 AND most <> 'NaN'", name="counters_most_positive"),
    CheckConstraint("slots >= 0 AND slots <> 'NaN'", name="counters_slots_positive"),
    Index("counters_of_instances", "name", postgresql_where=text("name LIKE 'instance:%'")),
)

# Real usage of ended attempts, by counter and minute. `rolled`: older than the window and subtracted from the counter.
usage = Table(
    "usage",
    metadata,
    Column("name", Text, nullable=False),
    Column("bucket", TIME, nullable=False),
    Column("amount", AMOUNT, nullable=False, server_default=text("0")),
    Column("jobs", Integer, nullable=False, server_default=text("0")),
    Column("rolled", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("name", "bucket"),
    CheckConstraint("amount >= 0 AND amount <> 'NaN'", name="usage_amount_positive"),
    CheckConstraint("jobs >= 0", name="usage_jobs_positive"),
    Index("usage_counted", "bucket", postgresql_where=text("NOT rolled")),
    Index("usage_rolled", "bucket", postgresql_where=text("rolled")),
)

# Instances with a share of the pool: their weight, the unit in which their usage counts, when they last had jobs
# waiting, and the usage that was added when they came back after a time without jobs.
accounts = Table(
    "accounts",
    metadata,
    Column("instance", Integer, autoincrement=False, nullable=False),
    Column("credit_weight", Double, nullable=False, server_default=text("1")),
    Column("unit", Text, nullable=False, server_default=text("'cost'")),
    Column("demand_at", TIME, nullable=False, server_default=text("'-infinity'")),
    Column("lift", Double, nullable=False, server_default=text("0")),
    Column("lifted_at", TIME, nullable=False, server_default=text("'-infinity'")),
    # The weight for which the lift was stored.
    Column("lift_weight", Double, nullable=False, server_default=text("1")),
    PrimaryKeyConstraint("instance"),
    CheckConstraint(
        "credit_weight = 0 OR credit_weight >= 1e-9 AND credit_weight <= 1e6", name="accounts_credit_weight_range"
    ),
    CheckConstraint(name_form("unit"), name="accounts_unit_form"),
    CheckConstraint("lift > '-infinity' AND lift < 'infinity'", name="accounts_lift_range"),
)


# How fast jobs may start: rates of resource classes, advice of operators, failed checks


_NAME, _ANY_LENGTH = "[a-z0-9][a-z0-9._-]{0,62}", "[a-z0-9][a-z0-9._-]*"
#: The begin of a name.
_BEGIN = "[a-z0-9][a-z0-9._-]{0,61}"

# Limits of locks and rates whose names begin with a prefix. `prefix` is that of the name of the counter or the bucket.
limit_patterns = Table(
    "limit_patterns",
    metadata,
    Column("prefix", Text, nullable=False),
    Column("most", AMOUNT),
    Column("rate", Double),
    Column("burst", Integer),
    PrimaryKeyConstraint("prefix"),
    CheckConstraint(
        f"prefix ~ '^(lock:{_NAME}:{_BEGIN}|rate:({_BEGIN}|{_NAME}/({_BEGIN})?))$'", name="limit_patterns_prefix_form"
    ),
    CheckConstraint("most >= 0 AND most <> 'NaN'", name="limit_patterns_most_positive"),
    CheckConstraint("rate >= 1e-9 AND rate <= 1e6 AND burst BETWEEN 1 AND 1000000", name="limit_patterns_rate_range"),
    CheckConstraint(
        "CASE WHEN prefix LIKE 'lock:%' THEN most IS NOT NULL AND num_nonnulls(rate, burst) = 0"
        " ELSE most IS NULL AND num_nulls(rate, burst) = 0 END",
        name="limit_patterns_limit_given",
    ),
)

# Token buckets. Now a bucket has `tokens` plus `rate` for each second since `refilled_at`, at most `burst`.
rate_buckets = Table(
    "rate_buckets",
    metadata,
    Column("name", Text, nullable=False),
    Column("rate", Double, nullable=False),
    Column("burst", Integer, nullable=False),
    Column("tokens", Double, nullable=False),
    Column("refilled_at", TIME, nullable=False, server_default=func.clock_timestamp()),
    # The prefix of the pattern by which it was made; null = an operator has set its rate by its name.
    Column("limited_by", Text),
    PrimaryKeyConstraint("name"),
    # Two names of at most 63 characters each. The check is made whenever tokens are drawn, and an expression that tells
    # the lengths itself takes three times as long.
    CheckConstraint(
        f"name ~ '^rate:{_ANY_LENGTH}(/{_ANY_LENGTH})?$'"
        " AND length(split_part(name, '/', 1)) <= 68 AND length(split_part(name, '/', 2)) <= 63",
        name="rate_buckets_name_form",
    ),
    CheckConstraint("rate >= 1e-9 AND rate <= 1e6", name="rate_buckets_rate_range"),
    CheckConstraint("burst BETWEEN 1 AND 1000000", name="rate_buckets_burst_range"),
    CheckConstraint("tokens >= 0 AND tokens <= burst", name="rate_buckets_tokens_range"),
)

# Advice of operators for a resource class; the class '' means all constrained jobs.
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

# Failed checks of a job's rate limit since the last one that succeeded. Above the configured number the job is parked.
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


# How urgent jobs are: points, promotion of waiting jobs, deferral


# Points of each class, and run times in seconds: the median of recent jobs, and the time in which nine of ten ended.
job_classes = Table(
    "job_classes",
    metadata,
    Column("name", Text, nullable=False),
    Column("points", Integer, nullable=False),
    Column("seconds", Double),
    Column("seconds_high", Double),
    PrimaryKeyConstraint("name"),
    CheckConstraint(name_form(), name="job_classes_name_form"),
    CheckConstraint("points BETWEEN -900 AND 1100", name="job_classes_points_range"),
    CheckConstraint("seconds >= 0 AND seconds_high >= seconds", name="job_classes_seconds_range"),
)

# How many of the jobs that the pool may run at once are kept for a class. It ends with its class.
class_reserves = Table(
    "class_reserves",
    metadata,
    Column("name", Text, ForeignKey("job_classes.name", ondelete="CASCADE"), nullable=False),
    Column("jobs", Integer, nullable=False),
    PrimaryKeyConstraint("name"),
    CheckConstraint("jobs >= 1", name="class_reserves_jobs_positive"),
)

# Points and time-out of each service level.
service_levels = Table(
    "service_levels",
    metadata,
    Column("name", Text, nullable=False),
    Column("points", Integer, nullable=False),
    Column("timeout_seconds", Double, nullable=False),
    PrimaryKeyConstraint("name"),
    CheckConstraint(name_form(), name="service_levels_name_form"),
    CheckConstraint("points BETWEEN -900 AND 1100", name="service_levels_points_range"),
    CheckConstraint("timeout_seconds > 0 AND timeout_seconds <= 31536000", name="service_levels_timeout_range"),
)

# One row. `critical`, `high` and `normal` are the largest effective priorities of these levels; all others are low.
scheduling = Table(
    "scheduling",
    metadata,
    Column("one", Boolean, nullable=False, server_default=text("true")),
    Column("project_points", Integer, nullable=False, server_default=text("10")),
    Column("user_points", Integer, nullable=False, server_default=text("5")),
    Column("critical", Integer, nullable=False, server_default=text("0")),
    Column("high", Integer, nullable=False, server_default=text("40")),
    Column("normal", Integer, nullable=False, server_default=text("60")),
    Column("starvation_seconds", Double, server_default=text("3600")),
    Column("max_queue_size", Integer),
    PrimaryKeyConstraint("one"),
    CheckConstraint("one", name="scheduling_is_one"),
    CheckConstraint("critical < high AND high < normal", name="scheduling_levels_ordered"),
    CheckConstraint("starvation_seconds > 0 AND starvation_seconds <= 31536000", name="scheduling_starvation_range"),
    CheckConstraint("max_queue_size > 0", name="scheduling_queue_size_positive"),
)


# Execution windows and their meters


# Hours in which jobs of certain classes may start.
windows = Table(
    "windows",
    metadata,
    Column("name", Text, nullable=False),
    Column("starts", SmallInteger, nullable=False),
    Column("ends", SmallInteger, nullable=False),
    Column("zone", Text, nullable=False),
    Column("types", ARRAY(Text), nullable=False),
    Column("exempt_types", ARRAY(Text), nullable=False, server_default=NO_LABELS),
    Column("match", Text, nullable=False),
    Column("meter", Text),
    Column("usage_threshold", Double),
    Column("meter_max_age", Double, nullable=False),
    PrimaryKeyConstraint("name"),
    CheckConstraint("starts BETWEEN 0 AND 23 AND ends BETWEEN 1 AND 24 AND starts <> ends", name="windows_hours"),
    CheckConstraint("match IN ('exact', 'prefix')", name="windows_match_known"),
    CheckConstraint("(meter IS NULL) = (usage_threshold IS NULL)", name="windows_meter_with_threshold"),
    CheckConstraint("usage_threshold >= 0 AND usage_threshold <= 100", name="windows_threshold_range"),
)

# Last reading of each meter. `polled_at`: when a command that reads it was last begun.
usage_meters = Table(
    "usage_meters",
    metadata,
    Column("name", Text, nullable=False),
    Column("used", AMOUNT),
    Column("most", AMOUNT),
    Column("resets_at", TIME),
    Column("updated_at", TIME),
    Column("polled_at", TIME),
    PrimaryKeyConstraint("name"),
    CheckConstraint(name_form(), name="usage_meters_name_form"),
    CheckConstraint("used >= 0 AND used <> 'NaN'", name="usage_meters_used_positive"),
    CheckConstraint("most > 0 AND most <> 'NaN'", name="usage_meters_most_positive"),
    CheckConstraint(
        "(used IS NULL) = (updated_at IS NULL) AND (most IS NULL) = (updated_at IS NULL)", name="usage_meters_read"
    ),
)

# Sum and number of each meter's readings in an hour, in percent of its limit.
meter_hours = Table(
    "meter_hours",
    metadata,
    Column("name", Text, nullable=False),
    Column("hour", TIME, nullable=False),
    Column("readings", Integer, nullable=False),
    Column("percents", Double, nullable=False),
    PrimaryKeyConstraint("name", "hour"),
    CheckConstraint("readings >= 1", name="meter_hours_readings_positive"),
)
