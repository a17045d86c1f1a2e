"""The calls of `Client` by their subject, each a class that is an attribute of the client.

It may import `errors`, `states`, `transport` and `wire`. Read first: graphs.py, operators.py.
"""
