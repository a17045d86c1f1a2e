"""Python functions as jobs: the tasks of an app, the calls that submit them, and the schedules that it declares.

It may import what a client is made of, and makes no request but by the client of its pool. Read first: task.py, then
arguments.py.
"""
