"""The pool on a virtual clock: the same statements, moves and choices on a database whose time a program advances.

Nothing here restates a rule of the pool. A simulation differs from a pool in its clock, its bots and its callers. It
imports `process` and what that imports; its bots are handed in. Read first: loop.py and clock.py.
"""
