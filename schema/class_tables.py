"""The tables by which jobs get points, and by which those that wait are promoted and deferred."""

from sqlalchemy import Boolean, CheckConstraint, Column, Double, Integer, PrimaryKeyConstraint, Table, Text, text

from schema.columns import metadata, name_form

# What a job is worth by its kind, and how long such jobs have lately run.
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

# What a caller has been promised.
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

# One row. `critical`, `high` and `normal` are the largest effective priorities of these levels; the rest is low.
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
    CheckConstraint("starvation_seconds > 0", name="scheduling_starvation_positive"),
    CheckConstraint("max_queue_size > 0", name="scheduling_queue_size_positive"),
)
