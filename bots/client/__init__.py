"""The HTTP client of the gateway, used by the command line and by the demo.

It imports the ground modules of `bots` and `schema`. Read first: client.py and transport.py.
"""
