"""Hours: when jobs of which classes may start, and the meters that this may depend on."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# Written from the configuration, so that assigners and whoever explains go by the same ones.
WINDOWS = """
CREATE TABLE windows (
    name text NOT NULL,
    starts smallint NOT NULL,
    ends smallint NOT NULL,
    zone text NOT NULL,
    types text[] NOT NULL,
    exempt_types text[] NOT NULL DEFAULT '{}',
    match text NOT NULL,
    meter text,
    usage_threshold double precision,
    meter_max_age double precision NOT NULL,
    CONSTRAINT windows_pkey PRIMARY KEY (name),
    CONSTRAINT windows_hours CHECK (starts BETWEEN 0 AND 23 AND ends BETWEEN 1 AND 24 AND starts <> ends),
    CONSTRAINT windows_match_known CHECK (match IN ('exact', 'prefix')),
    CONSTRAINT windows_meter_with_threshold CHECK ((meter IS NULL) = (usage_threshold IS NULL)),
    CONSTRAINT windows_threshold_range CHECK (usage_threshold >= 0 AND usage_threshold <= 100)
);
"""

# Read by the scheduler, written by whoever knows; one that is polled but was never read has no values.
METERS = """
CREATE TABLE usage_meters (
    name text NOT NULL,
    used numeric(30, 6),
    most numeric(30, 6),
    resets_at timestamptz,
    updated_at timestamptz,
    polled_at timestamptz,
    CONSTRAINT usage_meters_pkey PRIMARY KEY (name),
    CONSTRAINT usage_meters_name_form CHECK (name ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    CONSTRAINT usage_meters_used_positive CHECK (used >= 0 AND used <> 'NaN'),
    CONSTRAINT usage_meters_most_positive CHECK (most > 0 AND most <> 'NaN'),
    CONSTRAINT usage_meters_read
        CHECK ((used IS NULL) = (updated_at IS NULL) AND (most IS NULL) = (updated_at IS NULL))
);
CREATE TABLE meter_hours (
    name text NOT NULL,
    hour timestamptz NOT NULL,
    readings integer NOT NULL,
    percents double precision NOT NULL,
    CONSTRAINT meter_hours_pkey PRIMARY KEY (name, hour),
    CONSTRAINT meter_hours_readings_positive CHECK (readings >= 1)
);
"""


def upgrade() -> None:
    for part in (WINDOWS, METERS):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("what jobs wait for would be lost; restore a backup instead")
