"""An attempt that runs: what commands and tasks share with those who stop and report them."""

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import structlog
from leasehold.errors import BadInput
from leasehold.wire import NO_RESULT
from pydantic import ValidationError

from bots.agent.attempts.endings import Ending, Verdict, complaining, describe_exit
from bots.agent.attempts.output import Output
from bots.agent.isolation.containment import Containment, Site
from bots.agent.job_files import (
    Checkpoint,
    FileNames,
    ProgressFile,
    read_result,
    read_usage,
    with_retries,
    write_new,
)
from bots.agent.launcher import Launcher
from bots.agent.workspace import MARK, Workspace
from bots.protocol import Outcome
from schema import clock
from schema.fields import first_refusal
from schema.requests import Payload

_log = structlog.get_logger("leasehold.agent")

_RESERVED = "LEASEHOLD_"
#: Variables below that prefix that the pool sets in a payload: of schedules and of callbacks. They give no rights.
_OF_THE_POOL = frozenset(
    {
        "LEASEHOLD_SCHEDULE",
        "LEASEHOLD_TICK",
        "LEASEHOLD_GRAPH",
        "LEASEHOLD_GRAPH_SUCCEEDED",
        "LEASEHOLD_GRAPH_FAILED",
        "LEASEHOLD_GRAPH_CANCELLED",
    }
)


