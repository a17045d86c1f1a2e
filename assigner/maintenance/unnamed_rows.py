"""Deletes rows that no row of a big table names any more, which it finds out page by page.

No index finds the jobs of a queue in all their states, or the old leases of a bot: it would cost each submit or grant.
So the big table is read whole in the order of its key, a few pages in each round of upkeep.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from schema import clock
from schema.moves import retention
from schema.moves.retention import NamedIds
from schema.postgres.connection import Connection
from schema.postgres.engine import Database

#: Rows of one page, and pages of one round.
PAGE, PAGES = 20_000, 10
#: The most rows that one transaction deletes.
LIMIT = 500
#: Seconds for which a round waits for the readers of queues that it wants to delete, and between two looks at them.
READERS_PATIENCE, READERS_PAUSE = 0.5, 0.02


class Named(Protocol):
    """Tells which of some ids a page of the big table names."""

    def __call__(self, connection: Connection, ids: Collection[int], *, first: int, limit: int) -> NamedIds: ...


class Delete(Protocol):
    """Deletes those of some rows, id -> mark, that have the same mark; returns how many."""

    def __call__(self, connection: Connection, unnamed: Mapping[int, str]) -> int: ...


class UnnamedRows:
    """Deletes some of the rows that may go, after a walk through the table that may name them.

    candidates: reads the rows that may go, id -> mark. named: one page of the walk.
    """

    def __init__(
        self,
        database: Database,
        *,
        candidates: Callable[[], dict[int, str]],
        named: Named,
        delete: Delete,
        page: int = PAGE,
    ) -> None:
        self._database, self._page = database, page
        self._candidates, self._named, self._delete = candidates, named, delete
        self._left: dict[int, str] = {}
        self._next: int | None = None
        self.deleted = 0

    def run_once(self) -> bool:
        """Go on with the walk, or begin one; return True if some of it is left for the next round."""
        if self._next is None:
            self._left, self._next = self._candidates(), 0
        for _ in range(PAGES):
            if not self._left:
                self._next = None
            if self._next is None:
                break
            read = partial(self._named, ids=self._left.keys(), first=self._next, limit=self._page)
            found = self._database.run(read)
            self._next = found.last
            for each in found.found:
                self._left.pop(each, None)
        if self._next is not None:
            return True
        unnamed = list(self._left.items())
        for start in range(0, len(unnamed), LIMIT):
            part = dict(unnamed[start : start + LIMIT])
            self.deleted += self._database.run(partial(self._delete, unnamed=part))
        self._left = {}
        return False


def gone_bots(database: Database, *, age: float, page: int = PAGE) -> UnnamedRows:
    """Deletion of bots whose last session began more than `age` seconds ago and that no kept lease names."""
    return UnnamedRows(
        database,
        candidates=lambda: database.run(partial(retention.gone_bots, age=age)),
        named=retention.named_bots,
        delete=partial(retention.delete_gone_bots, age=age),
        page=page,
    )


def idle_queues(database: Database, *, patience: float = READERS_PATIENCE, page: int = PAGE) -> UnnamedRows:
    """Deletion of queues that were marked in an earlier round and that no job has. Each walk first marks others.

    patience: seconds to wait for transactions that may have looked the marked ones up before. If one goes on, none is
        deleted.
    """

    def candidates() -> dict[int, str]:
        marked = database.run(retention.idle_queues)
        if marked and not _readers_have_ended(database, patience):
            marked = {}
        database.run(retention.mark_idle_queues)
        return marked

    return UnnamedRows(
        database, candidates=candidates, named=retention.named_queues, delete=retention.delete_queues, page=page
    )


def _readers_have_ended(database: Database, patience: float) -> bool:
    """Wait for the transactions that have read the table of queues until now; False if one goes on."""
    readers = database.run(retention.readers_of_queues)
    give_up = clock.monotonic() + patience
    while readers and clock.monotonic() < give_up:
        clock.sleep(READERS_PAUSE)
        readers &= database.run(retention.readers_of_queues)
    return not readers
