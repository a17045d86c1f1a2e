"""Classes: what a job is worth in points, how long it may starve, how many may wait, and what is due when."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Points are for people: more are more urgent. What is stored with a job is its priority, 100 less its points.
TABLES = """
CREATE TABLE job_classes (
    name text NOT NULL,
    points integer NOT NULL,
    seconds double precision,
    seconds_high double precision,
    CONSTRAINT job_classes_pkey PRIMARY KEY (name),
    CONSTRAINT job_classes_name_form CHECK (name ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    CONSTRAINT job_classes_points_range CHECK (points BETWEEN -900 AND 1100),
    CONSTRAINT job_classes_seconds_range CHECK (seconds >= 0 AND seconds_high >= seconds)
);
CREATE TABLE service_levels (
    name text NOT NULL,
    points integer NOT NULL,
    timeout_seconds double precision NOT NULL,
    CONSTRAINT service_levels_pkey PRIMARY KEY (name),
    CONSTRAINT service_levels_name_form CHECK (name ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    CONSTRAINT service_levels_points_range CHECK (points BETWEEN -900 AND 1100),
    CONSTRAINT service_levels_timeout_range CHECK (timeout_seconds > 0 AND timeout_seconds <= 31536000)
);
CREATE TABLE scheduling (
    one boolean NOT NULL DEFAULT true,
    project_points integer NOT NULL DEFAULT 10,
    user_points integer NOT NULL DEFAULT 5,
    critical integer NOT NULL DEFAULT 0,
    high integer NOT NULL DEFAULT 40,
    normal integer NOT NULL DEFAULT 60,
    starvation_seconds double precision DEFAULT 3600,
    max_queue_size integer,
    CONSTRAINT scheduling_pkey PRIMARY KEY (one),
    CONSTRAINT scheduling_is_one CHECK (one),
    CONSTRAINT scheduling_levels_ordered CHECK (critical < high AND high < normal),
    CONSTRAINT scheduling_starvation_positive CHECK (starvation_seconds > 0),
    CONSTRAINT scheduling_queue_size_positive CHECK (max_queue_size > 0)
);
INSERT INTO job_classes (name, points) VALUES ('critical', 100), ('serious_project', 80), ('serious', 60),
    ('random', 40), ('auto_generated', 20), ('background', 10);
INSERT INTO service_levels (name, points, timeout_seconds) VALUES ('premium', 100, 7200), ('standard', 50, 3600),
    ('economy', 20, 1800);
INSERT INTO scheduling DEFAULT VALUES;
"""

# An explicit priority is what it is; a service level goes before a class, which alone is raised by a project and its
# user.
PRICE = """
CREATE FUNCTION priced(own jsonb) RETURNS integer LANGUAGE plpgsql STABLE AS $$
DECLARE
    points integer;
BEGIN
    IF own ? 'fixed' THEN
        RETURN NULL;
    ELSIF own->>'level' IS NOT NULL THEN
        SELECT l.points INTO points FROM service_levels l WHERE l.name = own->>'level';
    ELSIF own->>'class' IS NOT NULL THEN
        SELECT c.points + CASE WHEN (own->>'project')::boolean THEN s.project_points ELSE 0 END
                + s.user_points * coalesce((own->>'user_priority')::integer, 0)
            INTO points FROM job_classes c CROSS JOIN scheduling s WHERE c.name = own->>'class';
    ELSE
        RETURN NULL;
    END IF;
    IF points IS NULL THEN
        RAISE EXCEPTION 'there is no %', CASE WHEN own->>'level' IS NOT NULL
            THEN format('service level ''%s''', own->>'level') ELSE format('job class ''%s''', own->>'class') END
            USING ERRCODE = 'LH003';
    END IF;
    RETURN greatest(-1000, least(1000, 100 - points));
END $$;
CREATE OR REPLACE FUNCTION rank_of(request jsonb) RETURNS double precision LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((request->>'priority')::integer, priced(request->'own'), 0);
END $$;
CREATE FUNCTION level_of(effective double precision) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN effective <= critical THEN 'critical' WHEN effective <= high THEN 'high'
        WHEN effective <= normal THEN 'normal' ELSE 'low' END FROM scheduling
$$;
"""

# What a job's points came to is kept, so that other points change only what nobody has given another priority since.
COLUMNS = "ALTER TABLE job_terms ADD COLUMN price integer"

# Only a job that has points pays for it: its row gets the priority that they come to, and its level's timeout.
APPLY = """
CREATE FUNCTION apply_points() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE jobs j SET priority = coalesce(NEW.price, j.priority), rank = coalesce(NEW.price, j.rank),
        timeout_seconds = coalesce(j.timeout_seconds,
        (SELECT l.timeout_seconds FROM service_levels l WHERE l.name = NEW.own->>'level'))
    WHERE j.id = NEW.job_id;
    RETURN NULL;
END $$;
CREATE TRIGGER job_terms_apply_points AFTER INSERT ON job_terms FOR EACH ROW
    WHEN (NEW.price IS NOT NULL OR NEW.own ? 'level') EXECUTE FUNCTION apply_points();
"""

# When somebody has to look at a waiting job again: it has starved for long enough, or its deadline is near.
WATCH = """
ALTER TABLE job_terms ADD COLUMN watch_at timestamptz, ADD COLUMN promoted_at timestamptz,
    ADD COLUMN at_risk boolean NOT NULL DEFAULT false;
CREATE INDEX job_terms_watch ON job_terms (watch_at) WHERE watch_at IS NOT NULL;
CREATE FUNCTION watch_terms() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    expected double precision := coalesce(NEW.seconds,
        (SELECT c.seconds_high FROM job_classes c WHERE c.name = NEW.own->>'class'), 0);
BEGIN
    NEW.price := priced(NEW.own);
    NEW.watch_at := least(NEW.deadline - make_interval(secs => expected / 0.8),
        CASE WHEN NEW.price IS NOT NULL THEN
            now() + make_interval(secs => (SELECT starvation_seconds FROM scheduling)) END);
    RETURN NEW;
END $$;
CREATE TRIGGER job_terms_watch_terms BEFORE INSERT ON job_terms FOR EACH ROW
    WHEN (NEW.deadline IS NOT NULL OR NEW.own ? 'class' OR NEW.own ? 'level') EXECUTE FUNCTION watch_terms();
"""

# While more jobs wait than may, the newest of the low level are off the queue.
DEFER = """
CREATE INDEX jobs_deferred ON jobs (queued_at, id, instance) WHERE state = 'deferred';
"""


def upgrade() -> None:
    for part in (TABLES, PRICE, COLUMNS, APPLY, WATCH, DEFER):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("jobs that were deferred would be lost; restore a backup instead")
