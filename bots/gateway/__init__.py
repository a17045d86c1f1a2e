"""The HTTP server: authentication, long polls, batches of sync calls.

It imports `bots.sync`, `bots.protocol` and `schema`. Read first: app.py and routes.py.
"""
