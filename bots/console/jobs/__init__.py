"""Pages of the console about jobs: the list with its filter, one job, and acts on jobs.

It imports the other modules of `bots.console` but not `pages.py`, which imports it. Read first: job_list.py, job.py.
"""
