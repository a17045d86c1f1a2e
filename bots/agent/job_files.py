"""The files in which a command leaves its usage, its result and its checkpoint, and what a result says of retries.

All are in the directory of the attempt, which belongs to the command. So the agent trusts nothing that it finds there:
it follows no link, never waits, reads a bounded number of bytes, and only of files of the command's own account.
"""

import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.runtime import retries
from pydantic import TypeAdapter, ValidationError

from bots.protocol import MAX_REASON, Outcome, Progress, Usage
from schema import clock, validation
from schema.fields import first_refusal
from schema.validation import check_json, parse_json

#: The largest usage file in bytes, and the longest report: the reports on 10,000 ended leases must fit into one call.
MAX_BYTES, MAX_TOLD_BYTES = 4096, 200

#: Seconds between two messages that tell the progress of one attempt.
TELL_EVERY = 1.0

_USAGE: TypeAdapter[Usage] = TypeAdapter(Usage)
#: Follows no symbolic link and never blocks, because the command may have put a link or a FIFO at the path.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_bytes(path: Path | str, field: str, *, limit: int, owner: int | None = None) -> bytes | None:
    """Read a file that a command wrote; None if there is none. Raises BadInput, naming `field`, if it may not be read
    or has more than `limit` bytes.

    Follows no symbolic link either if the command has put one in place of its directory. owner: the user id that the
    file must have, because the command may have put a hard link to a file of another there.
    """
    try:
        with _opened(path, os.O_RDONLY) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(field, "is no file")
            if owner not in (None, status.st_uid):
                raise BadInput(field, "belongs to another account")
            raw = b""
            while len(raw) <= limit and (part := os.read(descriptor, limit + 1 - len(raw))):
                raw += part
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(field, f"cannot be read: {error.strerror}") from None
    if len(raw) > limit:
        raise BadInput(field, f"is larger than {limit} bytes")
    return raw


def read_usage(path: Path, *, owner: int | None = None) -> Usage | None:
    """Read the usage that a command wrote; None if it wrote none. Raises BadInput unless it is amounts by unit."""
    raw = read_bytes(path, "usage", limit=MAX_BYTES, owner=owner)
    if raw is None:
        return None
    try:
        found = _USAGE.validate_python(parse_json(raw, "usage")) if raw.strip() else None
    except ValidationError as error:
        raise BadInput("usage", first_refusal(error)[:300]) from None
    if found is not None and len(_USAGE.dump_json(found)) > MAX_TOLD_BYTES:
        raise BadInput("usage", f"says more than {MAX_TOLD_BYTES} bytes")
    return found


def read_result(path: Path, *, owner: int | None = None) -> str | None:
    """Read the result that a command left; None if it left none. Raises BadInput for anything but bounded JSON."""
    raw = read_bytes(path, "result", limit=validation.MAX_RESULT_BYTES, owner=owner)
    return None if raw is None else check_json("result", raw, validation.MAX_RESULT_BYTES)


class FileNames(NamedTuple):
    """Names of the files in the directory of an attempt. `usage` and `result` do not exist before the command writes
    them; `checkpoint` does if an earlier attempt left a checkpoint.
    """

    usage: str
    result: str
    checkpoint: str

    @property
    def progress(self) -> str:
        """The file beside the checkpoint in which a command tells how far it is."""
        return f"{self.checkpoint}.progress"

    @property
    def inputs(self) -> str:
        """The file beside it with the results of other nodes that a call takes."""
        return f"{self.checkpoint}.inputs"


#: The names where a directory has one attempt.
FILES = FileNames(".leasehold-usage", ".leasehold-result", ".leasehold-checkpoint")


def numbered(number: int) -> FileNames:
    """Return the names for one of several attempts in a directory: no late writer reaches the files of another."""
    return FileNames(f"{FILES.usage}-{number}", f"{FILES.result}-{number}", f"{FILES.checkpoint}-{number}")


