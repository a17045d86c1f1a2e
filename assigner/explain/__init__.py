"""Why a job does not run, or why it ran where it ran.

It imports `assigner.queries`, `assigner.admission` and `schema`. Read first: answer.py and gates.py.
"""
