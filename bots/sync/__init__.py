"""The server's side of a bot's session: one call that reports leases and gets the leases to hold.

It imports `bots.protocol` and `schema`. Read first: call.py and settle.py.
"""
