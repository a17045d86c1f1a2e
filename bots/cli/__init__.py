"""The caller's commands: submit, wait, show, list, logs, cancel, explain, graphs.

It imports `leasehold` and the ground modules of `schema`. Read first: caller.py and jobs.py. Most of a command's time
goes into imports, so a command imports only what it needs: jobs.py, and all that it imports, do without pydantic.
"""
