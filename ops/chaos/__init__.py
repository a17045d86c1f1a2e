"""Fault injection: a whole pool as processes, faults by name, and a checker that knows what the pool must never do.

Run from the root of the repository: `python -m ops.chaos.run --minutes 10 --seed 1`; README.md tells how to read what
it prints. Read first: `checker`, which says what a violation is, and `pool`, which runs the processes. Everything here
may import the product, and nothing of the product imports it.
"""
