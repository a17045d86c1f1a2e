"""How much of each limit is in use: quotas, counters, accounts, rates.

It may import `schema.policy`, `schema.postgres`, `schema.tables` and the modules directly in `schema`. Read first:
quotas.py and counters.py.
"""
