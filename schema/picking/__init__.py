"""Which queued jobs may start now, in which order, for an assigner or for one bot.

It imports `schema.fleet`, `schema.accounting`, `schema.policy` and what these import. Read first: queues.py
and pick.py.
"""
