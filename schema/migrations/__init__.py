"""Alembic's environment and the revisions that create the database schema.

It imports `schema.tables` and `schema.postgres`. Read first: env.py and versions/0036_baseline.py.
"""
