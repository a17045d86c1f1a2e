"""Which builds ask for what: counted in memory, and written every few seconds for the page of builds.

The same rows tell which build of an instance began first, of those that have a client at some door. Where operators
want that, the actions of all others stand one step behind. It is one step only: with another for each earlier build,
the new actions of a late build would overtake those that an earlier one sent while even more builds were before it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from bots.gateway.workers import WorkerPool
from schema import clock
from schema.accounting import builds
from schema.accounting.builds import Asked
from schema.postgres.connection import Connection

#: Seconds between two writes. What was counted since the last one is lost if the door is killed.
PERIOD = 2.0
#: The most builds of an instance that are counted between two writes; what more of them ask for is left out.
MOST = 2_000
#: Steps of priority between the build that began first and all others.
BEHIND = 1
#: Seconds for which a build counts after a door has written that a client of it waits or asks.
ACTIVE = 5 * PERIOD
#: A door writes which builds are still there although their clients only wait. Of each instance it writes at most this
#: many, those that have waited longest. The first build, and those that ask for an action, are written beside them.
MOST_WAITING = 100

_log = structlog.get_logger(__name__)


@dataclass
class _Waits:
    """since: when the first of a build's clients began to wait, seconds. clients: that wait."""

    since: float
    clients: int = 0


class Builds:
    """The counts of one door. Only the event loop may use it.

    earlier_first: the build of an instance that began first goes before the others.
    """

    def __init__(self, workers: WorkerPool, *, earlier_first: bool = False) -> None:
        self._workers, self._earlier_first = workers, earlier_first
        #: By instance and invocation.
        self._asked: defaultdict[str, dict[str, Asked]] = defaultdict(dict)
        self._waiting: dict[tuple[str, str], _Waits] = {}
        #: The build that began first, by its instance.
        self._first: dict[str, str] = {}

    def behind(self, instance: str, told: Mapping[str, str]) -> int:
        """Return by how many steps of priority a new action stands behind what its client wants."""
        first = self._first.get(instance) if self._earlier_first else None
        return BEHIND if first is not None and first != told.get("invocation") else 0

    @contextmanager
    def waiting(self, instance: str, told: Mapping[str, str]) -> Iterator[None]:
        """Let a build that has asked for an action count while the block runs, also if it asks for nothing more."""
        key = (instance, told.get("invocation", ""))
        waits = self._waiting.setdefault(key, _Waits(clock.monotonic()))
        waits.clients += 1
        try:
            yield
        finally:
            waits.clients -= 1
            if not waits.clients:
                del self._waiting[key]

    def note(self, instance: str, told: Mapping[str, str], answer: str) -> None:
        """Count an action. told: what its client tells of its build. answer: cached, joined or new."""
        invocation = told.get("invocation")
        if not invocation:
            return
        named = self._asked[instance]
        if invocation not in named and len(named) >= MOST:
            return
        asked = named.setdefault(invocation, Asked("", clock.monotonic()))
        asked.tool = told.get("tool", asked.tool)
        field = "made" if answer == "new" else answer
        setattr(asked, field, getattr(asked, field) + 1)
        self._first.setdefault(instance, invocation)

    async def run(self) -> None:
        """Write again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.try_to_write()

    async def try_to_write(self) -> None:
        """Write; what fails is logged, and written the next time."""
        try:
            await self.write()
        except Exception as error:
            _log.warning("it was not written what builds have asked for", kind=type(error).__name__)

    async def write(self) -> None:
        """Write what was counted since the last time, and learn which build began first. What cannot be written is
        counted on."""
        asked, self._asked = self._asked, defaultdict(dict)
        if not asked and not self._earlier_first:
            return
        written = {(instance, build): each for instance, named in asked.items() for build, each in named.items()}
        for key, since in self._counting(written):
            each = written.setdefault(key, Asked("", since))
            each.began = min(each.began, since)
        found = [(*key, each) for key, each in written.items()]
        pause = ACTIVE if self._earlier_first else None

        def work(connection: Connection) -> Mapping[str, str]:
            builds.count(connection, found, now=clock.monotonic(), pause=pause)
            return builds.first(connection, within=ACTIVE) if self._earlier_first else {}

        try:
            first = await self._workers.run(work)
        except BaseException:
            for instance, named in asked.items():
                for invocation, each in named.items():
                    newer = self._asked[instance].setdefault(invocation, Asked(each.tool, each.began))
                    newer.began = min(newer.began, each.began)
                    for field in ("cached", "joined", "made"):
                        setattr(newer, field, getattr(newer, field) + getattr(each, field))
            raise
        # Where no build was active, the first is one that has asked meanwhile.
        self._first = {instance: next(iter(named)) for instance, named in self._asked.items()} | dict(first)

    def _counting(self, asked: Container[tuple[str, str]]) -> list[tuple[tuple[str, str], float]]:
        """Return the builds that count because their clients wait, and since when. asked: those that do so anyway."""
        found, share = [], Counter[str]()
        for key, waits in self._waiting.items() if self._earlier_first else ():
            instance, invocation = key
            share[instance] += bool(invocation)
            is_first = self._first.get(instance) == invocation
            if invocation and (share[instance] <= MOST_WAITING or is_first or key in asked):
                found.append((key, waits.since))
        return found
