"""Connections to PostgreSQL: engine, transactions, notifications, advisory locks and the private server.

It imports `schema.tables` (for the name of the schema) and the ground modules of `schema`. Read first: engine.py
(transactions and retries) and notify.py (wake-ups).
"""
