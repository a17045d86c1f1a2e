"""How many jobs an assigner places together: few on a quiet pool, for latency, many under backlog, for throughput; and
how many assigners place many at the same time."""

import os

#: The least that a cycle looks for: a few milliseconds' work, which no job behind it feels.
LEAST = 100
#: A cycle that took less than so many seconds may take twice as many jobs, one that took more than `SLOW` half as many.
QUICK, SLOW = 0.25, 0.75

#: Assigners at least that may place many at the same time: while one of them waits for the server, another one works.
LEAST_AT_ONCE = 2


class Batch:
    """Doubles while cycles are quick and full, halves when they are slow or mostly empty; never above the limit that
    is configured. A burst into a quiet pool thus sees its first leases after a few milliseconds."""

    def __init__(self) -> None:
        self._size = LEAST

    def size(self, limit: int) -> int:
        """How many jobs the next cycle may take."""
        return min(self._size, limit)

    @property
    def grown(self) -> bool:
        """Whether there has been much to place lately."""
        return self._size > LEAST

    def learn(self, *, placed: int, seconds: float, limit: int) -> None:
        """A cycle placed so many jobs, and took so long."""
        size = self.size(limit)
        if seconds > SLOW or placed <= size // 4:
            self._size = max(LEAST, size // 2)
        elif placed > size // 2 and seconds < QUICK:
            self._size = size * 2


def at_once(configured: int | None) -> int:
    """How many assigners may place many at the same time: as configured, or as many as this host has cores."""
    return configured or max(LEAST_AT_ONCE, os.cpu_count() or 0)
