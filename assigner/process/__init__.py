"""Threads and processes: one assigner process, its threads, and a whole pool on one machine.

It imports every sub-package of `assigner` but `cli`, and `schema`. Read first: assign.py and threads.py.
"""
