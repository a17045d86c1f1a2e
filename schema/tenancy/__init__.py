"""Who shares the pool: instances, cohorts, tokens, and drains.

It may import every other sub-package of `schema` except `diagnostics`, because a change of cohorts moves jobs. Read
first: instances.py and cohorts.py.
"""
