"""Meters that are read by a command: it is run now and then, by one process of all, and prints what it has read."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial

import structlog
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from schema import meters
from schema.engine import Database
from schema.errors import BadInput
from schema.limits import Name, escaped

#: Bytes that such a command may print.
MAX_PRINTED = 64 * 1024
#: Seconds between two looks at which meters are due.
LOOK = 5.0

log = structlog.get_logger()


class MeterSettings(BaseModel):
    """A meter that is read by a command, which prints one JSON object: `used` and `limit`, numbers in a unit of its
    own, and optionally `resets_at`, when it begins at 0 again. The command is run by assigner processes, without a
    shell, one of them at a time.

    interval: seconds between two readings. Doubling it halves the runs and lets jobs go by readings twice as old.
    timeout: seconds after which the command is killed; then the reading before it stands, as long as windows take it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    command: tuple[str, ...] = Field(min_length=1, max_length=100)
    interval: float = Field(default=300.0, ge=1, le=86400)
    timeout: float = Field(default=10.0, gt=0, le=60)


class Reading(BaseModel):
    """What the command prints; other keys mean nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    used: float
    limit: float
    resets_at: AwareDatetime | None = None


class Polling:
    """The meters of one process that commands read. A command that fails is logged, and its meter stays as it was."""

    def __init__(self, database: Database, settings: Sequence[MeterSettings]) -> None:
        self._database, self._settings = database, settings

    def reconfigure(self, settings: Sequence[MeterSettings]) -> None:
        """Read other meters from now on."""
        self._settings = settings

    def run_once(self) -> float:
        """Read the meters that are due and nobody else reads; returns the seconds until the next look."""
        for each in self._settings:
            if self._database.run(partial(meters.claim, name=each.name, interval=each.interval)):
                self._read(each)
        return LOOK

    def _read(self, each: MeterSettings) -> None:
        try:
            reading = read(each)
            self._database.run(
                lambda c: meters.put(c, each.name, used=reading.used, most=reading.limit, resets_at=reading.resets_at)
            )
        except BadInput as error:
            log.error("a meter could not be read", meter=each.name, reason=str(error))


def read(meter: MeterSettings) -> Reading:
    """Run the command of a meter once. Raises BadInput, naming the command, if that gives no reading."""
    printed = _run(meter)
    if len(printed) > MAX_PRINTED:
        raise BadInput("command", f"prints more than {MAX_PRINTED} bytes")
    try:
        return Reading.model_validate_json(printed)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"])) or "its output"
        raise BadInput("command", f"prints no reading: {where}: {escaped(found['msg'], 120)}") from None


def _run(meter: MeterSettings) -> bytes:
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                meter.command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise BadInput("command", f"cannot be run: {error.strerror}") from None
        try:
            code = process.wait(meter.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise BadInput("command", f"takes longer than {meter.timeout:g} s") from None
        if code != 0:
            raise BadInput("command", f"ends with exit {code}")
        printed.seek(0)
        return printed.read(MAX_PRINTED + 1)
