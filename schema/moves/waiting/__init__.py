"""The moves of jobs that wait: rest and wake, hold and release, priority, start, and time-outs.

It imports the modules `cancel`, `submit` and `dependencies` of `schema.moves`, and what these import. Read first:
backoff.py and hold.py.
"""
