"""Which queued jobs may start now, in which order, for an assigner or for one bot.

It imports `schema.fleet`, `schema.accounting`, `schema.policy` and what these import. Read first: ready.py and
queues.py.
"""
