"""Looking at every invariant again and again while things go wrong, on a connection of its own."""

import random
import threading
from types import TracebackType
from typing import Self

from schema import clock, verify
from schema.engine import Database, DatabaseSettings
from schema.errors import NotReady

#: Seconds between two looks.
EVERY = 0.25


class Watching:
    """A thread that keeps what it finds. Leaving it asserts that it looked and that every look found nothing."""

    def __init__(self, database_url: str) -> None:
        settings = DatabaseSettings(pool=1, reserve=1, outage_seconds=0.0)
        self._database = Database(database_url, settings, role="watching", chance=random.Random(0))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watching", daemon=True)
        self.findings: list[verify.Finding] = []
        #: Whole looks, and looks for which the server was away.
        self.looks, self.missed = 0, 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._database.close()
        if kind is None:
            assert self.error is None, f"the invariants could not be looked at: {self.error!r}"
            assert self.looks > 0
        assert self.findings == []

    def _run(self) -> None:
        while not clock.wait(self._stopping, EVERY):
            try:
                self.findings += [finding for finding in verify.verify(self._database) if finding.rows]
                self.looks += 1
            except NotReady:
                self.missed += 1
            except BaseException as error:
                self.error = error
                return
