"""`leasehold-action`, the command of the job that runs an action: it starts a runner and leaves the result.

It runs on a bot, as an ordinary job. It is started for each action, so it imports neither the database nor gRPC nor the
messages of the API, unless a result is too large to be left with the job, or an action has timed out or could not be
run. Nor does it import what of Python's own library takes milliseconds, such as `subprocess` and `pathlib`.

Exit code 0: the action has succeeded. 1: it has ended otherwise, and its result is left, or its inputs are not there or
no tree, which another try would not change. 70: it could not be run, so that the job is tried again.
"""

from __future__ import annotations

import argparse
import binascii
import json
import os
import signal
import sys

from bots.farm.storage.programs import RUNNER, program

TYPE_CHECKING = False  # in place of that of `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from bots.farm.client import Storage

#: See `bots.farm.execution.actions`, which this program does not import.
NOT_RUN = 70
#: Codes of google.rpc.Code.
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, FAILED_PRECONDITION, INTERNAL = 0, 3, 4, 9, 13
#: How often the runner repeats a call that the storage does not answer, and the milliseconds before the first time. The
#: waits grow, and together they last longer than a door takes to come back.
RETRIES, RETRY_MS = 8, 250
#: Bytes of a result, in base64, that are left with the job; more go into the storage.
MOST_LEFT = 56 * 1024
#: Exit code of a command that the runner has killed because of the action's time-out.
KILLED = 137


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one action; see the module."""
    parser = argparse.ArgumentParser(prog="leasehold-action", description="Run an action of the farm door.")
    parser.add_argument("--cas", required=True, help="where the action's blobs are: grpc://HOST:PORT, or grpcs://")
    parser.add_argument("--ca", help="PEM file of the authorities of that server's certificate")
    parser.add_argument("--token-file", help="file with a token for that server")
    parser.add_argument("--cert", help="PEM file of a certificate for that server")
    parser.add_argument("--key", help="PEM file of the certificate's key")
    parser.add_argument("--action", required=True, help="the action, in base64")
    parser.add_argument("--mount", action="append", default=[], help="a directory that the action sees; repeatable")
    parser.add_argument("digest", help="the digest by which clients know the action")
    given = parser.parse_args(arguments)
    where = os.environ.get("LEASEHOLD_RESULT")
    runner = program(RUNNER)
    if where is None:
        print("error: LEASEHOLD_RESULT is not set", file=sys.stderr)
        return NOT_RUN
    if runner is None:
        return _not_run(where, f"{RUNNER} is not on its bot's machine")
    work = os.path.dirname(where)
    try:
        for file in _files(given).values():
            # The runner says of a file that it cannot read only that the storage does not answer.
            _read(file)
        with open(f"{work}/action", "wb") as action:
            action.write(binascii.a2b_base64(given.action))
        return _ended(_run(runner, given, work), given, work, where)
    except Exception as error:
        # A full disk, or storage that went away while it took a large result, is no end of the action.
        return _not_run(where, _said(error))


def _not_run(where: str, message: str) -> int:
    """Tell why an action could not be run: in the job's output, and to its client. Return the exit code of the job."""
    from contextlib import suppress

    print(f"error: {message}", file=sys.stderr)
    with suppress(OSError):
        _leave(where, code=INTERNAL, message=message)
    return NOT_RUN


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _said(error: Exception) -> str:
    try:
        from bots.farm.storage.upstream import said
    except ImportError as lacking:
        return str(lacking)
    return said(error) or type(error).__name__


