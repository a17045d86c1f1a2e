"""Add forecasts: how long leases lately took, and what was foretold of some waiting jobs."""

from alembic import op

revision = "0061"
down_revision = "0059"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE IF NOT EXISTS lease_times (
    cohort integer NOT NULL, instance integer NOT NULL, leases integer NOT NULL, seconds double precision NOT NULL,
    work double precision NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT lease_times_pkey PRIMARY KEY (cohort, instance),
    CONSTRAINT lease_times_positive CHECK (leases >= 1 AND seconds >= 0 AND work >= 0));
CREATE TABLE IF NOT EXISTS forecasts (
    job_id bigint NOT NULL, at timestamptz NOT NULL DEFAULT now(), cohort integer NOT NULL, instance integer NOT NULL,
    class text NOT NULL DEFAULT '', past integer NOT NULL, predicted double precision, scale double precision,
    seconds double precision, upper double precision, waited double precision, reason text,
    CONSTRAINT forecasts_pkey PRIMARY KEY (job_id),
    CONSTRAINT forecasts_predicted_with_scale
        CHECK ((predicted IS NULL) = (scale IS NULL) AND predicted >= 0 AND scale > 0),
    CONSTRAINT forecasts_told CHECK ((seconds IS NULL) = (upper IS NULL) AND (upper IS NULL) = (reason IS NOT NULL)));
CREATE INDEX IF NOT EXISTS forecasts_of_instance ON forecasts (cohort, instance, at);
CREATE INDEX IF NOT EXISTS forecasts_of_cohort ON forecasts (cohort, at);
CREATE INDEX IF NOT EXISTS forecasts_by_age ON forecasts (at);
CREATE INDEX IF NOT EXISTS forecasts_open ON forecasts (job_id) WHERE waited IS NULL AND predicted IS NOT NULL;
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    """Do nothing: the version before leaves the tables alone."""
