"""Reads that check or explain the database: invariants, evidence for `explain`, the doctor, traces of attempts.

It may import what `schema.tenancy` may import. Read first: invariants.py and evidence.py.
"""
