"""What runs tasks: the attempt as a task sees it, one call in a process of its own, and many calls in a warm process.

It imports the client library's tasks, serialisers and errors, and makes no request.
Read first: task_runner.py and attempt.py.
"""
