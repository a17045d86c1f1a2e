"""What becomes of an action whose client has gone: after a while its submission is withdrawn.

Clients that end, as at Ctrl-C, cancel nothing. One that has only lost its door comes back in seconds, to any
door. So the database has, for each submission, the time until which it counts. Every door moves that time ahead for the
submissions that its clients watch, and withdraws submissions whose time is over. A door that could not write for a
while withdraws nothing at first: perhaps no door could write, while clients waited at each of them.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import structlog

from bots.gateway.workers import WorkerPool
from schema import clock
from schema.accounting.held_rows import SHORT_WAIT
from schema.moves.cancel import Cancelled
from schema.moves.waiting import abandon
from schema.postgres.connection import Connection
from schema.postgres.failures import HINDRANCES

#: How often in the period a door writes what its clients watch.
LOOKS = 3
#: The most submissions that one transaction withdraws.
MOST = 200
#: The name of those who withdraw, in events.
ACTOR = "farm:abandoned"

_log = structlog.get_logger(__name__)


class Watches:
    """The submissions that clients of one door watch. Only the event loop may use it.

    seconds: for how long one counts that nobody watches. sync: the bots' sync period, seconds.
    """

    def __init__(self, workers: WorkerPool, *, seconds: float, sync: float) -> None:
        self._workers, self._seconds, self._sync = workers, seconds, sync
        self._watched: Counter[str] = Counter()
        #: Watched since the last look, although perhaps not any more, and ended since then.
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._looked_at = clock.monotonic()
        # Clients of a door that was away need time to come back before others judge them.
        self._withdraws_from = self._looked_at + seconds

    @contextmanager
    def watching(self, submission: str) -> Iterator[None]:
        """Let the submission count while the block runs, and for a while after it."""
        self._watched[submission] += 1
        self._begun.add(submission)
        try:
            yield
        finally:
            self._watched[submission] -= 1
            if not self._watched[submission]:
                del self._watched[submission]

    def end(self, submission: str) -> None:
        """Note that the submission is over: nobody needs to watch it."""
        self._ended.add(submission)

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(self._seconds / LOOKS)
            try:
                while True:
                    found = await self.look()
                    for each in found:
                        _log.info("an action is withdrawn that no client watches", id=each.public_id)
                    if len(found) < MOST:
                        break
            except Exception as error:
                _log.warning("it was not written which actions clients watch", kind=type(error).__name__)

    async def look(self) -> list[Cancelled]:
        """Write what is watched, and withdraw what is not; return what was withdrawn."""
        begun, self._begun = self._begun, set()
        ended, self._ended = self._ended, set()
        counts, now = (begun | set(self._watched)) - ended, clock.monotonic()
        if now > self._looked_at + 2 * self._seconds / LOOKS:
            self._withdraws_from = now + self._seconds
        self._looked_at, withdraws = now, now >= self._withdraws_from

        def work(connection: Connection, *, tries: bool) -> list[Cancelled]:
            if counts:
                abandon.watch(connection, counts, seconds=self._seconds)
            if ended:
                abandon.forget(connection, ended)
            if not withdraws:
                return []
            connection.execute_later(SHORT_WAIT)
            return abandon.withdraw(connection, most=MOST, sync=self._sync, actor=ACTOR, tries=tries)

        try:
            try:
                return await self._workers.run(partial(work, tries=False))
            except HINDRANCES:
                return await self._workers.run(partial(work, tries=True))
        except BaseException:
            self._begun |= begun
            self._ended |= ended
            self._withdraws_from = clock.monotonic() + self._seconds
            raise
