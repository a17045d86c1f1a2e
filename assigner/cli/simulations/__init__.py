"""The commands that simulate: `leasehold simulate` compares policies, `leasehold tune` searches for a better one.

They import `assigner.simulation`. Read first: simulate.py.
"""