@dataclass(frozen=True)
class Unsent:
    """A checkpoint that the gateway does not have; `number` counts those of the attempt."""

    number: int
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the messages that carry it."""
        return {"checkpoint": self.text, "checkpoint_number": self.number}


def write_new(path: str, content: bytes, account: tuple[int, int] | None) -> None:
    """Write a file for a command that has not started. account: its user and group id, where they are not the agent's.

    Raises OSError, also if something is there already.
    """
    with (
        _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        file.write(content)
        if account is not None:
            os.fchown(descriptor, *account)


class Checkpoint:
    """The checkpoint of one attempt: what an earlier attempt left, and what the gateway does not have yet of this one.

    The thread of the run places the file and looks at it at the end; while the command runs, the thread that sends
    output looks at it. Any thread may read what is unsent.
    """

    def __init__(self, earlier: str | None) -> None:
        self._lock = threading.Lock()
        self._earlier = self._latest = earlier
        self._number = self._sent = 0
        self._path: str | None = None
        self._owner: int | None = None
        self._status: tuple[int, ...] | None = None
        #: Why what the command has written last is not kept; None if it is kept.
        self.refusal: str | None = None

    def place(self, path: str, account: tuple[int, int] | None) -> None:
        """Write the checkpoint of an earlier attempt, if there is one, for the command of this one, which has not
        started.

        account: user and group id of the command, where they are not the agent's. Raises OSError.
        """
        if self._earlier is not None:
            write_new(path, self._earlier.encode(), account)
            self._status = _status(path)
        self._path, self._owner = path, None if account is None else account[0]

    def look(self, *, last: bool = False) -> None:
        """Take note of what the command has written; of what may not be a checkpoint, only why.

        A file that looks unchanged is not read again, unless it is the `last` look.
        """
        path = self._path
        if path is None:
            return
        with self._lock:
            status = _status(path)
            if status is None or (status == self._status and not last):
                return
            self._status = status
            try:
                limit = validation.MAX_CHECKPOINT_BYTES
                raw = read_bytes(path, "checkpoint", limit=limit, owner=self._owner)
                found = self._latest if raw is None else check_json("checkpoint", raw, limit)
                self.refusal = None
                if found != self._latest:
                    self._latest, self._number = found, self._number + 1
            except BadInput as error:
                self.refusal = error.reason

    @property
    def unsent(self) -> Unsent | None:
        """The latest checkpoint, unless the gateway has it."""
        with self._lock:
            if self._latest is None or self._number == self._sent:
                return None
            return Unsent(self._number, self._latest)

    def sent(self, number: int) -> None:
        """Record that the gateway has the checkpoint with this number."""
        with self._lock:
            self._sent = max(self._sent, number)


class ProgressFile:
    """How far the command of one attempt says that it is. The gateway is told at most once a second.

    The thread that sends output looks at it and sends it, while the command runs. What it has written last is told with
    its end.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._owner: int | None = None
        self._sent_at = -math.inf
        self._latest: Progress | None = None
        self._sent = 0
        #: Guards the three above: the end of the command may be noticed while an earlier progress is under way.
        self._lock = threading.Lock()

    def place(self, path: str, account: tuple[int, int] | None) -> None:
        """Say where the file is, of a command that has not started. account: see `Checkpoint.place`."""
        self._path, self._owner = path, None if account is None else account[0]

    def look(self, *, last: bool = False) -> None:
        """Take note of what the command has written. What is no progress, or is being written, is left alone.

        last: the command has ended, and what it has written last is told without delay.
        """
        if self._path is None or not os.path.lexists(self._path):
            return
        with self._lock, suppress(BadInput, ValidationError, TypeError):
            if not last and clock.monotonic() < self._sent_at + TELL_EVERY:
                return
            raw = read_bytes(self._path, "progress", limit=wire.MAX_PROGRESS_BYTES, owner=self._owner)
            number = 1 if self._latest is None else self._latest.number + 1
            found = Progress.model_validate({**parse_json(raw or b"", "progress"), "number": number})
            if self._latest is None or (found.share, found.text) != (self._latest.share, self._latest.text):
                self._latest = found

    @property
    def unsent(self) -> Progress | None:
        """The latest that was noted, unless the gateway has it."""
        with self._lock:
            return None if self._latest is None or self._latest.number <= self._sent else self._latest

    def sent(self, told: Progress) -> None:
        """Record that the gateway has this one."""
        with self._lock:
            self._sent, self._sent_at = max(self._sent, told.number), clock.monotonic()


@contextmanager
def _opened(path: Path | str, flags: int) -> Iterator[int]:
    """Open a file in the directory of an attempt. Raises OSError."""
    parent, name = os.path.split(path)
    directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
    try:
        descriptor = os.open(name, flags | _SAFELY, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _status(path: str) -> tuple[int, ...] | None:
    """What changes when the file at `path` does; None if there is none. It is only looked at, never trusted."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def with_retries(
    outcome: Outcome, payload: Mapping[str, Any] | None, *, stopped: bool, attempt: int, chance: float
) -> Outcome:
    """Return the outcome of a failed attempt with what its command, or its job's retry policy, says of the next one.

    The reason of a task's failure is its error.
    stopped: the command was stopped, so that it has nothing to ask for. attempt: counted from 1. chance: from 0 to 1.
    """
    if outcome.verdict != "failed" or outcome.exit_code is None:
        return outcome
    result = json.loads(outcome.result or "null")
    seconds = retries.asks_again(outcome.exit_code, result)
    if seconds is not None and not stopped:
        told: dict[str, Any] = {"again": seconds, "reason": f"asks to be run again in {seconds:g} s", "result": None}
        return outcome.model_copy(update={"verdict": "released", **told})
    code, error = f"exit code {outcome.exit_code}", retries.error_in_words(result)
    if error is not None and outcome.reason is not None and outcome.reason.startswith(code):
        # That the process of a task ended with 1 tells nobody why.
        reason = wire.printable(error + outcome.reason.removeprefix(code), MAX_REASON)
        outcome = outcome.model_copy(update={"reason": reason})
    policy = (payload or {}).get("retry")
    if policy is None:
        return outcome
    if not retries.is_retried(policy, exit_code=outcome.exit_code, result=result):
        return outcome.model_copy(update={"final": True})
    return outcome.model_copy(update={"retry_in": round(retries.wait(policy, attempt=attempt, chance=chance), 3)})
