"""Routes by which operators look at the health of a pool, and at the settings by which it places jobs.

It may import whatever `assigner/api` may. Read first: health.py, policy.py.
"""
