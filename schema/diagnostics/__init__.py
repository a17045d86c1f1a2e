"""Reads that check or explain the database: invariants, evidence for `explain`, the doctor.

It may import what `schema.picking` may import. Read first: invariants.py and evidence.py.
"""
