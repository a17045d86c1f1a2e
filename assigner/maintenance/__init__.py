"""Upkeep: duties that any assigner process carries out at intervals.

It imports `assigner.queries`, `assigner.admission`, `assigner.config` and `schema`. Read first: upkeep.py and
overflow.py.
"""