def _run(runner: str, given: argparse.Namespace, work: str) -> int:
    """Start the runner and return its exit code."""
    mounts = [f"--bind-mount={each}:{each}" for each in given.mount if os.path.isdir(each)]
    command = [
        runner,
        f"--remote={given.cas.replace('grpc', 'http', 1)}",
        *(f"{option}={file}" for option, file in _files(given).items()),
        "--disable-localcas",
        f"--retry-limit={RETRIES}",
        f"--retry-delay={RETRY_MS}",
        "--log-level=warning",
        f"--action={work}/action",
        f"--action-result={work}/action-result",
        f"--workspace-path={work}",
        *mounts,
    ]
    # A directory of PATH that cannot be read makes the runner abort.
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": work, "TMPDIR": os.environ.get("TMPDIR", work)}
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    # Python ignores these two, and what it starts would ignore them too. `subprocess` gives them back as well.
    child = os.posix_spawn(runner, command, environ, file_actions=[nothing], setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _files(given: argparse.Namespace) -> dict[str, str]:
    """The files by which the runner knows the storage and is known to it, by the runner's options."""
    files = {
        "--server-cert": given.ca,
        "--access-token": given.token_file,
        "--client-cert": given.cert,
        "--client-key": given.key,
    }
    return {option: file for option, file in files.items() if file is not None}


def _ended(code: int, given: argparse.Namespace, work: str, where: str) -> int:
    """Leave what became of the action, and return the exit code of the job."""
    try:
        data = _read(f"{work}/action-result")
    except FileNotFoundError:
        from leasehold.errors import BadInput

        try:
            missing = _missing(given)
        except BadInput as error:
            _leave(where, code=INVALID_ARGUMENT, message=str(error))
            return 1
        if missing:
            _leave(where, code=FAILED_PRECONDITION, message=f"the storage does not have {missing} of its blobs")
            return 1
        return _not_run(where, f"{RUNNER} ended with {code} and left no result")
    ended_with = exit_code(data)
    timed_out = ended_with == KILLED and _took_too_long(given.action, data)
    told: dict[str, Any] = {"code": DEADLINE_EXCEEDED if timed_out else OK}
    if timed_out:
        told["message"] = "the action ran longer than its timeout"
    text = binascii.b2a_base64(data, newline=False).decode()
    if len(text) > MOST_LEFT:
        _leave(where, **told, stored=_stored(given, data))
    else:
        _leave(where, **told, result=text)
    return 0 if ended_with == 0 and not timed_out else 1


def _leave(where: str, **told: Any) -> None:
    with open(where, "w") as file:
        json.dump(told, file)


def exit_code(result: bytes) -> int:
    """Return the exit code in an ActionResult, its field 4. Raises ValueError if the bytes are no message.

    The classes of the API read it too, but to load them takes as much processor time as all else in this program.
    """
    found = place = 0
    while place < len(result):
        tag, place = _number(result, place)
        match tag & 7:
            case 0:
                value, place = _number(result, place)
                found = value if tag >> 3 == 4 else found
            case 1:
                place += 8
            case 2:
                size, place = _number(result, place)
                place += size
            case 5:
                place += 4
            case _:
                raise ValueError("the runner's result is no message")
    if place > len(result):
        raise ValueError("the runner's result is cut off")
    return (found & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _number(data: bytes, place: int) -> tuple[int, int]:
    """The number that begins at a place, of 7 bits a byte with the lowest first, and the place after it."""
    value = shift = 0
    while place < len(data):
        value |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            return value, place + 1
        place, shift = place + 1, shift + 7
    raise ValueError("the runner's result is cut off")


def _took_too_long(action: str, data: bytes) -> bool:
    """Return whether an action has a time-out, and ran so long."""
    from bots.farm.protos import remote_execution_pb2

    asked = remote_execution_pb2.Action.FromString(binascii.a2b_base64(action))
    told = remote_execution_pb2.ActionResult.FromString(data).execution_metadata
    took = told.execution_completed_timestamp.ToNanoseconds() - told.execution_start_timestamp.ToNanoseconds()
    return asked.HasField("timeout") and bool(took >= asked.timeout.ToNanoseconds() * 0.99)


def _stored(given: argparse.Namespace, data: bytes) -> str:
    """Write a result that is too large into the storage, and return its digest."""
    with _storage(given) as storage:
        return str(storage.upload([data])[0])


def _missing(given: argparse.Namespace) -> int:
    """Return how many blobs that the action needs the storage does not have."""
    from bots.farm.protos import remote_execution_pb2
    from bots.farm.storage import trees

    action = remote_execution_pb2.Action.FromString(binascii.a2b_base64(given.action))
    with _storage(given) as storage:
        return len(storage.look(trees.missing_of_action(action)))


def _storage(given: argparse.Namespace) -> Storage:
    from pathlib import Path

    from bots.farm.client import Keys, Storage

    token = None if given.token_file is None else Path(given.token_file).read_text().strip()
    files = [None if each is None else Path(each) for each in (given.ca, given.cert, given.key)]
    return Storage(given.cas, Keys(token, *files))


if __name__ == "__main__":
    sys.exit(main())
