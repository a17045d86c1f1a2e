"""Client library of Leasehold: jobs, their states and results, tasks, and the errors of a gateway.

It imports nothing of the pool's other packages, which import its errors, states and bounds. Read first: pool.py, then
client.py, and tasks/ for Python functions as jobs.

Each name is imported when it is first used, because a command of the command line uses few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasehold.async_pool import AsyncPool as AsyncPool
    from leasehold.chains import chain as chain
    from leasehold.chains import chord as chord
    from leasehold.chains import group as group
    from leasehold.client import Client as Client
    from leasehold.client import Job as Job
    from leasehold.errors import BadInput as BadInput
    from leasehold.errors import Conflict as Conflict
    from leasehold.errors import Forbidden as Forbidden
    from leasehold.errors import LeaseholdError as LeaseholdError
    from leasehold.errors import NoAnswer as NoAnswer
    from leasehold.errors import NotFound as NotFound
    from leasehold.errors import NotInline as NotInline
    from leasehold.errors import NotReady as NotReady
    from leasehold.errors import NotSucceeded as NotSucceeded
    from leasehold.errors import QueueFull as QueueFull
    from leasehold.errors import TaskFailed as TaskFailed
    from leasehold.errors import TimedOut as TimedOut
    from leasehold.errors import Unauthorised as Unauthorised
    from leasehold.graphs import Node as Node
    from leasehold.jobs import CancelledJob as CancelledJob
    from leasehold.jobs import Explanation as Explanation
    from leasehold.jobs import JobPlan as JobPlan
    from leasehold.jobs import JobRequest as JobRequest
    from leasehold.jobs import ListedJob as ListedJob
    from leasehold.jobs import Progress as Progress
    from leasehold.jobs import Result as Result
    from leasehold.jobs import ShownJob as ShownJob
    from leasehold.pool import Pool as Pool
    from leasehold.runtime.attempt import Again as Again
    from leasehold.runtime.attempt import Attempt as Attempt
    from leasehold.runtime.attempt import Cancelled as Cancelled
    from leasehold.runtime.attempt import current as current
    from leasehold.runtime.steps import step as step
    from leasehold.states import FINAL as FINAL
    from leasehold.states import EndKind as EndKind
    from leasehold.states import JobState as JobState
    from leasehold.tasks.large_results import ResultFiles as ResultFiles
    from leasehold.tasks.periodic import AppliedSchedule as AppliedSchedule
    from leasehold.tasks.task import AsyncTask as AsyncTask
    from leasehold.tasks.task import AsyncTaskJob as AsyncTaskJob
    from leasehold.tasks.task import Task as Task
    from leasehold.tasks.task import TaskJob as TaskJob
    from leasehold.tasks.task import TaskRegistry as TaskRegistry

#: Module → names that it exports here.
_EXPORTS = {
    "async_pool": ("AsyncPool",),
    "runtime.attempt": ("Again", "Attempt", "Cancelled", "current"),
    "runtime.steps": ("step",),
    "client": ("Client", "Job"),
    "errors": (
        *("BadInput", "Conflict", "Forbidden", "LeaseholdError", "NoAnswer", "NotFound", "NotInline", "NotReady"),
        *("NotSucceeded", "QueueFull", "TaskFailed", "TimedOut", "Unauthorised"),
    ),
    "chains": ("chain", "chord", "group"),
    "graphs": ("Node",),
    "jobs": ("CancelledJob", "Explanation", "JobPlan", "JobRequest", "ListedJob", "Progress", "Result", "ShownJob"),
    "tasks.large_results": ("ResultFiles",),
    "tasks.periodic": ("AppliedSchedule",),
    "pool": ("Pool",),
    "states": ("FINAL", "EndKind", "JobState"),
    "tasks.task": ("AsyncTask", "AsyncTaskJob", "Task", "TaskJob", "TaskRegistry"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
