"""Upkeep: duties that every assigner process carries out at intervals.

It may import `assigner.queries`, `assigner.admission`, `assigner.config` and `schema`. Read first: duties.py and
upkeep.py.
"""
