"""Typed errors that functions of this package raise to their callers. A lost race is never an error."""


class LeaseholdError(Exception):
    """Base class of all errors that a caller has to know; its text is one line and safe to show."""


class BadInput(LeaseholdError):
    """A value that was refused before anything was written.

    `field`: path of the value in the caller's request. `reason`: one clause without a full stop.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NotFound(LeaseholdError):
    """The object does not exist, or belongs to another instance. Both give the same answer, so ids cannot be probed."""


class Conflict(LeaseholdError):
    """The request is well formed but contradicts what is stored. `code` is a stable word for programs."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class QueueFull(Conflict):
    """A queue limit is reached. The same request may be accepted later."""

    CODE = "queue_full"

    def __init__(self, reason: str) -> None:
        super().__init__(self.CODE, reason)


class Forbidden(LeaseholdError):
    """The caller is known but may not do this."""


class Unauthorised(LeaseholdError):
    """The caller sent no token, or one that is not valid."""


class NotReady(LeaseholdError):
    """The database cannot be used yet: unreachable, or of another schema version.

    retry_after: seconds that a gateway asks its client to wait.
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TaskFailed(LeaseholdError):
    """A task has no value: its function raised an error, or its job ended without a result.

    job: the id of the job. state: the state in which it ended. kind: the name of the class of the remote error, None if
    there was none. message: what the error said, or why the job ended. traceback: the remote traceback, or nothing.
    """

    def __init__(
        self, job: str, *, task: str, state: str, message: str, kind: str | None = None, traceback: str = ""
    ) -> None:
        said = message if kind is None else f"{kind}: {message}" if message else kind
        super().__init__(f"task '{task}' {state}: {said.partition(chr(10))[0]}")
        self.job, self.task, self.state, self.kind, self.message, self.traceback = (
            job, task, state, kind, message, traceback,
        )  # fmt: skip
        if traceback:
            self.add_note(f"The remote traceback:\n{traceback}")
