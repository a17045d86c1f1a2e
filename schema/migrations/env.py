"""Alembic's entry point: runs the requested steps on the connection that `schema.postgres.migrate` passes.

The connection is in a transaction already, so either all steps are committed or none is.
"""

from alembic import context

from schema.sql import SCHEMA

context.configure(connection=context.config.attributes["connection"], version_table_schema=SCHEMA)
with context.begin_transaction():
    context.run_migrations()
