"""Create everything that an empty database needs: tables, functions, views and the first rows.

The tables come from the metadata in `schema/tables/`, the functions and views from the files in `schema/sql/`. A new
database therefore gets the current tables and functions from this revision, and then runs all later revisions too.

A database of revision 0035, the last one before this, has the same schema; `schema.postgres.migrate` only notes that.

A later revision brings existing databases to the same state. To change a function or a view, edit its file and add a
revision that loads it again: `sql.load(op.get_bind(), "functions/submit")`. To change a table, edit the metadata and
add a revision that does nothing if the change is there already: `ALTER TABLE jobs ADD COLUMN IF NOT EXISTS …`.
"""

from alembic import op
from sqlalchemy import text

from schema import sql
from schema.tables import SCHEMA, metadata

revision = "0036"
down_revision = None
branch_labels = None
depends_on = None

# The default cohort has no labels: it takes every job and bot that no other cohort names, and comes last.
FIRST_ROWS = """
INSERT INTO cohorts (id, name, position) VALUES (0, 'default', 2147483647);
INSERT INTO job_classes (name, points) VALUES ('critical', 100), ('serious_project', 80), ('serious', 60),
    ('random', 40), ('auto_generated', 20), ('background', 10);
INSERT INTO service_levels (name, points, timeout_seconds) VALUES ('premium', 100, 7200), ('standard', 50, 3600),
    ('economy', 20, 1800);
INSERT INTO scheduling DEFAULT VALUES;
INSERT INTO secrets (name) VALUES ('cursor');
"""

VIEWS = text(
    f"SELECT oid::regclass::text FROM pg_class WHERE relnamespace = '{SCHEMA}'::regnamespace AND relkind = 'v'"
)
FUNCTIONS = text(f"SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = '{SCHEMA}'::regnamespace")


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection, checkfirst=False)
    sql.load_all(connection, "functions")
    sql.load_all(connection, "views")
    op.execute(FIRST_ROWS)


def downgrade() -> None:
    """Drop everything, with all jobs."""
    connection = op.get_bind()
    views = connection.execute(VIEWS).scalars().all()
    if views:
        op.execute(f"DROP VIEW {', '.join(views)}")
    metadata.drop_all(connection)  # later revisions may have dropped some of the tables
    functions = connection.execute(FUNCTIONS).scalars().all()
    if functions:
        op.execute(f"DROP FUNCTION {', '.join(functions)}")
