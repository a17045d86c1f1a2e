"""Reads for callers and operators: jobs, graphs, bots, the status of the pool, the report.

It may import `assigner.admission` and what lies below it, and `schema`. Read first: jobs.py and status.py.
"""
