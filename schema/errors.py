"""The errors that cross the edge of a room. A lost race is never one of them."""


class LeaseholdError(Exception):
    """Something the caller has to know; the text is one line and safe to show."""


class BadInput(LeaseholdError):
    """A value that was refused before anything was written.

    `field` is the path of the value in what the caller sent, `reason` one clause without a full stop.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NotFound(LeaseholdError):
    """The thing is absent, or belongs to somebody else: both answer alike."""


class Conflict(LeaseholdError):
    """The request is well formed but contradicts what is stored. `code` is stable and meant for programs."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class QueueFull(Conflict):
    """There is no room for more jobs at the moment: the same request may be taken later."""

    CODE = "queue_full"

    def __init__(self, reason: str) -> None:
        super().__init__(self.CODE, reason)


class Forbidden(LeaseholdError):
    """The caller is known but may not do this."""


class Unauthorised(LeaseholdError):
    """The caller did not say who it is, or said it wrongly."""


class NotReady(LeaseholdError):
    """The database cannot be used yet: unreachable, or of another schema version."""
