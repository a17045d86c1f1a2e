"""Strategies that nobody should use, to compare with: Vapora's rejected alternatives."""

from collections.abc import Mapping

from assigner.placement.strategy import Policy, Snapshot
from schema.moves.grant import Placement


class RateOnly:
    """The bot that succeeds most often, whatever its load."""

    wants_warm = False
    wants_success = True

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        (group,), (bots,) = snapshot.groups, snapshot.candidates
        (job,) = group.jobs
        best = max(bots, key=lambda bot: (snapshot.rate(bot, snapshot.label(job)), -bot.id))
        return [Placement(job.id, best.id, how)]


class RoundRobin:
    """One bot after the other, whatever they can do."""

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
