"""The caller's commands: submit, wait, show, list, logs, cancel, explain, graphs.

It imports `bots.client` and the ground modules of `schema`. Read first: jobs.py and options.py.
"""
