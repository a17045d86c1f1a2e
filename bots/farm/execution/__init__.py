"""The execution of actions as jobs: from an action to a request, and from the end of a job to the client's answer.

It imports `bots.farm.storage`, `bots.gateway` and `schema`. Read first: streams.py and outcome.py.
"""