class StopReason(Enum):
    """Why a command is being stopped."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # the server asked for it
    RELEASED = "released"  # the agent leaves the pool
    LOST = "lost"  # the agent no longer has the lease, and reports nothing


class Assignment(NamedTuple):
    """One attempt to run.

    timeout: seconds of run time; None = unlimited. gpus: the numbers of the bot's GPUs that it is given; None if it
    takes none of a bot that counts its GPUs. checkpoint: JSON that an earlier attempt left; None if none did. units:
    those of the bot that it takes.
    """

    job: str
    fence: int
    attempt: int
    instance: str
    timeout: float | None
    payload: Mapping[str, Any] | None
    gpus: Sequence[int] | None = None
    checkpoint: str | None = None
    units: int = 1


@dataclass(frozen=True)
class RunContext:
    """What all commands of one agent share.

    grace: seconds between SIGTERM and SIGKILL. environment: the allowed variables of the agent's own environment.
    containment: the accounts, limits and sandbox of commands. chance: of the waits before retries.
    """

    workplace: Workspace
    launcher: Launcher
    grace: float
    environment: Mapping[str, str]
    containment: Containment = field(default_factory=Containment.none)
    chance: random.Random = field(default_factory=random.Random)


class AttemptRun(ABC):
    """One assignment that runs: what its thread, or the launcher of tasks, shares with those who stop and report it.

    notify: called when the command has started and when it has ended.
    """

    def __init__(self, assignment: Assignment, place: RunContext, *, notify: Callable[[], None]) -> None:
        self.assignment = assignment
        self.output = Output()
        self.checkpoint = Checkpoint(assignment.checkpoint)
        self.progress = ProgressFile()
        self.has_started = False
        #: The results of other nodes that a call takes, as JSON; how it ends without a start if they are not to be had.
        self.inputs: bytes | None = None
        self.refused: Outcome | None = None
        self.over = threading.Event()
        #: How the attempt ended, set before `over`; None if the lease was lost.
        self.outcome: Outcome | None = None
        self._place, self._notify = place, notify
        self._lock = threading.Lock()
        self._stop: StopReason | None = None
        self._kill_at: float | None = None
        #: Why the command was stopped; None if it ended by itself.
        self._cause: StopReason | None = None

    @abstractmethod
    def start(self) -> None:
        """Start, once an earlier run of the same job is over. Returns at once. Raises RuntimeError without a thread."""

    def start_late(self) -> None:
        """Start, or end with `refused`; heed who has wanted to stop it before. For a thread that does nothing else."""
        self.start()
        if self.stopping:
            self._wake()

    @property
    def stopping(self) -> bool:
        """True if it has to end."""
        return self._stop is not None

    @abstractmethod
    def _wake(self) -> None:
        """Let those who run the command notice that it has to stop."""

    def stop(self, why: StopReason, *, grace: float | None = None) -> None:
        """End all processes of the command: SIGTERM, and SIGKILL after `grace` seconds (default: the agent's setting).

        The outcome reports the first reason, but LOST replaces any other. A further call can only shorten the grace.
        Returns at once.
        """
        with self._lock:
            if self._stop is None or why is StopReason.LOST:
                self._stop = why
            kill_at = clock.monotonic() + (self._place.grace if grace is None else grace)
            self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        self._wake()

    def _finish(self, outcome: Outcome | None) -> None:
        """Make the outcome known. No process of the attempt is left, or it cannot be killed."""
        self.output.end()
        if outcome is not None:
            attempt, chance = self.assignment.attempt, self._place.chance.random()
            stopped = self._stop is not None
            try:
                outcome = with_retries(
                    outcome, self.assignment.payload, stopped=stopped, attempt=attempt, chance=chance
                )
            except (TypeError, ValueError, ArithmeticError) as error:  # nobody has checked the payload of this job
                _log.warning("a retry policy is no use", job=self.assignment.job, error=type(error).__name__)
        with self._lock:
            self.outcome = None if self._stop is StopReason.LOST else outcome
        self.over.set()
        self._notify()

    def _payload(self) -> Payload:
        """Check the payload. Raises ValueError if no bot could run it."""
        try:
            payload = Payload.model_validate(self.assignment.payload)
        except ValidationError as invalid:
            raise ValueError(first_refusal(invalid, "payload")) from None
        texts = [*payload.command, *payload.env, *payload.env.values(), payload.stdin or ""]
        "".join(texts).encode()
        if any("\0" in text for text in texts[:-1]):
            raise ValueError("command or env holds a NUL character")
        if not payload.command[0]:
            raise ValueError("command.0: is empty")
        if any(not name or "=" in name for name in payload.env):
            raise ValueError("env: a name is empty or holds '='")
        return payload

    def _place_files(self, directory: str, files: FileNames, account: tuple[int, int] | None) -> None:
        """Write what the command is given in files. account: see `write_new`. Raises OSError."""
        self.checkpoint.place(f"{directory}/{files.checkpoint}", account)
        self.progress.place(f"{directory}/{files.progress}", account)
        if self.inputs is not None:
            write_new(f"{directory}/{files.inputs}", self.inputs, account)

    def _variables(self, payload: Payload, directory: str, files: FileNames) -> dict[str, str]:
        """Return what the command is told of its attempt and of its directory, and what its payload sets."""
        own = {
            name: value for name, value in payload.env.items() if name in _OF_THE_POOL or not name.startswith(_RESERVED)
        }
        return {
            "HOME": directory,
            "TMPDIR": f"{directory}/tmp",
            **own,
            "LEASEHOLD_JOB": self.assignment.job,
            "LEASEHOLD_FENCE": str(self.assignment.fence),
            "LEASEHOLD_ATTEMPT": str(self.assignment.attempt),
            "LEASEHOLD_INSTANCE": self.assignment.instance,
            "LEASEHOLD_USAGE": f"{directory}/{files.usage}",
            "LEASEHOLD_RESULT": f"{directory}/{files.result}",
            "LEASEHOLD_CHECKPOINT": f"{directory}/{files.checkpoint}",
            **({} if self.inputs is None else {"LEASEHOLD_INPUTS": f"{directory}/{files.inputs}"}),
            "LEASEHOLD_BOT": self._place.workplace.name,
            **self._gpus(),
            **({} if self.assignment.timeout is None else {"LEASEHOLD_TIMEOUT": f"{self.assignment.timeout:.15g}"}),
            MARK: directory,
        }

    def _gpus(self) -> dict[str, str]:
        """Tell the command which GPUs it is given. A process that honours CUDA_VISIBLE_DEVICES sees no others."""
        if self.assignment.gpus is None:
            return {}
        numbers = ",".join(map(str, self.assignment.gpus))
        return {"CUDA_VISIBLE_DEVICES": numbers, "LEASEHOLD_GPUS": numbers}

    def _with_files(self, outcome: Outcome, directory: Path, files: FileNames, owner: int | None) -> Outcome:
        """Add what the command left in its files: usage, result, and the reason if its last checkpoint is not kept.

        owner: the user id of the command, where it is not that of the agent.
        """
        outcome = self._with_usage(outcome, directory / files.usage, owner)
        if outcome.result is None:
            try:
                found = read_result(directory / files.result, owner=owner)
                outcome = outcome.model_copy(update={"result": found})
            except BadInput as error:
                outcome = complaining(outcome, f"{NO_RESULT} it {error.reason}")
        self.progress.look(last=True)
        return self._with_checkpoint(outcome)

    def _with_usage(self, outcome: Outcome, path: Path, owner: int | None) -> Outcome:
        """Add the usage that the command wrote to its outcome; invalid usage is logged and left out."""
        try:
            used = read_usage(path, owner=owner)
        except BadInput as error:
            _log.warning("what a command says it used is no use", job=self.assignment.job, reason=str(error))
            return outcome
        return outcome if used is None else outcome.model_copy(update={"usage": used})

    def _with_checkpoint(self, outcome: Outcome) -> Outcome:
        """Look at the checkpoint for the last time, unless no attempt can follow; add the reason if it is not kept."""
        if outcome.verdict == "succeeded":
            return outcome
        self.checkpoint.look(last=True)
        refusal = self.checkpoint.refusal
        if refusal is None:
            return outcome
        return complaining(outcome, f"its last checkpoint is not kept, because it {refusal}")

    def _stopped(self, cause: StopReason, ending: Ending) -> Outcome | None:
        match cause:
            case StopReason.TIMEOUT:
                return self._outcome("failed", ending, reason=f"timeout after {self.assignment.timeout:.15g} s")
            case StopReason.CANCELLED:
                return self._outcome("stopped", ending, reason=None)
            case StopReason.RELEASED:
                return self._outcome("released", ending, reason="the bot leaves")
            case StopReason.LOST:
                return None
            case _:
                assert_never(cause)

    def _ended(self, ending: Ending, site: Site) -> Outcome:
        """Return the outcome of a command that ended by itself with an exit code."""
        assert ending.exit_code is not None
        if ending.exit_code == 0:
            return self._outcome("succeeded", ending, reason=None)
        return self._outcome("failed", ending, reason=describe_exit(ending.exit_code, site.privileges))

    def _outcome(self, verdict: Verdict, ending: Ending, *, reason: str | None) -> Outcome:
        return Outcome(
            verdict=verdict,
            exit_code=ending.exit_code,
            reason=reason,
            seconds=ending.seconds,
            output_bytes=self.output.written,
            output_truncated=self.output.truncated,
        )
