"""Typed errors that functions of this package raise to their callers. A lost race is never an error."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from leasehold.states import EndKind, JobState, end_kind


class LeaseholdError(Exception):
    """Base class of all errors that a caller has to know; its text is one line and safe to show.

    submitted: ids of the jobs that earlier parts of a refused submit have made, in the order of the requests.
    """

    submitted: tuple[str, ...] = ()

    def __reduce__(self) -> Any:
        """Let an error go from one process to another, as those of a worker of `multiprocessing` do."""
        return _made_again, (type(self), self.args, self.__dict__)


E = TypeVar("E", bound=LeaseholdError)


def _made_again(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


#: The most refused values that one answer tells.
MAX_TOLD = 10


class BadInput(LeaseholdError):
    """A value that was refused before anything was written.

    `field`: path of the value in the caller's request. `reason`: one clause without a full stop. `others`: what else of
    the same request was refused, as far as it was looked for; together at most `MAX_TOLD`. `more`: how many further
    jobs, lines or nodes were refused, beside these.
    """

    def __init__(self, field: str, reason: str, *, others: Sequence["BadInput"] = (), more: int = 0) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.others = tuple(others)
        self.more = more

    @classmethod
    def of(cls, refused: Sequence["BadInput"], *, more: int = 0) -> "BadInput":
        """Make one error of the first `MAX_TOLD` of these; the others are counted, with `more`."""
        more += max(0, len(refused) - MAX_TOLD)
        return cls(refused[0].field, refused[0].reason, others=refused[1:MAX_TOLD], more=more)

    def each(self, change: Callable[["BadInput"], "BadInput"]) -> "BadInput":
        """Return the same refusals, each changed."""
        return BadInput.of([change(each) for each in (self, *self.others)], more=self.more)

    def renamed(self, name: Callable[[str], str]) -> "BadInput":
        """Return the same refusals with other paths."""
        return self.each(lambda each: BadInput(name(each.field), each.reason))


A = TypeVar("A")
B = TypeVar("B")


def check_each(check: Callable[[A], B], given: Iterable[A]) -> list[B]:
    """Return what `check` makes of each. Raises one BadInput of those that it refuses."""
    found: list[B] = []
    refused: list[BadInput] = []
    more = 0
    for each in given:
        try:
            found.append(check(each))
        except BadInput as error:
            if len(refused) < MAX_TOLD:
                refused.append(error)
            else:
                more += 1
    if refused:
        raise BadInput.of(refused, more=more)
    return found


class NotFound(LeaseholdError):
    """The object does not exist, or belongs to another instance. Both give the same answer, so ids cannot be probed."""


class Conflict(LeaseholdError):
    """The request is well formed but contradicts what is stored. `code` is a stable word for programs."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


#: Code of a conflict: a job has the deduplication key of a request that refuses it or cannot replace it.
KEY_TAKEN = "key_taken"


class QueueFull(Conflict):
    """A queue limit is reached. The same request may be accepted later."""

    CODE = "queue_full"

    def __init__(self, reason: str) -> None:
        super().__init__(self.CODE, reason)


class Forbidden(LeaseholdError):
    """The caller is known but may not do this."""


class Unauthorised(LeaseholdError):
    """The caller sent no token, or one that is not valid."""


class NoAnswer(LeaseholdError):
    """No gateway was reached, or it gave no answer, for as long as the client has patience.

    Whether the request was executed is unknown. A submit with the same keys may be repeated.
    """


class TimedOut(LeaseholdError, TimeoutError):
    """The time of a wait was over before all jobs were final. `pending`: ids of those that were not; they go on.

    look: the command that says how the first of them stands; it is told in a note.
    """

    def __init__(self, pending: Sequence[str], timeout: float, *, look: str = "explain") -> None:
        others = f" and {len(pending) - 1} more" if len(pending) > 1 else ""
        super().__init__(f"not final after {timeout:g} s: {pending[0]}{others}")
        self.pending = tuple(pending)
        self.add_note(f"`leasehold {look} {pending[0]}` says how it stands")


class NotSucceeded(LeaseholdError):
    """A job ended without success.

    job: its id. state: the state in which it ended. reason: why, if anything is known. kind: the same in a word.
    exit_code: that of its command, if it ended by itself.
    """

    def __init__(self, job: str, state: JobState, reason: str | None, *, exit_code: int | None = None) -> None:
        super().__init__(f"job {job} is {state}" + (f": {reason}" if reason else ""))
        self.job, self.state, self.reason, self.exit_code = job, state, reason, exit_code
        kind = end_kind(state, reason)
        # Of a task the reason is its error.
        self.kind: EndKind = EndKind.EXIT_CODE if kind is EndKind.NO_RESULT and exit_code else kind


class NotReady(LeaseholdError):
    """The database cannot be used yet: unreachable, or of another schema version.

    retry_after: seconds that a gateway asks its client to wait.
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TaskFailed(LeaseholdError):
    """A task has no value: its function raised an error, or its job ended without a result.

    job: the id of the job. state: the state in which it ended. kind: the name of the class of the remote error, such as
    "ValueError"; if there was none, an `EndKind`, such as "timeout". message: what the error said, or why the job
    ended. traceback: the remote traceback, or nothing.
    """

    def __init__(
        self, job: str, *, task: str, state: str, message: str, kind: str | None = None, traceback: str = ""
    ) -> None:
        said = message if kind is None else f"{kind}: {message}" if message else kind
        super().__init__(f"task '{task}' {state}: {said.partition(chr(10))[0]}")
        self.job, self.task, self.state, self.message, self.traceback = job, task, state, message, traceback
        self.kind: str = kind or end_kind(state, message)
        if traceback:
            self.add_note(f"The remote traceback:\n{traceback}")


class NotInline(LeaseholdError):
    """`testing.inline` was asked for something that only a pool can do. `feature`: what that is, in words."""

    def __init__(self, feature: str, *, ignored_as: str | None = None) -> None:
        hint = "" if ignored_as is None else f"; inline(ignore=['{ignored_as}']) passes it over"
        super().__init__(f"needs a pool, which inline() is not: {feature}{hint}")
        self.feature = feature
