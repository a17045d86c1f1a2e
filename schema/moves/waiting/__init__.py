"""The moves of jobs that wait: rest and wake, hold and release, priority, start, and time-outs.

It imports the modules `cancel`, `dependencies`, `graph_retry`, `submissions` and `submit_again` of `schema.moves`, and
what these import. Read first: backoff.py and hold.py.
"""
