"""What may be done as often as one likes while it is quick, and seldom while it is slow."""

from schema.clock import Monotonic

#: Seconds up to which it is quick; what is slower may take one part in so many of the time.
QUICK, SELDOM = 0.02, 20


class Seldom:
    """Something that is quick as a rule, and slow while an old snapshot keeps dead index entries in its way."""

    def __init__(self, now: Monotonic) -> None:
        self._now = now
        self._not_before = now()

    @property
    def due(self) -> bool:
        """Whether it may be done now."""
        return self._now() >= self._not_before

    def took(self, seconds: float) -> None:
        """It has been done, and took so long."""
        self._not_before = self._now() + (SELDOM * seconds if seconds > QUICK else 0.0)
