"""The command `leasehold policy`: versions of what decides, one that is tried on a part of the pool, and a shadow.

The modules import what `assigner.cli` does. Read first: versions.py, canary.py.
"""
