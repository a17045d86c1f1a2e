"""Two poor strategies to compare with: by success rate only, and round robin. Vapora rejected both."""

from collections.abc import Mapping

from assigner.placement.strategy import Policy, Snapshot
from schema.moves.grant import Placement


class RateOnly:
    """Chooses the bot with the highest success rate, whatever its load."""

    wants_warm = False
    wants_success = True

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        (group,), (bots,) = snapshot.groups, snapshot.candidates
        (job,) = group.jobs
        best = max(bots, key=lambda bot: (snapshot.rate(bot, snapshot.label(job)), -bot.id))
        return [Placement(job.id, best.id, how)]


class RoundRobin:
    """Chooses one bot after the other, whatever their success and load."""

    wants_warm = False
    wants_success = False

    def __init__(self) -> None:
        self._last = 0

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        (group,), (bots,) = snapshot.groups, snapshot.candidates
        (job,) = group.jobs
        following = min(bots, key=lambda bot: (bot.id <= self._last, bot.id))
        self._last = following.id
        return [Placement(job.id, following.id, how)]
