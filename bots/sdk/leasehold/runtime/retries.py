"""Which failed attempts are tried again, and when, by the retry policy of their job. Pure.

A policy is the field `retry` of a request, whose values have been checked there.
"""

from collections.abc import Mapping
from typing import Any

from leasehold.wire import AGAIN, MAX_DELAY, printable

#: What holds where a policy says nothing: seconds, a factor, and a part of a wait.
BASE, FACTOR, CAP, JITTER = 1.0, 2.0, 60.0, 0.0
#: Above this exponent every wait is the longest one.
_LAST = 100


def asks_again(exit_code: int | None, result: Any) -> float | None:
    """Return the seconds after which a command with this exit code and result asks to be run again; None if it does
    not."""
    seconds = result.get("again") if exit_code == AGAIN and isinstance(result, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_DELAY:
        return None
    return float(seconds)


def is_retried(policy: Mapping[str, Any], *, exit_code: int | None, result: Any) -> bool:
    """Return whether an attempt that failed so is tried again: any, unless the policy names exceptions or exit codes.

    result: that of the attempt, which names the class of a task's exception and those that it derives from.
    """
    exceptions, codes = policy.get("exceptions"), policy.get("exit_codes")
    if not exceptions and not codes:
        return True
    error = result.get("error") if isinstance(result, dict) else None
    bases = error.get("bases") if isinstance(error, dict) else None
    return exit_code in (codes or ()) or (isinstance(bases, list) and any(each in bases for each in exceptions or ()))


def error_in_words(result: Any) -> str | None:
    """Return the error of a task that failed, on one line of at most 300 characters: `ValueError: no such order`.

    None if the result is no error of a task.
    """
    match result:
        case {"error": {"type": str(kind), "message": str(message), "traceback": str()}}:
            first = message.strip().partition("\n")[0]
            return printable(f"{kind}: {first}" if first else kind, 300)
        case _:
            return None


def wait(policy: Mapping[str, Any], *, attempt: int, chance: float) -> float:
    """Return the seconds between an attempt, counted from 1, and the next one.

    They are base x factor^(attempt - 1), at most cap, and up to `jitter` of that more. chance: from 0 to 1.
    """
    grown = policy.get("base", BASE) * policy.get("factor", FACTOR) ** min(attempt - 1, _LAST)
    return float(min(MAX_DELAY, min(policy.get("cap", CAP), grown) * (1 + policy.get("jitter", JITTER) * chance)))
