"""The storage that build clients see through the door: blobs and cached results, which another server keeps.

It imports `bots.farm.protos` and the settings. Read first: upstream.py and passthrough.py.
"""
