"""Which constrained jobs may start, and in which order: gates, fair share, orders.

It imports `assigner.placement`, `assigner.config` and `schema`. Read first: gates.py, judging.py and controller.py.
"""
