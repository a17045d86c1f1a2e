"""The options of a task: those of its own, those that are fields of a job request, and what is wrong with them."""

import re
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.jobs import JobFields, TaskFields
from leasehold.transport import Record
from leasehold.wire import PROPERTY

#: How calls are told apart by `unique`: by all arguments, or by a text that is made of them.
Unique = bool | Callable[..., str]
#: A key, with names of arguments in braces or made of them by a function, and how many calls with one key run at once.
Concurrency = tuple[str | Callable[..., str], int]
#: The largest number of a `concurrency`.
MAX_CONCURRENCY = 999_999_999


class TaskOptions(TaskFields, total=False):
    """The options of a task and of its calls; see `TaskRegistry.task`. Other fields: see `leasehold submit --help`."""

    retries: int
    timeout: float | None
    properties: Mapping[str, str | Sequence[str]] | None
    priority: int | None
    unique: Unique
    concurrency: Concurrency | None
    instance: str
    key: str


#: Fields of a request that a task has for itself.
_OWN = frozenset({"command", "stdin", "payload", "timeout_seconds", "max_attempts", "retry_failed", "dedup_key"})
#: Fields that say what becomes of equal calls.
OF_UNIQUE = ("on_conflict", "unique_for", "debounce", "debounce_max")
#: What to use instead of some of them.
_INSTEAD = {"timeout_seconds": "timeout", "max_attempts": "retries", "retry_failed": "retries", "dedup_key": "unique"}
#: What other libraries call an option → what to use here.
_ELSEWHERE = {
    **dict.fromkeys(("retry_policy", "autoretry_for", "retry_backoff", "backoff"), "retry"),
    **dict.fromkeys(("max_retries", "attempts"), "retries"),
    "default_retry_delay": "retry",
    **dict.fromkeys(("time_limit", "soft_time_limit"), "timeout"),
    "expires": "queue_timeout_seconds",
    "rate_limit": "resource_class` and `leasehold rate set",
    "bind": "leasehold.current()",
    "task_id": "key",
    **dict.fromkeys(("countdown", "schedule_in"), "task.after(seconds)"),
    **dict.fromkeys(("eta", "schedule_at", "scheduled_at"), "task.at(time)"),
    **dict.fromkeys(("queue", "queue_name"), "label"),
    **dict.fromkeys(("lock", "queueing_lock"), "unique` or `locks"),
}


def request_fields(
    *,
    label: str = "",
    retries: int = 0,
    timeout: float | None = None,
    properties: Mapping[str, str | Sequence[str]] | None = None,
    priority: int | None = None,
    unique: Unique = False,
    concurrency: Concurrency | None = None,
    **more: Any,
) -> Record:
    """Return the fields of a request that follow from the options of its task.

    Raises BadInput for the first option that there is not, or that has no value of its kind.
    """
    _refuse_unknown(more)
    if isinstance(retry := more.get("retry"), Mapping) and isinstance(retry.get("exceptions"), list | tuple):
        more["retry"] = {**retry, "exceptions": [_class_name(each) for each in retry["exceptions"]]}
    if not isinstance(label, str | None):
        raise BadInput("label", f"is a text, not a '{type(label).__name__}'")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise BadInput("timeout", f"is a number of seconds above 0, not {wire.escaped(timeout, 40)}")
    if isinstance(priority, bool) or not isinstance(priority, int | None):
        raise BadInput("priority", f"is a whole number, not {wire.escaped(priority, 40)}")
    if not isinstance(properties, Mapping | None):
        raise BadInput("properties", f"are a mapping, not a '{type(properties).__name__}'")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise BadInput("retries", f"is a number of at least 0, not {wire.escaped(retries, 40)}")
    if not (isinstance(unique, bool) or callable(unique)):
        raise BadInput("unique", "is true, false, or a function of the arguments that returns a text")
    for option in OF_UNIQUE:
        if not unique and more.get(option) is not None:
            raise BadInput(option, "means nothing without unique")
    if concurrency is not None:
        check_concurrency(concurrency)
    if PROPERTY in (properties or {}):
        raise BadInput("properties", f"'{PROPERTY}' is the app of the pool")
    given = {
        "label": label or None,
        "timeout_seconds": timeout,
        "properties": None if properties is None else dict(properties),
        "priority": priority,
        "max_attempts": retries + 1 if retries else None,
        "retry_failed": True if retries else None,
    }
    return {name: value for name, value in {**more, **given}.items() if value is not None}


def _class_name(given: Any) -> Any:
    """Return the name of an exception's class, by which it is compared, and anything else as it is."""
    return given.__name__ if isinstance(given, type) and issubclass(given, BaseException) else given


def check_concurrency(given: Any) -> None:
    """Raise BadInput unless this is a key and the number of calls with that key that may run at once."""
    match given:
        case [str() | Callable(), int(number)] if isinstance(given, tuple) and not isinstance(number, bool):
            if not 1 <= number <= MAX_CONCURRENCY:
                raise BadInput("concurrency", f"lets 1 to {MAX_CONCURRENCY} calls run at once, not {number}")
        case _:
            raise BadInput("concurrency", f"is such as ('customer-{{customer}}', 2), not {wire.escaped(given, 60)}")


def parameters_of(key: str | Callable[..., str]) -> list[str]:
    """Return the names of the arguments that a key holds in braces. Raises BadInput if its braces mean nothing."""
    if not isinstance(key, str):
        return []
    try:
        parts = [part for part in Formatter().parse(key) if part[1] is not None]
    except ValueError as error:
        raise BadInput("concurrency", f"'{wire.escaped(key, 80)}': {error}") from None
    names: list[str] = []
    for _, field, form, conversion in parts:
        name = re.split(r"[.\[]", field or "", maxsplit=1)[0]
        if not name or conversion not in (None, *"rsa"):
            what = (
                "names no argument in a pair of braces" if not name else f"has the unknown conversion '!{conversion}'"
            )
            raise BadInput("concurrency", f"'{wire.escaped(key, 80)}' {what}")
        # A form may name further arguments.
        names += [name, *parameters_of(form or "")]
    return names


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise BadInput for the first of these names that is no field of a request, or that a task has for itself."""
    fields = JobFields.__required_keys__ | JobFields.__optional_keys__
    for name in sorted(options):
        if name in _OWN:
            instead = f"; use `{_INSTEAD[name]}`" if name in _INSTEAD else ""
            raise BadInput(name, f"is made from the task; it is not an option of one{instead}")
        if name in _ELSEWHERE:
            raise BadInput(name, f"is not an option of a task; use `{_ELSEWHERE[name]}`")
        if name not in fields:
            own = ("name", "label", "retries", "timeout", "properties", "priority", "unique", "concurrency")
            raise BadInput(name, "is not an option of a task" + wire.suggestion(name, [*own, *sorted(fields - _OWN)]))
