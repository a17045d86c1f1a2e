"""What may be done as often as one likes while it is quick, and seldom while it is slow."""

from schema.clock import Monotonic

#: Seconds up to which it is quick, if nothing else is said; what is slower may take one part in so many of the time.
QUICK, SELDOM = 0.05, 20
#: Seconds for which nobody else begins it. It may never end, because the server gave it up.
UNDER_WAY = 20.0


class Seldom:
    """Something that is quick as a rule, and slow with many queues or much that cannot be cleaned up in its way."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._not_before = now()

    def begin(self) -> bool:
        """Whether it may be done now; who is told so does it, and says what it took."""
        now = self._now()
        if now < self._not_before:
            return False
        self._not_before = now + UNDER_WAY
        return True

    def took(self, seconds: float, *, quick: float = QUICK) -> None:
        """It has been done, and took so long; up to `quick` seconds would have been quick."""
        self._not_before = self._now() + (SELDOM * seconds if seconds > quick else 0.0)
