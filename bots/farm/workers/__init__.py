"""Door B: workers of the Remote Workers API, such as buildbox-worker, are bots that run actions.

It imports the actions, the storage and the sync calls. Read first: leases.py and bot_sessions.py.
"""
