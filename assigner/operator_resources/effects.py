"""The effect of a change of quotas or shares, before it is made: what would change for which instance.

The change is applied by the function that would make it, in a savepoint that is rolled back. Its audit and its
notifications are gone with it. Meanwhile it holds the locks of the change, and waits as the change would.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from schema.accounting import accounts, quotas
from schema.accounting.accounts import Share
from schema.accounting.quota_uses import QuotaUse, quota_uses
from schema.postgres.connection import Connection

T = TypeVar("T")

#: The most pairs of cohort and instance that are compared, the oldest first, as in the metrics of quotas.
MAX_PAIRS = 5000
#: Limits of a share that are compared, in its own unit or in jobs.
_LIMITS = ("budget", "max_concurrent", "slots")


@dataclass(frozen=True)
class Affected:
    """One figure of an instance that would change.

    cohort: None for figures that are of no cohort. field: the name of the figure. before, after: None = there is none.
    """

    instance: str
    cohort: str | None
    field: str
    before: float | None
    after: float | None


def of_quota(connection: Connection, change: Callable[[], object], *, cooldown: quotas.Cooldown) -> list[Affected]:
    """Return what a change of quotas would do to all instances with quotas, in units.

    `room`: what the instance may still be given. `over`: what it uses above its maximum; nothing of it starts until
    that is given back. `opportunistic`: what it uses above its minimum, which others may take for theirs.
    `reclaimable`: what it may take so. `capacity_gap`: what of its minimum could not be had at all.
    """

    def read() -> dict[tuple[str, str], QuotaUse]:
        found = quota_uses(connection, most=MAX_PAIRS, cooldown=cooldown).pairs
        return {(each.cohort, each.instance): each for each in found}

    known, after = _before_and_after(connection, change, read)
    # What moves by itself is the same on both sides, so that nothing is shown which the change does not do.
    before = {
        key: replace(use, min_quota=was.min_quota, max_quota=was.max_quota, effective_max=was.effective_max)
        if (was := known.get(key))
        else replace(use, min_quota=0, max_quota=None, effective_max=None)
        for key, use in after.items()
    }
    lent, lent_after = _above_minimums(before), _above_minimums(after)
    return _differences(
        (instance, cohort, _figures(before[key], lent[cohort]), _figures(use, lent_after[cohort]))
        for key, use in after.items()
        for cohort, instance in [key]
    )


def of_share(connection: Connection, change: Callable[[], object]) -> list[Affected]:
    """Return what a change of an instance would do to the shares of all managed instances.

    `weight`: its weight. `share`: its part of the sum of weights, from 0 to 1, which is due to it while all managed
    instances have waiting jobs. An instance without a share has neither.
    """

    def read() -> dict[str, Share]:
        return {each.name: each for each in accounts.accounts(connection)}

    before, after = _before_and_after(connection, change, read)
    weights, weights_after = _weights(before), _weights(after)
    return _differences(
        (name, None, _share(before.get(name), weights), _share(after.get(name), weights_after))
        for name in dict.fromkeys([*after, *before])
    )


def _before_and_after(connection: Connection, change: Callable[[], object], read: Callable[[], T]) -> tuple[T, T]:
    """Return what `read` finds without the change and with it, and undo the change."""
    before = read()
    with connection.savepoint() as savepoint:
        change()
        after = read()
        savepoint.rollback()
    return before, after


def _above_minimums(uses: Mapping[tuple[str, str], QuotaUse]) -> dict[str, int]:
    """Return the units in use above minimums, by cohort."""
    found: dict[str, int] = {}
    for (cohort, _), use in uses.items():
        found[cohort] = found.get(cohort, 0) + use.opportunistic
    return found


def _figures(use: QuotaUse, above: int) -> dict[str, float | None]:
    use = replace(use, lent=above - use.opportunistic)
    most = use.effective_max
    return {
        "min": use.min_quota,
        "max": use.max_quota,
        "effective_max": most,
        "room": None if most is None else max(0, most - use.usage),
        "over": 0 if most is None else max(0, use.usage - most),
        "opportunistic": use.opportunistic,
        "reclaimable": use.reclaimable,
        "capacity_gap": use.capacity_gap,
    }


def _weights(shares: Mapping[str, Share]) -> float:
    return sum(each.weight for each in shares.values())


def _share(share: Share | None, weights: float) -> dict[str, float | None]:
    if share is None:
        return dict.fromkeys(("weight", "share", *_LIMITS))
    part = share.weight / weights if weights else None
    return {"weight": share.weight, "share": part} | {name: getattr(share, name) for name in _LIMITS}


def _differences(
    compared: Iterable[tuple[str, str | None, Mapping[str, Any], Mapping[str, Any]]],
) -> list[Affected]:
    return [
        Affected(instance, cohort, field, before[field], after[field])
        for instance, cohort, before, after in compared
        for field in after
        if before[field] != after[field]
    ]
