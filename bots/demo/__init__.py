"""The demo: real work for a pool, verified and reported.

It imports `leasehold` and the ground modules of `schema`. Read first: demo.py and workload.py.
"""
