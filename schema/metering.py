"""The tables of execution windows and of the meters that they may go by."""

from sqlalchemy import CheckConstraint, Column, Double, Integer, PrimaryKeyConstraint, SmallInteger, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY

from schema.columns import NO_LABELS, TIME, metadata, name_form
from schema.gating import AMOUNT

# At which hours jobs of which classes may start; as the configuration says.
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

# What somebody else counts, as it was last read; `polled_at`: when a command was last begun that reads it.
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

# What meters stood at, in percent of their limits, by the hour.
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
