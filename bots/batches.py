"""Calls of bots that wait at the same moment are settled together, in one transaction.

Nobody waits for company: a call goes at once while a thread is free, and with all the others that have come when one
becomes free.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from bots.crew import Crew
from bots.leases import Asked, Call, Desk, Waiting
from bots.metrics import GatewayMetrics
from schema.errors import NotReady

#: Calls settled together at most. Doubling it makes a crowd cheaper to serve, and the wait of each in it longer.
BATCH = 32

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Place:
    """A call, and where its caller waits for the answer."""

    call: Call
    answer: asyncio.Future[bytes | Waiting]

    @property
    def bot(self) -> str:
        return self.call.sync.bot if isinstance(self.call, Asked) else self.call.bot


class Batches:
    """Takes the calls to the desk. As many transactions are under way as the crew has connections."""

    def __init__(self, desk: Desk, crew: Crew, *, metrics: GatewayMetrics, most: int = BATCH) -> None:
        self._desk, self._crew, self._metrics, self._most = desk, crew, metrics, most
        self._places: deque[_Place] = deque()
        self._at_work: set[str] = set()
        self._workers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, call: Call) -> bytes | Waiting:
        """The desk's answer to this call, and the errors that it has for it. Raises Busy when too much waits."""
        with self._crew.place():
            place = _Place(call, asyncio.get_running_loop().create_future())
            self._places.append(place)
            if self._workers < self._crew.threads:
                self._workers += 1
                worker = asyncio.create_task(self._work())
                self._tasks.add(worker)
                worker.add_done_callback(self._tasks.discard)
            return await place.answer

    async def _work(self) -> None:
        try:
            while batch := self._take():
                await self._serve(batch)
        finally:
            self._workers -= 1

    async def _serve(self, batch: Sequence[_Place]) -> None:
        self._metrics.batches.observe(len(batch))
        calls = [place.call for place in batch]
        answers: Sequence[bytes | Waiting | Exception]
        try:
            answers = await self._crew.insist(lambda: self._settle(calls))
        except Exception as error:
            answers = [error] * len(batch)
        finally:
            self._at_work.difference_update(place.bot for place in batch)
        for place, answer in zip(batch, answers, strict=True):
            if place.answer.done():
                continue  # its caller has gone
            if isinstance(answer, Exception):
                place.answer.set_exception(answer)
            else:
                place.answer.set_result(answer)

    def _take(self) -> list[_Place]:
        """Those that have waited longest, at most one of each bot, and none of a bot that is being served."""
        batch, later = list[_Place](), list[_Place]()
        while self._places and len(batch) < self._most:
            place = self._places.popleft()
            if place.answer.done():
                continue
            if place.bot in self._at_work:
                later.append(place)
            else:
                self._at_work.add(place.bot)
                batch.append(place)
        self._places.extendleft(reversed(later))
        return batch

    def _settle(self, calls: Sequence[Call]) -> Sequence[bytes | Waiting | Exception]:
        """On a thread. What one call does to the database must not be the end of the others."""
        try:
            return self._desk.answer(calls)
        except Exception as error:
            if isinstance(error, NotReady) or len(calls) == 1:
                return [error] * len(calls)
            _log.warning("calls are settled one by one", calls=len(calls), kind=type(error).__name__)
            return [self._settle([call])[0] for call in calls]
