"""The strategies that are built in: each chooses bots for the jobs of a cycle in its own way.

They import `strategy` and `room` beside this folder, which say what every strategy is given. All of them are pure.
Read first: capacity.py and locality.py.
"""
