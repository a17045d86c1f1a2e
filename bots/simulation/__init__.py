"""Bots on a virtual clock: they speak the protocol of real bots with the real `SyncService`, and run nothing.

It imports `bots.sync`, `bots.protocol` and `schema`. Read first: bots.py.
"""
