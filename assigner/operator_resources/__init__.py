"""Operator resources, each declared once: `api/resources.py` makes the routes and `cli/resources.py` the commands.

It may import `schema`, but nothing of `bots`, `assigner.api` or `assigner.cli`. Read first: declaration.py (the form of
a declaration) and limits.py (most of the declarations).
"""
