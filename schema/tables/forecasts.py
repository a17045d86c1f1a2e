"""Tables of forecasts: how long leases lately took, and what was foretold of some waiting jobs.

Upkeep writes them (`schema/accounting/forecasts.py`), and nothing is decided by them.
"""

from sqlalchemy import (
    BigInteger,
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

from schema.tables.columns import NOW, TIME, metadata

# Of the newest ended attempts of an instance in a cohort: how many there were, the mean seconds of their leases, and
# the mean of their unit-seconds.
lease_times = Table(
    "lease_times",
    metadata,
    Column("cohort", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("leases", Integer, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("work", Double, nullable=False),
    Column("per_second", Double, nullable=False, server_default=text("0")),
    Column("waited", Double),
    Column("at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("cohort", "instance"),
    CheckConstraint("leases >= 1 AND seconds >= 0 AND work >= 0", name="lease_times_positive"),
)

# `predicted` and `scale` are what the formula said, null if a gate was closed; `by_rate` and `by_waits` what two simple
# guesses said, null if nobody knew; `seconds` and `upper` what was promised, null if `reason` says why not. `past` is
# the number of earlier forecasts that the promise was made from. `waited`: seconds until the start, once there was one.
forecasts = Table(
    "forecasts",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("at", TIME, nullable=False, server_default=NOW),
    Column("cohort", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("class", Text, nullable=False, server_default=text("''")),
    Column("past", Integer, nullable=False),
    Column("predicted", Double),
    Column("scale", Double),
    Column("by_rate", Double),
    Column("by_waits", Double),
    Column("seconds", Double),
    Column("upper", Double),
    Column("waited", Double),
    Column("reason", Text),
    PrimaryKeyConstraint("job_id"),
    CheckConstraint(
        "(predicted IS NULL) = (scale IS NULL) AND predicted >= 0 AND scale > 0", name="forecasts_predicted_with_scale"
    ),
    CheckConstraint(
        "(seconds IS NULL) = (upper IS NULL) AND (upper IS NULL) = (reason IS NOT NULL)", name="forecasts_told"
    ),
    Index("forecasts_of_instance", "cohort", "instance", "at"),
    Index("forecasts_of_cohort", "cohort", "at"),
    Index("forecasts_by_age", "at"),
    Index("forecasts_open", "job_id", postgresql_where=text("waited IS NULL AND predicted IS NOT NULL")),
)
