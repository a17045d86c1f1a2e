"""Pages of the console for operators alone: the health of the pool, and the settings by which it places jobs.

It may import what the other modules of the console may. Read first: health.py, policy.py.
"""
