"""The load of a fault run: callers that submit jobs with keys and note what the pool acknowledges."""

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leasehold.client import Client
from leasehold.errors import LeaseholdError

from ops.chaos import execution
from ops.chaos.execution import Kind
from ops.chaos.journal import Journal
from schema import clock

#: Seconds for one request, and for all tries of it. What is not answered then is sent again later, under its key.
TIMEOUT, PATIENCE = 3.0, 3.0
#: The most jobs in one request, and one of so many requests that is repeated although it was answered.
MOST, REPEATED = 4, 20
#: One of so many jobs is cancelled.
CANCELLED = 25
#: Kinds of commands, and how often each is drawn; beats and the pause before each, in seconds. The longest run for
#: longer than a session lives: only these could still run when their job has been given to another bot.
KINDS = {Kind.PLAIN: 8, Kind.DEAF: 1, Kind.HIDING: 1}
LONGEST = (100, 0.1)
LENGTHS = {(0, 0.05): 8, (3, 0.05): 16, (10, 0.05): 8, (30, 0.1): 2, LONGEST: 2}
#: Priorities of jobs; the lowest number starts first. The longest jobs have an own one, before all others, so that they
#: start elsewhere as soon as their bot is lost.
PRIORITIES, FIRST = range(-3, 4), -4


@dataclass(frozen=True)
class Work:
    """Draws the commands of jobs. `log`: the execution log; `run`: the mark of all their processes."""

    log: Path
    run: str

    def draw(self, chance: random.Random) -> dict[str, Any]:
        """Return the request of one job, without a key."""
        (kind,) = chance.choices(list(KINDS), weights=list(KINDS.values()))
        (length,) = chance.choices(list(LENGTHS), weights=list(LENGTHS.values()))
        asked = execution.payload(self.log, self.run, kind=kind, beats=length[0], pause=length[1])
        priority = FIRST if length == LONGEST else chance.choice(PRIORITIES)
        # More attempts than a run has faults for one job: none may be given up because of faults alone.
        return {**asked, "priority": priority, "max_attempts": 100}


class Caller:
    """A thread that submits jobs as long as fewer than `backlog` are unfinished, and sends unknown ones again.

    unfinished: asked for the number of acknowledged jobs that are not known to be final.
    """

    def __init__(
        self, name: str, client: Client, journal: Journal, work: Work, chance: random.Random, *, room: "Room"
    ) -> None:
        self._name, self._client, self._journal, self._work = name, client, journal, work
        self._chance, self._room = chance, room
        self._stopping = threading.Event()
        self._unknown: list[list[dict[str, Any]]] = []
        self._last: list[dict[str, Any]] = []
        self._unknown_matters = True
        self._number = 0
        self._thread = threading.Thread(target=self._call, name=name, daemon=True)
        #: When the last answer came, on the monotonic clock, and the errors of requests by their text.
        self.answered_at = 0.0
        self.errors: dict[str, int] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Submit nothing new, and end once every unknown request has an answer."""
        self._stopping.set()

    def abandon(self) -> None:
        """End after the request under way, whatever is unknown then."""
        self._stopping.set()
        self._unknown_matters = False
        self._thread.join()

    def join(self, within: float) -> bool:
        """Wait for the end of the thread; False if it has not ended in time."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def _call(self) -> None:
        while not self._stopping.is_set() or (self._unknown and self._unknown_matters):
            if self._unknown:
                self._send(self._unknown.pop(0))
            elif self._room.free() or not self._last:
                self._send(self._drawn())
            else:
                # Asks for nothing new, and shows whether submits are answered.
                self._send(self._last)
            clock.sleep(self._chance.uniform(0.05, 0.35))

    def _drawn(self) -> list[dict[str, Any]]:
        jobs = []
        for _ in range(self._chance.randint(1, MOST)):
            self._number += 1
            jobs.append({**self._work.draw(self._chance), "key": f"{self._name}-{self._number}"})
        return jobs

    def _send(self, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            self._journal.ask(job["key"])
        try:
            answers = self._client.submit(jobs)
        except LeaseholdError as error:
            self._failed(error)
            self._unknown.append(jobs)
            return
        self.answered_at, self._last = clock.monotonic(), jobs
        for job, answer in zip(jobs, answers, strict=True):
            self._journal.acknowledge(job["key"], answer.id)
        if self._chance.randrange(REPEATED) == 0:
            self._unknown.append(jobs)
        if self._chance.randrange(CANCELLED) == 0:
            chosen = self._chance.choice(answers).id
            self._journal.cancel(chosen)
            try:
                self._client.cancel([chosen])
            except LeaseholdError as error:
                self._failed(error)

    def _failed(self, error: LeaseholdError) -> None:
        told = f"{type(error).__name__}: {error}"[:120]
        self.errors[told] = self.errors.get(told, 0) + 1


class Room:
    """Says whether callers may submit more: fewer than `most` jobs are unfinished, as far as anybody knows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.unfinished = 0

    def free(self) -> bool:
        return self.unfinished < self._most
