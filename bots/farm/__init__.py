"""The farm door: build clients speak the Remote Execution API with it, and their actions run as jobs of this pool.

It imports `bots.gateway`, `bots.protocol` and `schema`, and needs the extra `farm`. Read first: server.py and
execution/streams.py.
"""
