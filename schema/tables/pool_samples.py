"""The table of pool samples: what waited, ran and ended in each minute of the last day, and more coarsely for a year.

It is written by upkeep alone, through `schema/accounting/pool_samples.py`, and nothing is decided by it.
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
    text,
)

from schema.states import COUNTS
from schema.tables.columns import TIME, metadata

ZERO = text("0")
#: Seconds that one sample covers: a minute, and what minutes are merged to when they are older.
SPANS = (60, 600, 3600)

# `at` is the beginning of the time that a sample covers, `span` its length in seconds. `name` is that of the cohort or
# the instance, and empty for the pool. A name without jobs has no row. The primary key makes one writer of each minute.
# `fairness`: Jain's index of units in use over weight, of instances with waiting jobs; only of the pool, and null if
# fewer than two can be compared. `incomplete`: a count stopped at its bound, or only some of the merged minutes were
# sampled.
pool_samples = Table(
    "pool_samples",
    metadata,
    Column("at", TIME, nullable=False),
    Column("scope", Text, nullable=False),
    Column("name", Text, nullable=False, server_default=""),
    Column("span", Integer, nullable=False),
    *(Column(name, BigInteger, nullable=False, server_default=ZERO) for name in COUNTS),
    Column("oldest_wait", Double),
    Column("fairness", Double),
    Column("incomplete", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("scope", "name", "at"),
    CheckConstraint("scope IN ('pool', 'cohort', 'instance')", name="pool_samples_scope_known"),
    CheckConstraint("(scope = 'pool') = (name = '')", name="pool_samples_name_of_scope"),
    CheckConstraint(f"span IN ({', '.join(map(str, SPANS))})", name="pool_samples_span_known"),
    CheckConstraint("extract(epoch FROM at) % span = 0", name="pool_samples_at_is_a_beginning"),
    CheckConstraint(f"least({', '.join(COUNTS)}, oldest_wait) >= 0", name="pool_samples_not_negative"),
    CheckConstraint(
        "fairness IS NULL OR fairness > 0 AND fairness < 1.000001 AND scope = 'pool'",
        name="pool_samples_fairness_of_pool",
    ),
    Index("pool_samples_of_span", "span", "at"),
)
