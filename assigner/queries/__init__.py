"""Reads for callers and operators: jobs, the status of the pool, the report.

It imports the ground modules of `assigner` and `schema`. Read first: jobs.py and status.py.
"""
