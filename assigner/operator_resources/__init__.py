"""What operators set, each thing declared once: `api/resources` makes its routes of it, `cli_resources` its commands.

May import `schema`, nothing of `bots`, `api` or the command line. Read first: `declaration` (the form of a declaration)
and `limits` (most of the declarations).
"""
