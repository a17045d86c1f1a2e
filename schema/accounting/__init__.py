"""How much of each limit is used: quotas, counters, accounts, rates.

It imports `schema.policy`, `schema.postgres`, `schema.tables` and the ground modules. Read first: quotas.py and
counters.py.
"""
