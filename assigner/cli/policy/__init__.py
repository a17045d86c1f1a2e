"""The command `leasehold policy`: versions of what decides, and a version that is tried on a part of the pool.

The modules import what `assigner.cli` does. Read first: versions.py, canary.py.
"""
