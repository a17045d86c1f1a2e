"""One job of `inline`, and an attempt of it: what they tell of themselves, as a gateway and a bot would."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.runtime.attempt import Attempt
from leasehold.runtime.task_runner import TaskCall
from leasehold.states import FINAL, JobState
from leasehold.transport import Record


@dataclass
class InlineJob:
    """A job of `inline`, as it is now.

    request: what was submitted. result: the JSON document that the task has left; None without one.
    """

    id: str
    request: Record
    state: JobState = JobState.QUEUED
    attempts: int = 0
    #: The number of the last run: unlike that of attempts it grows with each.
    fence: int = 0
    exit_code: int | None = None
    reason: str | None = None
    result: Any = None
    seconds: float | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    #: It waits for `InlineJobs.run_delayed`, because it is not to start before this time.
    due: datetime | None = None
    #: Until then it keeps its deduplication key, also once it has succeeded.
    kept_until: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    checkpoint: str | None = None
    #: `share`, `text` and `at` of what it has told last.
    progress: Record | None = None
    #: The states and results of the nodes on which it depends, by number, if it is a node of a graph.
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    call: TaskCall | None = field(default=None, repr=False)
    #: The thread that runs it.
    thread: int | None = field(default=None, repr=False)

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    def keep_key(self, request: Record) -> None:
        """Keep the deduplication key for as long as this submit says."""
        if "unique_for" in request:
            self.kept_until = datetime.now(UTC) + timedelta(seconds=request["unique_for"])

    @property
    def keeps_key(self) -> bool:
        """True while the key is kept, however long the job runs; a job that failed or was cancelled keeps none."""
        if self.is_final and self.state is not JobState.SUCCEEDED:
            return False
        return self.kept_until is not None and self.kept_until > datetime.now(UTC)

    def end(self, state: JobState, reason: str | None) -> None:
        """Make it final."""
        self.state, self.reason, self.finished_at = state, reason, datetime.now(UTC)
        self.due = self.call = self.thread = None

    @property
    def instance(self) -> str:
        return str(self.request.get("instance") or "default")

    def told(self, submission: str) -> Record:
        """Return what a gateway tells of the job to those who wait for it under the id of this submission."""
        ending = {"exit_code": self.exit_code, "seconds": self.seconds, "reason": self.reason}
        return {
            "id": submission,
            "joined": None if submission == self.id else self.id,
            "state": str(self.state),
            "reason": self.reason,
            "attempts": self.attempts,
            "created_at": self.created_at.isoformat(),
            "started_at": None if self.started_at is None else self.started_at.isoformat(),
            "finished_at": None if self.finished_at is None else self.finished_at.isoformat(),
            "result": ending if self.is_final and self.exit_code is not None else None,
        }

    def shown(self, submission: str) -> Record:
        """Return what a gateway tells of the job by itself. It has no events: nothing has moved it but this process."""
        asked = self.request
        return {
            **self.told(submission),
            "instance": self.instance,
            "label": asked.get("label", ""),
            "priority": asked.get("priority", 0),
            "units": 1,
            "max_attempts": asked.get("max_attempts", 5),
            "queued_at": self.created_at.isoformat(),
            "schedule_after": None if self.due is None else self.due.isoformat(),
            "bot": None,
            "metadata": asked.get("metadata", {}),
            "properties": {name: [value] for name, value in asked["properties"].items()},
            "payload": {"command": asked["command"]},
            "has_result": self.result is not None,
            "progress": self.progress,
            "events": [],
        }


class InlineAttempt(Attempt):
    """An attempt that keeps its result and its checkpoint in its job, and not in files."""

    def __init__(self, job: InlineJob) -> None:
        limit = job.request.get("timeout_seconds")
        super().__init__(
            {
                "LEASEHOLD_JOB": job.id,
                "LEASEHOLD_ATTEMPT": str(job.attempts),
                "LEASEHOLD_FENCE": str(job.fence),
                "LEASEHOLD_INSTANCE": job.instance,
                **({} if limit is None else {"LEASEHOLD_TIMEOUT": str(limit)}),
            }
        )
        self._of = job

    def store_result(self, document: str) -> None:
        self._of.result = json.loads(document)

    def store_checkpoint(self, text: str) -> None:
        self._of.checkpoint = text

    def store_progress(self, share: float, text: str) -> None:
        self._of.progress = {"share": share, "text": text, "at": datetime.now(UTC).isoformat()}

    def read_checkpoint(self) -> str | None:
        return self._of.checkpoint

    def read_inputs(self) -> Mapping[str, Any]:
        return self._of.inputs
