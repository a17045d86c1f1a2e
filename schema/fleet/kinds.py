"""Kinds of bots and requirement sets: what they consist of, and which kinds offer what which set asks for.

Bots of one kind offer the same properties, and keep the same ones of them exclusive: such bots are for requirement sets
that name each of these. Which kinds offer what a requirement set asks for, and are open to it, is stored in
`kind_platforms` when the kind or the set appears: a kind where a session opens (the database function `intern_kind`),
a set where jobs are submitted (`intern_platform`). A submit may be part of a caller's transaction, which may stay open,
so it locks nothing that a session needs. If a kind and a set appear at once, neither transaction sees the other's row:
`link_missed` links them when both are committed. It, and the verdict that there is no such bot, hold an advisory lock
against sessions that open.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schema.postgres import advisory
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

KINDS = Statement("SELECT id, properties, exclusive FROM kinds WHERE id = ANY (CAST(:ids AS integer[]))")
PLATFORMS = Statement("""
SELECT p.id, p.properties, f.properties AS preferred FROM platforms p LEFT JOIN platforms f ON f.id = p.preferred
WHERE p.id = ANY (CAST(:ids AS integer[]))
""")
#: The links that should be there: `p` and `k` are the rows of a requirement set and of a kind.
LINKS = """
platforms p LEFT JOIN platforms f ON f.id = p.preferred JOIN kinds k
    ON is_open_to(k.properties, k.exclusive, p.properties) OR is_open_to(k.properties, k.exclusive, f.properties)"""

#: The condition of a requirement set that is not linked yet.
UNLINKED = "NOT linked"
ANY_UNLINKED = Statement(f"SELECT EXISTS (SELECT FROM platforms WHERE {UNLINKED})")
LINK_MISSED = Statement(f"""
WITH new AS MATERIALIZED (
    SELECT id FROM platforms WHERE {UNLINKED} ORDER BY id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), made AS (
    INSERT INTO kind_platforms (platform, kind)
    SELECT p.id, k.id FROM {LINKS} WHERE p.id = ANY (ARRAY(SELECT id FROM new))
    ON CONFLICT DO NOTHING RETURNING platform
), noted AS (
    UPDATE platforms SET linked = true WHERE id = ANY (ARRAY(SELECT id FROM new))
)
SELECT (SELECT count(*) FROM new) AS sets,
    ARRAY(SELECT id FROM queues WHERE platform = ANY (ARRAY(SELECT platform FROM made))) AS queues
""")

#: The property that names the tasks which a bot has imported. A call of a task that some bot has not imported requires
#: it. Bots without this property do not tell their tasks, and may have any.
TASK = "leasehold.task"

#: One property and one of its values.
Clause = tuple[str, str]
#: What stands for properties that are stored as something else. Nothing offers it.
UNUSABLE: frozenset[Clause] = frozenset({("", "")})


class Offer(NamedTuple):
    """What bots of one kind offer, and the names of the properties that they offer exclusively."""

    clauses: frozenset[Clause]
    exclusive: frozenset[str] = frozenset()

    def is_open_to(self, wanted: "Wanted") -> bool:
        """Return whether the kind offers all that is required, and the requirement set names each exclusive property;
        or the same of all that is required and preferred."""
        return self._has(wanted.required) or (wanted.preferred is not None and self._has(wanted.preferred))

    def _has(self, clauses: frozenset[Clause]) -> bool:
        tells = any(name == TASK for name, _ in self.clauses)
        asked = clauses if tells else {clause for clause in clauses if clause[0] != TASK}
        return asked <= self.clauses and (not self.exclusive or self.exclusive <= {name for name, _ in clauses})


class Wanted(NamedTuple):
    """What a requirement set asks for, and, if its jobs prefer more, all that they require and prefer."""

    required: frozenset[Clause]
    preferred: frozenset[Clause] | None = None


@dataclass(frozen=True)
class Linked:
    """sets: how many requirement sets were looked at. queues: those that bots of the kinds found may serve now."""

    sets: int
    queues: Sequence[int]


def link_missed(connection: Connection, *, limit: int) -> Linked:
    """Link up to `limit` new requirement sets with kinds of bots that appeared at the same time; none while a session
    opens. Each set is compared with every kind of bots, and no session opens meanwhile."""
    if not connection.execute(ANY_UNLINKED).scalar_one() or not advisory.try_block_new_sessions(connection):
        return Linked(0, [])
    return Linked(**connection.execute(LINK_MISSED, {"limit": limit}).mappings().one())


def offers(connection: Connection, kinds: Collection[int]) -> dict[int, Offer]:
    """What bots of these kinds offer."""
    return {
        row.id: Offer(clauses(row.properties) - UNUSABLE, frozenset(row.exclusive))
        for row in connection.execute(KINDS, {"ids": list(kinds)})
    }


def platform_clauses(connection: Connection, platforms: Collection[int]) -> dict[int, Wanted]:
    """What these requirement sets ask for."""
    return {
        row.id: Wanted(clauses(row.properties), None if row.preferred is None else clauses(row.preferred))
        for row in connection.execute(PLATFORMS, {"ids": list(platforms)})
    }


def usable(properties: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties, or what nothing offers in the place of what are none."""
    return {"": [""]} if clauses(properties) == UNUSABLE else properties


def clauses(properties: Mapping[str, Any]) -> frozenset[Clause]:
    """Return each property with each of its values; UNUSABLE for what are no properties."""
    try:
        return frozenset((name, value) for name, values in properties.items() for value in values)
    except (AttributeError, TypeError):
        return UNUSABLE
