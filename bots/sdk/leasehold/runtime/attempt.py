"""The attempt that runs in this process: what a task, or any other command of a job, knows of it and stores for it.

A bot tells a command about its attempt by environment variables, and takes the result and the checkpoint from two
files.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from leasehold.errors import BadInput, LeaseholdError
from leasehold.wire import (
    MAX_CHECKPOINT_BYTES,
    MAX_DELAY,
    MAX_PROGRESS_BYTES,
    MAX_PROGRESS_TEXT,
    check_json,
    escaped,
    json_text,
)

#: The field of a stored checkpoint that holds the recorded steps.
STEPS = "leasehold.steps"


class Again(Exception):
    """Raised by a task that asks to be run again later. It is no failure, and the attempt does not count.

    seconds: until then, 0 to a year. A job may do so 1,000 times, and is dead after that. A command says the same by
    the exit code 75 and the result `{"again": SECONDS}`. Raises ValueError for other seconds.
    """

    def __init__(self, seconds: float) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_DELAY:
            raise ValueError(f"seconds: is a number from 0 to {MAX_DELAY:,.0f}, not {escaped(seconds, 40)}")
        super().__init__(f"again in {seconds:g} s")
        self.seconds = seconds


class Cancelled(BaseException):
    """The attempt has to end: its job was cancelled, its time is over, or its bot leaves the pool.

    Not derived from Exception, so that code which handles errors of its own work does not catch it.
    """


class Attempt:
    """One attempt to run a job, described by the environment of its command.

    job: the job's id. attempt: 1 for the first. fence: grows with every attempt; hand it to systems that can refuse a
    late writer. deadline: when the bot will stop the attempt, by this machine's clock; None = no timeout. Raises
    LeaseholdError if the environment is not that of an attempt.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        try:
            self.job = environment["LEASEHOLD_JOB"]
            self.attempt = int(environment["LEASEHOLD_ATTEMPT"])
            self.fence = int(environment["LEASEHOLD_FENCE"])
            self.instance = environment["LEASEHOLD_INSTANCE"]
        except (KeyError, ValueError) as error:
            hint = "; leasehold.testing.inline() runs tasks without one"
            raise LeaseholdError(f"this process runs no attempt of a job: {error} is not set by a bot{hint}") from None
        limit = environment.get("LEASEHOLD_TIMEOUT")
        self._ends = None if limit is None else time.monotonic() + float(limit)
        self.deadline = None if limit is None else datetime.now(UTC) + timedelta(seconds=float(limit))
        self._result = environment.get("LEASEHOLD_RESULT")
        self._checkpoint = environment.get("LEASEHOLD_CHECKPOINT")
        self._inputs = environment.get("LEASEHOLD_INPUTS")
        self._progress: Any = None
        #: The checkpoint and the recorded steps, as stored together; None: not read yet.
        self._kept: dict[str, Any] | None = None
        #: Threads and coroutines of the attempt record steps side by side.
        self._recording = threading.Lock()
        #: The names of steps that have begun in this attempt; see `leasehold.step`.
        self.begun_steps: set[str] = set()
        #: The attempt has been asked to end.
        self.cancelled = False

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, at least 0; None = no timeout."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def heartbeat(self) -> None:
        """Raise Cancelled if the attempt has been asked to end. Call it between two steps of long work.

        The bot keeps the lease by itself: a task that never calls this does not lose it.
        """
        if self.cancelled:
            raise Cancelled

    @property
    def last_checkpoint(self) -> Any:
        """The latest checkpoint of this attempt or an earlier one of the job; None if there is none."""
        return self._read()["checkpoint"]

    def checkpoint(self, data: Any) -> None:
        """Store how far the work has come, for the next attempt if this one is lost.

        data: a JSON value; it replaces the one before. It and the recorded steps have at most 64 KiB. The bot sends it
        to the pool soon after. Raises BadInput for any other value, LeaseholdError if the bot stores no checkpoints.
        """
        try:
            check_json(data)
        except ValueError as error:
            raise BadInput("checkpoint", str(error)) from None
        if isinstance(data, dict) and STEPS in data:
            raise BadInput("checkpoint", f"has the key '{STEPS}', under which steps are recorded")
        with self._recording:
            self._keep({**self._read(), "checkpoint": data}, "checkpoint")

    @property
    def steps(self) -> Mapping[str, Any]:
        """What this attempt and earlier ones of the job have recorded, by the names of the steps."""
        steps: Mapping[str, Any] = self._read()[STEPS]
        return steps

    def begin_step(self, name: str) -> bool:
        """Note that a step begins; return False if one of its name has begun already."""
        with self._recording:
            is_new = name not in self.begun_steps
            self.begun_steps.add(name)
        return is_new

    def record_step(self, name: str, record: Any) -> None:
        """Keep what a step has returned, JSON, for the next attempt. Raises as `checkpoint`."""
        with self._recording:
            kept = self._read()
            self._keep({**kept, STEPS: {**kept[STEPS], name: record}}, f"step '{name}'")

    def _read(self) -> dict[str, Any]:
        kept = self._kept
        if kept is None:
            text = self.read_checkpoint()
            found = None if text is None else json.loads(text)
            kept = found if isinstance(found, dict) and STEPS in found else {STEPS: {}, "checkpoint": found}
            self._kept = kept
        return kept

    def _keep(self, kept: dict[str, Any], what: str) -> None:
        # A job without steps has its checkpoint alone.
        text = json_text(kept if kept[STEPS] else kept["checkpoint"])
        size = len(text.encode())
        if size > MAX_CHECKPOINT_BYTES:
            beside = " with what is kept already" if kept[STEPS] else ""
            most = f"at most {MAX_CHECKPOINT_BYTES} are stored"
            raise BadInput(what, f"has {size} bytes as JSON{beside}, and {most}")
        self.store_checkpoint(text)
        # A copy, so that later changes of a value do not seem to be stored.
        self._kept = {**kept, **json.loads(text)} if kept[STEPS] else {**kept, "checkpoint": json.loads(text)}

    def progress(self, share: float, text: str = "") -> None:
        """Tell how far the work has come, for those who look at the job; `leasehold show` prints it.

        share: of the whole work, from 0 to 1. text: what is being done, at most 200 characters. The bot sends the
        latest one to the pool, at most once a second; each call costs some twenty microseconds. Raises BadInput.
        """
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise BadInput("share", f"is a number from 0 to 1, not {escaped(share, 40)}")
        if not isinstance(text, str):
            raise BadInput("text", f"is a text, not a '{type(text).__name__}'")
        try:
            check_json(text)
        except ValueError as error:
            raise BadInput("text", str(error)) from None
        if len(text) > MAX_PROGRESS_TEXT:
            raise BadInput("text", f"has {len(text)} characters, at most {MAX_PROGRESS_TEXT} are stored")
        self.store_progress(float(share), text)

    def store_progress(self, share: float, text: str) -> None:
        """Leave the progress where the bot looks for it. A bot that stores no checkpoints does not look."""
        if self._checkpoint is None:
            return
        if self._progress is None:
            # Beside the checkpoint. It is written in place, because a loop may tell of each of its many steps; the bot
            # takes no note of what it reads half.
            self._progress = open(f"{self._checkpoint}.progress", "wb", buffering=0)  # noqa: SIM115
        document = json_text({"share": share, "text": text}).encode()
        os.pwrite(self._progress.fileno(), document.ljust(MAX_PROGRESS_BYTES), 0)

    def store_checkpoint(self, text: str) -> None:
        """Store a checkpoint, as JSON. Raises LeaseholdError if the bot stores none."""
        if self._checkpoint is None:
            raise LeaseholdError("the bot of this attempt stores no checkpoints")
        _replace(self._checkpoint, text)

    def read_checkpoint(self) -> str | None:
        """Return the checkpoint with which the attempt began, as JSON; None if there is none."""
        if self._checkpoint is None:
            return None
        try:
            return Path(self._checkpoint).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def read_inputs(self) -> Mapping[str, Any]:
        """Return the results of other nodes that the bot has read for this attempt, by number. Raises BadInput."""
        if self._inputs is None:
            raise BadInput("inputs", "names nodes, and only a bot reads their results")
        found: Mapping[str, Any] = json.loads(Path(self._inputs).read_text(encoding="utf-8"))
        return found

    def store_result(self, document: str) -> None:
        """Store the result of the job, a JSON document. A bot that stores no results names no file for it."""
        if self._result is not None:
            _replace(self._result, document)


def _replace(path: str, text: str) -> None:
    """Write a file so that a reader sees either the old content or all of the new one."""
    unfinished = f"{path}.new"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)


_of_context: ContextVar[Attempt | None] = ContextVar("attempt", default=None)
#: The attempt of a process that runs one at a time. Threads that a task starts see it too.
_of_process: Attempt | None = None


def set_in_process(attempt: Attempt | None) -> Attempt | None:
    """Make this the attempt of the whole process, and return the one before; None = it runs none."""
    global _of_process
    before, _of_process = _of_process, attempt
    return before


def in_context(attempt: Attempt) -> None:
    """Make this the attempt of the present context: one of several that run side by side in this process."""
    _of_context.set(attempt)


def current() -> Attempt:
    """Return the attempt that runs here. Raises LeaseholdError outside of a task or a command of a job."""
    global _of_process
    found = _of_context.get() or _of_process
    if found is None:
        found = _of_process = Attempt(os.environ)
    return found
