"""Alembic's entry: runs the wanted steps on the connection that schema.migrate hands over.

The connection is inside a transaction already, so that all steps happen or none does.
"""

from alembic import context

from schema.tables.columns import SCHEMA

context.configure(connection=context.config.attributes["connection"], version_table_schema=SCHEMA)
with context.begin_transaction():
    context.run_migrations()
