"""Recorded steps of an attempt: what one has returned, the next attempt of its job gets instead of running it again.

The records are kept with the checkpoint, so they are as fenced as it is, and share its bound.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from leasehold.errors import BadInput
from leasehold.runtime.attempt import Attempt, current
from leasehold.tasks.arguments import decode_result, encode_result
from leasehold.wire import JsonSerialiser, check_json, escaped

P = ParamSpec("P")
R = TypeVar("R")

#: Characters of a step's name.
MAX_NAME = 200
_JSON = JsonSerialiser()


def step(name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function, unless an earlier attempt of this job has recorded what it returned; return that value.

    name: of the step, 1 to 200 characters, once in an attempt. For an `async def` the step is to be awaited. The value
    is JSON, or of the type that the function is annotated with, as the result of a task; all records of a job have
    64 KiB at most, with its checkpoint. An error records nothing, and the step may be tried again.

    The bot takes note of a record within its `output_interval`, half a second, and at the end of the attempt. If it is
    killed before, the step runs again: it runs at least once, and once where nothing is killed. Raises BadInput for a
    name that has been used, and for a value that cannot be recorded; LeaseholdError outside of an attempt.
    """
    here = current()
    _check(name)
    if inspect.iscoroutinefunction(function):
        return _awaited(here, name, function, *args, **kwargs)  # type: ignore[return-value]
    with _begun(here, name):
        is_known = name in here.steps
        value: R = (
            _value(here, name, function) if is_known else _record(here, name, function, function(*args, **kwargs))
        )
    return value


async def _awaited(here: Attempt, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _begun(here, name):
        if name in here.steps:
            await asyncio.sleep(0)  # one that is cancelled ends here too
            return _value(here, name, function)
        return _record(here, name, function, await function(*args, **kwargs))


def _check(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise BadInput("step", f"has a name of 1 to {MAX_NAME} characters, not {escaped(name, 40)}")
    try:
        check_json(name)
    except ValueError as error:
        raise BadInput("step", str(error)) from None


@contextmanager
def _begun(here: Attempt, name: str) -> Iterator[None]:
    """Use up the name for this attempt, unless the block raises: what has failed may be tried again."""
    if not here.begin_step(name):
        raise BadInput("step", f"'{name}' has begun in this attempt already: give each step a name of its own")
    try:
        yield
    except BaseException:
        here.begun_steps.discard(name)
        raise


def _record(here: Attempt, name: str, function: Callable[..., Any], value: Any) -> Any:
    try:
        record = encode_result(function, _JSON, value)
    except (TypeError, ValueError) as error:
        raise BadInput(f"step '{name}'", f"has returned what cannot be recorded: {error}") from None
    here.record_step(name, record)
    # What the next attempt would get, so that it makes no difference which one goes on.
    return _value(here, name, function)


def _value(here: Attempt, name: str, function: Callable[..., Any]) -> Any:
    return decode_result(function, _JSON, here.steps[name])
