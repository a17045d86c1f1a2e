"""Kinds of bots and requirement sets: what they consist of, and which kinds offer what which set asks for.

Bots of one kind offer the same properties, and keep the same ones of them exclusive: such bots are for requirement sets
that name each of these. Which kinds offer what a requirement set asks for, and are open to it, is stored in
`kind_platforms` when the kind or the set appears: a kind where a session opens (the database function `intern_kind`),
a set where jobs are submitted (`intern_platform`). A session that opens holds the advisory lock of the requirement sets
shared, so that a kind and a set that appear together cannot miss each other; likewise a bot and the verdict that there
is no such bot.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, text

from schema.postgres import advisory

KINDS = text("SELECT id, properties, exclusive FROM kinds WHERE id = ANY (CAST(:ids AS integer[]))")
PLATFORMS = text("""
SELECT p.id, p.properties, f.properties AS preferred FROM platforms p LEFT JOIN platforms f ON f.id = p.preferred
WHERE p.id = ANY (CAST(:ids AS integer[]))
""")
#: The links that should be there: `p` and `k` are the rows of a requirement set and of a kind.
LINKS = """
platforms p LEFT JOIN platforms f ON f.id = p.preferred JOIN kinds k
    ON is_open_to(k.properties, k.exclusive, p.properties) OR is_open_to(k.properties, k.exclusive, f.properties)"""

LINK_MISSED = text(f"""
INSERT INTO kind_platforms (platform, kind)
SELECT p.id, k.id FROM {LINKS}
WHERE p.created_at > now() - make_interval(secs => :age)
ON CONFLICT DO NOTHING
""")

#: One property and one of its values.
Clause = tuple[str, str]


class Offer(NamedTuple):
    """What bots of one kind offer, and the names of the properties that they offer exclusively."""

    clauses: frozenset[Clause]
    exclusive: frozenset[str] = frozenset()

    def is_open_to(self, wanted: "Wanted") -> bool:
        """Return whether the kind offers all that is required, and the requirement set names each exclusive property;
        or the same of all that is required and preferred."""
        return self._has(wanted.required) or (wanted.preferred is not None and self._has(wanted.preferred))

    def _has(self, clauses: frozenset[Clause]) -> bool:
        return clauses <= self.clauses and (not self.exclusive or self.exclusive <= {name for name, _ in clauses})


class Wanted(NamedTuple):
    """What a requirement set asks for, and, if its jobs prefer more, all that they require and prefer."""

    required: frozenset[Clause]
    preferred: frozenset[Clause] | None = None


def link_missed(connection: Connection, *, age: float) -> int:
    """Link requirement sets that are younger than `age` seconds with kinds of bots that they are not linked with;
    returns how many links were missing.

    A submit in a caller's own transaction may see an older state of the database, if that transaction is stricter than
    READ COMMITTED: then it cannot see a kind that appeared in the meantime.
    """
    advisory.freeze_requirement_sets(connection)
    return connection.execute(LINK_MISSED, {"age": age}).rowcount


def offers(connection: Connection, kinds: Collection[int]) -> dict[int, Offer]:
    """What bots of these kinds offer."""
    return {
        row.id: Offer(clauses(row.properties), frozenset(row.exclusive))
        for row in connection.execute(KINDS, {"ids": list(kinds)})
    }


def platform_clauses(connection: Connection, platforms: Collection[int]) -> dict[int, Wanted]:
    """What these requirement sets ask for."""
    return {
        row.id: Wanted(clauses(row.properties), None if row.preferred is None else clauses(row.preferred))
        for row in connection.execute(PLATFORMS, {"ids": list(platforms)})
    }


def clauses(properties: Mapping[str, Any]) -> frozenset[Clause]:
    """Return each property with each of its values."""
    return frozenset((name, value) for name, values in properties.items() for value in values)
