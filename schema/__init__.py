"""Everything that is stored in PostgreSQL: tables, SQL functions, and the functions that read and write them.

It imports neither `assigner` nor `bots`. Read first: states.py (states and legal transitions) and the docstring of
`schema.moves` (the functions that change the state of jobs and leases).
"""
