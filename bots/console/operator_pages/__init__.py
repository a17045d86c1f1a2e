"""Pages of the console for operators: what they set, what is in force, and what the pool tells of its health.

It imports the other modules of `bots.console` but not `pages.py`, which imports it. Read first: tenants.py, policy.py.
"""
