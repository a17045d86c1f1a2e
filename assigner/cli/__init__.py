"""The operator's command line and the composition root.

It may import everything in `assigner` and `schema`; only `main.py` imports `bots`. Read first: main.py and
operator.py.
"""
