"""Client library of Leasehold: jobs, their states and results, tasks, and the errors of a gateway.

It imports nothing of the pool's other packages, which import its errors, states and bounds. Read first: client.py, then
tasks.py for Python functions as jobs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasehold.attempt import Attempt, Cancelled, current
    from leasehold.errors import TaskFailed
    from leasehold.pool import Pool
    from leasehold.tasks import Task, TaskJob, TaskRegistry

#: Where a name of this package is defined. It is imported when it is used, so that `leasehold.errors` costs no more.
_LATER = {
    "Attempt": "attempt",
    "Cancelled": "attempt",
    "current": "attempt",
    "TaskFailed": "errors",
    "Pool": "pool",
    "Task": "tasks",
    "TaskJob": "tasks",
    "TaskRegistry": "tasks",
}

__all__ = ["Attempt", "Cancelled", "Pool", "Task", "TaskFailed", "TaskJob", "TaskRegistry", "current"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'leasehold' has no attribute '{name}'")
    return getattr(import_module(f"leasehold.{_LATER[name]}"), name)
