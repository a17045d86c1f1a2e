"""The first matching bot, where sampling is switched off (BuildGrid's pick without a SamplingConfig)."""

from collections.abc import Mapping, Sequence

from assigner.placement.strategy import NOTHING_ELSE, Policy, QuotaCopy, Snapshot
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement

#: The name under which leases and decisions keep it.
FIRST = "first"


def in_order(bots: Sequence[FreeBot]) -> list[FreeBot]:
    """Return the bots in the order in which the first one is taken: by priority, lower first, then by age."""
    return sorted(bots, key=lambda bot: (bot.priority, bot.id))


class First:
    """Places job after job on the first of its candidates that has room; nothing is scored.

    Its candidates are all free bots that nobody else has locked (`sampling.healthy_snapshot`).
    Cost: O(jobs x candidates) where bots fill up.
    """

    inputs = NOTHING_ELSE

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        group = {job.id: nth for nth, group in enumerate(snapshot.groups) for job in group.jobs}
        candidates = [in_order(bots) for bots in snapshot.candidates]
        free_units_of = {bot.id: bot.free_units for bots in candidates for bot in bots}
        quotas, placements = QuotaCopy(snapshot.headrooms), list[Placement]()
        for job in snapshot.jobs:
            bots = candidates[group[job.id]]
            bot = next((bot for bot in bots if free_units_of[bot.id] >= job.units), None)
            if bot is None or not quotas.allows(job):
                continue
            free_units_of[bot.id] -= job.units
            quotas.take(job)
            placements.append(Placement(job.id, bot.id, {"bot": bot.name, "candidates": len(bots), **how}))
        return placements
