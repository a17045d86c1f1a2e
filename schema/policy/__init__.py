"""What operators set about urgency and time: classes, service levels, queue limits, windows, meters.

It imports `schema.postgres`, `schema.tables` and the ground modules. Read first: priority_classes.py and
time_windows.py.
"""
