"""Who shares the pool: instances, cohorts, tokens, and what is taken out of service.

It imports every other sub-package of `schema` but `diagnostics`, because a change of cohorts moves jobs. Read first:
instances.py and cohorts.py.
"""
