"""What keeps commands apart from their agent and from each other: accounts, limits and a sandbox.

It imports `bots.agent.workspace` and the ground modules of `schema`; `privileges` imports the standard library only,
because the guardian runs it. Read first: containment.py and privileges.py.
"""
