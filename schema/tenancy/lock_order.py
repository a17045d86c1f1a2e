"""The locks of a change of many limits, taken at once in the order of locks, before anything is written.

Each limit is written by a function of its own, which locks what it needs. Several of them in one transaction would take
the locks in the order in which they are called. A cycle of an assigner locks rates, writes leases, and then locks
quotas and counters; it would wait for the change while the change waits for it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from schema.accounting import limit_patterns
from schema.accounting.counters import instance_counter, lock_counter
from schema.accounting.quotas import LOCK_LEASES
from schema.accounting.rates import PREFIX
from schema.policy import priority_classes, time_windows
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: For each resource, the terms of each item by its name, as a version has them.
Limits = Mapping[str, Mapping[str, Mapping[str, Any]]]

_INSTANCES = Statement("""
SELECT id FROM instances WHERE name = ANY (CAST(:names AS text[])) ORDER BY id FOR NO KEY UPDATE
""")
_LIKE = {
    "rate": Statement("SELECT name FROM rate_buckets WHERE starts_with(name, :prefix) AND limited_by IS NOT NULL"),
    "lock": Statement("SELECT name FROM counters WHERE starts_with(name, :prefix) AND limited_by IS DISTINCT FROM ''"),
}
_BUCKETS = Statement("""
SELECT name FROM rate_buckets WHERE name = ANY (CAST(:names AS text[])) ORDER BY name COLLATE "C" FOR NO KEY UPDATE
""")
_QUOTAS = Statement("""
SELECT q.cohort FROM unnest(CAST(:cohorts AS text[]), CAST(:instances AS text[])) AS w (cohort, instance)
JOIN cohorts c ON c.name = w.cohort JOIN instances i ON i.name = w.instance
JOIN quotas q ON q.cohort = c.id AND q.instance = i.id ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q
""")
_COUNTERS = Statement("""
SELECT name FROM counters WHERE name = ANY (CAST(:names AS text[])) ORDER BY name COLLATE "C" FOR NO KEY UPDATE
""")


def take(connection: Connection, now: Limits, wanted: Limits) -> None:
    """Lock all that a change from `now` to `wanted` writes and that cycles of assigners lock too.

    wanted: resources that it does not have stay as they are. The caller holds the policy, has locked nothing else, and
    has changed cohorts already, because that moves bots and jobs, which come first.
    """
    unlike = {
        resource: [
            name for name in {*now.get(resource, {}), *items} if now.get(resource, {}).get(name) != items.get(name)
        ]
        for resource, items in wanted.items()
    }
    changed = {resource: sorted(names) for resource, names in unlike.items() if names}
    _lock_tables(connection, changed, wanted)
    if names := sorted({*changed.get("instance", ()), *changed.get("account", ())}):
        connection.execute(_INSTANCES, {"names": names})
    if "lock" in changed:
        connection.execute(limit_patterns.CHANGE_LOCKS)
    if "rate" in changed:
        connection.execute(limit_patterns.CHANGE_RATES)
        connection.execute(_BUCKETS, {"names": _named(connection, "rate", (PREFIX + each for each in changed["rate"]))})
    quotas = changed.get("quota", [])
    if "instance" in changed or any(name not in now.get("quota", {}) for name in quotas):
        connection.execute(LOCK_LEASES)
    if quotas:
        cohorts, instances = zip(*(name.split("/") for name in quotas), strict=True)
        connection.execute(_QUOTAS, {"cohorts": list(cohorts), "instances": list(instances)})
    if names := _named(connection, "lock", _counters(changed)):
        connection.execute(_COUNTERS, {"names": names})


def _lock_tables(connection: Connection, changed: Mapping[str, Iterable[str]], wanted: Limits) -> None:
    """Lock the tables that the removal of a class or a level, or a change of windows, locks as a whole."""
    for resource, used, lock in (
        ("class", priority_classes.CLASS_IN_USE, priority_classes.LOCK_CLASSES),
        ("service-level", priority_classes.LEVEL_IN_USE, priority_classes.LOCK_LEVELS),
    ):
        gone = [name for name in changed.get(resource, ()) if name not in wanted[resource]]
        if any(connection.execute(used, {"names": [name]}).first() is None for name in gone):
            connection.execute(lock)
    if "window" in changed:
        connection.execute(time_windows.LOCK)


def _counters(changed: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the names of the counters that have these limits, and of locks those with a star too."""
    found = {instance_counter(name, what) for name in changed.get("account", ()) for what in ("jobs", "cost")}
    found |= {lock_counter(*name.split("/")) for name in changed.get("lock", ())}
    for noun in ("owner", "project"):
        found |= {f"{noun}:{name.replace('/', ':')}:cost" for name in changed.get(f"{noun}-quota", ())}
    found |= {f"class:{name}:jobs" for name in changed.get("class-limit", ())}
    return found | ({"pool:jobs", "pool:cost"} if {"pool-limit", "class-reserve"} & changed.keys() else set())


def _named(connection: Connection, of: str, names: Iterable[str]) -> list[str]:
    """Return the names, and instead of each pattern those of the rows that have their limit from a pattern like it."""
    found = set[str]()
    for name in names:
        if limit_patterns.is_pattern(name):
            found.update(connection.execute(_LIKE[of], {"prefix": name.removesuffix(limit_patterns.STAR)}).scalars())
        else:
            found.add(name)
    return sorted(found)
