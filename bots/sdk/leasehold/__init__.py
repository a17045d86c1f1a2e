"""Client library of Leasehold: jobs, their states and results, and the errors of a gateway.

It imports nothing of the pool's other packages, which import its errors, states and bounds. Read first: client.py.
"""
