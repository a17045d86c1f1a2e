"""Pages of the console for operators: what they set, and what the pool tells of itself.

It imports the other modules of `bots.console` but not `pages.py`, which imports it. Read first: tenants.py.
"""
