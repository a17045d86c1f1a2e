"""Which bot gets a job: sampled candidates, scores, and the working copy of a batch.

It imports `assigner.config`, metrics and `schema`. Choosing is pure: no SQL, clock or global chance in a strategy.
The strategies themselves are in `strategies/`. Read first: strategy.py and sampling.py.
"""
