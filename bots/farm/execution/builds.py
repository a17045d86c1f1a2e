"""Which builds ask for what: counted in memory, and written every few seconds for the page of builds.

The same rows tell which build of an instance began first, of those that have a client at some door. Where operators
want that, the actions of all others stand one step behind. It is one step only: with another for each earlier build,
the new actions of a late build would overtake those that an earlier one sent while even more builds were before it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import structlog

from bots.gateway.workers import WorkerPool
from schema import clock
from schema.accounting import builds
from schema.accounting.builds import Asked
from schema.postgres.connection import Connection

#: Seconds between two writes. What was counted since the last one is lost if the door is killed.
PERIOD = 2.0
#: The most builds that are counted between two writes; what more of them ask for is left out.
MOST = 2_000
#: Steps of priority between the build that began first and all others.
BEHIND = 1
#: Seconds for which a build counts after a door has written that a client of it waits or asks.
ACTIVE = 5 * PERIOD
#: The most builds of which a door writes that their clients wait, those that have waited longest. What asks for an
#: action is written beside them.
MOST_WAITING = 100

_log = structlog.get_logger(__name__)


class Builds:
    """The counts of one door. Only the event loop may use it.

    earlier_first: the build of an instance that began first goes before the others.
    """

    def __init__(self, workers: WorkerPool, *, earlier_first: bool = False) -> None:
        self._workers, self._earlier_first = workers, earlier_first
        self._asked: dict[tuple[str, str], Asked] = {}
        self._waiting: Counter[tuple[str, str]] = Counter()
        #: The build that began first, by its instance.
        self._first: dict[str, str] = {}

    def behind(self, instance: str, told: Mapping[str, str]) -> int:
        """Return by how many steps of priority a new action stands behind what its client wants."""
        if not self._earlier_first:
            return 0
        invocation = told.get("invocation", "")
        first = self._first.setdefault(instance, invocation) if invocation else self._first.get(instance, "")
        return BEHIND if first != invocation else 0

    @contextmanager
    def waiting(self, instance: str, told: Mapping[str, str]) -> Iterator[None]:
        """Let a build count while the block runs, also if it asks for nothing more."""
        key = (instance, told.get("invocation", ""))
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def note(self, instance: str, told: Mapping[str, str], answer: str) -> None:
        """Count an action. told: what its client tells of its build. answer: cached, joined or new."""
        key = (instance, told.get("invocation", ""))
        if not key[1] or (key not in self._asked and len(self._asked) >= MOST):
            return
        asked = self._asked.setdefault(key, Asked("", clock.monotonic()))
        asked.tool = told.get("tool", asked.tool)
        field = "made" if answer == "new" else answer
        setattr(asked, field, getattr(asked, field) + 1)

    async def run(self) -> None:
        """Write again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self.write()
            except Exception as error:
                _log.warning("it was not written what builds have asked for", kind=type(error).__name__)

    async def write(self) -> None:
        """Write what was counted since the last time, and learn which build began first. What cannot be written is
        counted on."""
        asked, self._asked = self._asked, {}
        if not asked and not self._earlier_first:
            return
        waiting = islice(filter(_is_told, self._waiting), MOST_WAITING) if self._earlier_first else ()
        written = {each: Asked("", clock.monotonic()) for each in waiting} | asked
        found = [(instance, invocation, each) for (instance, invocation), each in written.items()]

        def work(connection: Connection) -> Mapping[str, str]:
            builds.count(connection, found, now=clock.monotonic())
            return builds.first(connection, within=ACTIVE) if self._earlier_first else {}

        try:
            self._first = dict(await self._workers.run(work))
        except BaseException:
            for key, each in asked.items():
                newer = self._asked.setdefault(key, Asked(each.tool, each.began))
                newer.began = min(newer.began, each.began)
                for field in ("cached", "joined", "made"):
                    setattr(newer, field, getattr(newer, field) + getattr(each, field))
            raise


def _is_told(build: tuple[str, str]) -> bool:
    return bool(build[1])
