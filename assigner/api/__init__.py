"""The HTTP routes of callers and operators, mounted by the gateway.

It imports every sub-package of `assigner` but `process` and `cli`, and `schema`. Read first: jobs.py and routing.py.
"""
