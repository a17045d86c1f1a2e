"""The tables of what jobs may ask for beside a place: their gates, and what is counted against limits while they run.

A job that asks for nothing of the kind has no row in any of them, and its own row says so by `constraint_set IS NULL`.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from schema.columns import NOW, TIME, identity, metadata, name_form

#: Amounts of anything that is counted: exact, so that what is taken and given back leaves nothing.
AMOUNT = Numeric(30, 6)

# Jobs that ask for the same are judged together: one row for each set of terms.
constraint_sets = Table(
    "constraint_sets",
    metadata,
    identity(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("terms", JSONB, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    UniqueConstraint("digest", name="constraint_sets_digest_key"),
)

# What a job does not share with others.
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

# What is in use of something: live leases of an instance, cost in the window, a lock. No limit is no limit.
counters = Table(
    "counters",
    metadata,
    Column("name", Text, nullable=False),
    Column("used", AMOUNT, nullable=False, server_default=text("0")),
    Column("most", AMOUNT),
    PrimaryKeyConstraint("name"),
    CheckConstraint("used >= 0 AND used <> 'NaN'", name="counters_used_positive"),
    CheckConstraint("most >= 0 AND most <> 'NaN'", name="counters_most_positive"),
    Index("counters_of_instances", "name", postgresql_where=text("name LIKE 'instance:%'")),
)

# What a live lease has taken of counters; it comes back when the lease ends.
charges = Table(
    "charges",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("names", ARRAY(Text), nullable=False),
    Column("amounts", ARRAY(AMOUNT), nullable=False),
    PrimaryKeyConstraint("job_id", "fence"),
    CheckConstraint("cardinality(names) = cardinality(amounts)", name="charges_paired"),
)

# What ended attempts have really used of a counter, by the minute; what is older than the window counts no more.
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

# Instances that have a share of the pool: their weight beside each other, the unit in which they count, when they last
# asked for anything, and what was added to their usage when they came back.
accounts = Table(
    "accounts",
    metadata,
    Column("instance", Integer, autoincrement=False, nullable=False),
    Column("credit_weight", Double, nullable=False, server_default=text("1")),
    Column("unit", Text, nullable=False, server_default=text("'cost'")),
    Column("demand_at", TIME, nullable=False, server_default=text("'-infinity'")),
    Column("lift", Double, nullable=False, server_default=text("0")),
    Column("lifted_at", TIME, nullable=False, server_default=text("'-infinity'")),
    PrimaryKeyConstraint("instance"),
    CheckConstraint("credit_weight >= 0 AND credit_weight <= 1e6", name="accounts_credit_weight_range"),
    CheckConstraint(name_form("unit"), name="accounts_unit_form"),
    CheckConstraint("lift >= 0 AND lift < 'infinity'", name="accounts_lift_range"),
)
