"""One assigner: it picks jobs, reads a snapshot of bots, chooses, and commits, over and over.

It imports `assigner.admission`, `assigner.preemption`, `assigner.placement` and `schema`. Read first: assigner.py and
settings.py.
"""
