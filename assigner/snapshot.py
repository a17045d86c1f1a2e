"""One consistent read of the bots that a batch of jobs could go to."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import Connection

from assigner.drawing import drawn
from assigner.offers import Offers
from assigner.sampling import Group, grouped
from assigner.strategies import Snapshot
from schema import candidates, success, windows
from schema.candidates import FreeBot, Wanted
from schema.moves import Alike
from schema.ready import ReadyJob

S = TypeVar("S", bound=Snapshot)

#: Jobs from which on assigners keep out of each other's way: with large batches they want the same bots.
CROWD = 20
#: Groups up to which each is sampled by itself if they have few jobs, and from a part of the bots where nobody else
#: places if they have many. More groups share a window, and all of the bots.
FEW = 4


def sampled(
    connection: Connection,
    jobs: Sequence[ReadyJob],
    *,
    sample_size: int,
    offers: Offers,
    chance: random.Random,
    with_warm: bool = False,
    with_success: bool = False,
) -> Snapshot:
    """Candidates for every group of the jobs, read without locks; `with_warm` adds bots that hold the jobs' hints,
    `with_success` the rates at which the candidates have succeeded with jobs of the same labels.

    `offers` is what is remembered of this pool's bots; more of it may be learnt.
    """
    groups = grouped(jobs)
    if len(groups) <= FEW and len(jobs) < CROWD:
        found = candidates.sample(connection, [group.wanted(sample_size) for group in groups], chance=chance)
    else:
        part = windows.claim(connection, chance=chance) if len(groups) <= FEW else windows.WHOLE
        found = drawn(connection, groups, sample_size=sample_size, offers=offers, chance=chance, within=part)
    if with_warm:
        found = _with_warm(connection, groups, found)
    seen = _with_hits(connection, jobs, groups, found)
    return with_rates(connection, seen) if with_success else seen


def any_healthy(connection: Connection, jobs: Sequence[ReadyJob], *, with_success: bool = False) -> Snapshot:
    """For every group as many free bots as it has jobs, the first that nobody else holds, locked."""
    groups = grouped(jobs)
    found = [candidates.any_free(connection, group.wanted(1)) for group in groups]
    seen = _with_hits(connection, jobs, groups, found)
    return with_rates(connection, seen) if with_success else seen


def without_candidates(seen: Snapshot) -> list[Group]:
    """The groups for which not one candidate was found."""
    return [group for group, found in zip(seen.groups, seen.candidates, strict=True) if not found]


def too_large(connection: Connection, groups: Sequence[Group], *, chance: random.Random) -> list[Alike]:
    """Those groups whose jobs need more units than any of the free bots has.

    Where no bot is free at all, another assigner has been faster, and the jobs simply wait for their turn.
    """
    groups = [group for group in groups if group.units > 1]
    if not groups:
        return []
    probes = [Wanted(group.cohort, group.instance, group.platform, units=1, count=1) for group in groups]
    free = candidates.sample(connection, probes, chance=chance)
    return [
        Alike(group.cohort, group.instance, group.platform, group.units)
        for group, found in zip(groups, free, strict=True)
        if found
    ]


def _with_warm(
    connection: Connection, groups: Sequence[Group], found: Sequence[Sequence[FreeBot]]
) -> list[list[FreeBot]]:
    """The candidates of each group, then those bots that hold a hint of its jobs and are not among them."""
    wanted = [
        (nth, hint)
        for nth, group in enumerate(groups)
        for hint in dict.fromkeys(job.locality_hint for job in group.jobs)
        if hint is not None
    ]
    warm = candidates.warm(
        connection, [(replace(groups[nth].wanted(1), count=candidates.WARM_LIMIT), hint) for nth, hint in wanted]
    )
    merged = [{bot.id: bot for bot in bots} for bots in found]
    for (nth, _), bots in zip(wanted, warm, strict=True):
        for bot in bots:
            merged[nth].setdefault(bot.id, bot)
    return [list(bots.values()) for bots in merged]


def _with_hits(
    connection: Connection, jobs: Sequence[ReadyJob], groups: Sequence[Group], found: Sequence[Sequence[FreeBot]]
) -> Snapshot:
    bot_ids = {bot.id for bots in found for bot in bots}
    hints = {job.locality_hint for job in jobs if job.locality_hint is not None}
    return Snapshot(jobs, groups, found, candidates.hinted(connection, sorted(bot_ids), sorted(hints)))


def with_rates(connection: Connection, seen: S) -> S:
    """The snapshot with what is known of how the candidates have succeeded with jobs of the same labels."""
    labels = success.labels(connection, [job.id for job in seen.jobs])
    bot_ids = sorted({bot.id for bots in seen.candidates for bot in bots})
    return replace(seen, labels=labels, rates=success.rates(connection, bot_ids, sorted({*labels.values()})))
