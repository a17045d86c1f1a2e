"""Which leases are stopped so that an instance below its minimum gets its units.

It imports `schema`. Read first: plan.py (the pure choice) and reclaim.py.
"""
