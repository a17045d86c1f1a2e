"""The same work by other pools and queues on PostgreSQL.

`run` starts them, each in an environment of its own that `install` makes; `contest` is what their scripts share. The
scripts run without Leasehold and import nothing of it.
"""
