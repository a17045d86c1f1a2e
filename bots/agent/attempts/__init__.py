"""One attempt at a job on a bot, from its assignment to its outcome.

It imports the modules of the agent that prepare, start and contain commands, but none of sessions, leases and tasks.
Read first: attempt.py, what all kinds of attempts share, and run.py, a command in processes of its own. The attempts of
tasks are in `bots.agent.warm_children`.
"""
