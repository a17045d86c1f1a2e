"""The strategy `rate-only`: the bot whose work succeeds most, whatever its load."""

from collections.abc import Mapping

from assigner.placement.strategies.first import in_order
from assigner.placement.strategy import Input, Policy, QuotaCopy, Snapshot, SuccessScore, decision
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement


class RateOnly:
    """Places job after job on the candidate with room that has the highest success rate.

    The rate is that of the bot with jobs of the same label, 1 as long as nothing is known of it. Equals go to the bot
    with the lower priority number, of these to the one that was registered first. So the best bot is filled before the
    next one gets anything: work is concentrated, which `success` avoids. Cost: O(jobs + candidates x labels x log
    candidates).
    """

    inputs = frozenset({Input.SUCCESS})

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        free_units_of = {bot.id: bot.free_units for bots in snapshot.candidates for bot in bots}
        group = {job.id: nth for nth, group in enumerate(snapshot.groups) for job in group.jobs}
        ranked: dict[tuple[int, str], list[FreeBot]] = {}
        quotas, placements = QuotaCopy(snapshot.headrooms), list[Placement]()
        for job in snapshot.jobs:
            if not quotas.allows(job):
                continue
            nth, label = group[job.id], snapshot.label(job)
            if (nth, label) not in ranked:
                # Worst first, so that a bot that has become too full for the group's jobs is taken off the end.
                best_first = sorted(in_order(snapshot.candidates[nth]), key=lambda bot: -snapshot.rate(bot, label))
                ranked[nth, label] = best_first[::-1]
            bots = ranked[nth, label]
            while bots and free_units_of[bots[-1].id] < job.units:
                bots.pop()
            if not bots:
                continue
            bot = bots[-1]
            load = (bot.capacity - free_units_of[bot.id]) / bot.capacity
            found = SuccessScore(snapshot.rate(bot, label), load, load_power=0.0)
            placements.append(
                Placement(job.id, bot.id, decision(bot, found.as_decision(), len(snapshot.candidates[nth]), how))
            )
            free_units_of[bot.id] -= job.units
            quotas.take(job)
        return placements
