"""The console: web pages on which operators and submitters watch and change a pool, with their own tokens.

It imports `leasehold`, `bots.cli` and the ground modules of `schema`. NiceGUI, on which it is built, comes with the
extra `leasehold[console]`. Read first: server.py and view.py.
"""
