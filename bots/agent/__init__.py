"""The reference bot: it holds leases and runs their commands.

It imports `leasehold`, `bots.protocol` and the ground modules of `schema`; it never connects to the database. Read
first: agent.py and session.py.
"""
