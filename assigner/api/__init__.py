"""The HTTP routes that the gateway mounts. May import every other sub-package of `assigner` but `cli`.

Read first: `resources` (the routes of everything that operators set) and `operations` (what else operators may do).
"""
