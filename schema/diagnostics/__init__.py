"""Reads that judge or explain the database: invariants, evidence for `explain`, the doctor.

It imports what `schema.picking` imports. Read first: invariants.py and evidence.py.
"""
