"""Which builds ask for what: counted in memory, and written every few seconds for the page of builds."""

import asyncio
from collections.abc import Mapping

import structlog

from bots.gateway.workers import WorkerPool
from schema import clock
from schema.accounting import builds
from schema.accounting.builds import Asked

#: Seconds between two writes. What was counted since the last one is lost if the door is killed.
PERIOD = 2.0
#: The most builds that are counted between two writes; what more of them ask for is left out.
MOST = 2_000

_log = structlog.get_logger(__name__)


class Builds:
    """The counts of one door. Only the event loop may use it."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._asked: dict[tuple[str, str], Asked] = {}

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
        """Write what was counted since the last time. What cannot be written is counted on."""
        asked, self._asked = self._asked, {}
        if not asked:
            return
        found = [(instance, invocation, each) for (instance, invocation), each in asked.items()]
        try:
            await self._workers.run(lambda connection: builds.count(connection, found, now=clock.monotonic()))
        except BaseException:
            for key, each in asked.items():
                newer = self._asked.setdefault(key, Asked(each.tool, each.began))
                newer.began = min(newer.began, each.began)
                for field in ("cached", "joined", "made"):
                    setattr(newer, field, getattr(newer, field) + getattr(each, field))
            raise
