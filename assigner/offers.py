"""What an assigner remembers of its pool: which kinds of bots offer what which requirement sets ask for."""

from collections.abc import Iterable

#: Facts remembered at most, of about a hundred bytes each; beyond that it is begun anew.
FACTS = 100_000
#: Samples in which a group is left out of the window at most, once it has fallen short there.
SKIPPED = 32

#: What makes jobs a group.
Key = tuple[int, int, int, int]


class Offers:
    """(requirement set, kind of bots) → whether they offer it, as far as it is known.

    Such a fact never changes, and forgetting one only costs a question. It belongs to one database and one thread.
    Besides, `kinds` is how many kinds of bots the latest window held, and groups of jobs that so few bots could take
    that a window does not hold enough of them are passed by: once, then twice, four times, at most `SKIPPED` times.
    """

    def __init__(self, limit: int = FACTS) -> None:
        self.kinds = 1
        self._limit, self._size = limit, 0
        self._known: dict[int, dict[int, bool]] = {}
        self._rare: dict[Key, tuple[int, int]] = {}

    def of(self, platform: int) -> dict[int, bool]:
        """Kind → whether its bots offer it, for one requirement set."""
        return self._known.get(platform, {})

    def learn(self, facts: Iterable[tuple[int, int, bool]]) -> None:
        """Remember facts: the requirement set, the kind, and whether its bots offer it."""
        for platform, kind, offered in facts:
            if self._size >= self._limit:
                self._forget()
            kinds = self._known.setdefault(platform, {})
            self._size += kind not in kinds
            kinds[kind] = offered

    def passed_by(self, group: Key) -> bool:
        """Whether a group is to be left out this time."""
        left, turns = self._rare.get(group, (0, 0))
        if left:
            self._rare[group] = left - 1, turns
        return left > 0

    def fell_short(self, group: Key) -> None:
        """A window did not hold enough bots for it."""
        if len(self._rare) >= self._limit:
            self._forget()
        _, turns = self._rare.get(group, (0, 0))
        turns = min(2 * turns or 1, SKIPPED)
        self._rare[group] = turns, turns

    def sufficed(self, group: Key) -> None:
        """A window did hold enough."""
        self._rare.pop(group, None)

    def _forget(self) -> None:
        self._known.clear()
        self._rare.clear()
        self._size = 0
