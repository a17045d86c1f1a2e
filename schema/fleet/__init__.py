"""Bots as candidates for jobs: which are free, what they offer, how reliable they are.

It imports `schema.accounting`, `schema.policy` and what these import. Read first: candidates.py and success.py.
"""
