"""Builds: what clients of the farm door have asked for, counted by the invocation that they name.

The jobs of a build have the invocation as metadata. What came from the cache has no job, so it is counted here alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# In the order of the key, so that two doors do not lock each other. Who has asked for nothing has no row;
# by EXISTS in place of the value, PostgreSQL would read the rows of all builds into a hash.
_COUNT = Statement("""
INSERT INTO builds AS b (instance, invocation, tool, cached, joined, made, began_at, seen_at)
SELECT i.id, g.invocation, g.tool, g.cached, g.joined, g.made, now() - make_interval(secs => g.age), now()
FROM unnest(CAST(:instances AS text[]), CAST(:invocations AS text[]), CAST(:tools AS text[]),
    CAST(:cached AS bigint[]), CAST(:joined AS bigint[]), CAST(:made AS bigint[]), CAST(:ages AS double precision[]))
    AS g (instance, invocation, tool, cached, joined, made, age)
JOIN instances i ON i.name = g.instance
WHERE g.cached + g.joined + g.made > 0
    OR (SELECT true FROM builds o WHERE o.instance = i.id AND o.invocation = g.invocation)
ORDER BY 1, 2
ON CONFLICT (instance, invocation) DO UPDATE SET
    cached = b.cached + excluded.cached, joined = b.joined + excluded.joined, made = b.made + excluded.made,
    tool = CASE WHEN excluded.tool = '' THEN b.tool ELSE excluded.tool END, seen_at = excluded.seen_at,
    began_at = CASE WHEN excluded.began_at > b.seen_at + make_interval(secs => CAST(:pause AS double precision))
        THEN excluded.began_at ELSE b.began_at END
""")

_FIRST = Statement("""
SELECT DISTINCT ON (b.instance) i.name AS instance, b.invocation FROM builds b JOIN instances i ON i.id = b.instance
WHERE b.seen_at > now() - make_interval(secs => :within) ORDER BY b.instance, b.began_at, b.invocation
""")


@dataclass
class Asked:
    """What one build has asked for since it was written last. It is filled while clients ask.

    tool: that the client names. began: when it first asked or waited, seconds by the clock that `count` is told.
    cached, joined, made: actions that the cache answered, that joined a job, and that made one.
    """

    tool: str
    began: float
    cached: int = 0
    joined: int = 0
    made: int = 0


def first(connection: Connection, *, within: float) -> Mapping[str, str]:
    """Return the invocation of the build that began first, for each instance.

    within: seconds. Builds that were not seen for so long do not count.
    """
    return {row.instance: row.invocation for row in connection.execute(_FIRST, {"within": within})}


def count(
    connection: Connection,
    builds: Sequence[tuple[str, str, Asked]],
    *,
    now: float,
    pause: float | None = None,
) -> None:
    """Add what builds have asked for; each comes with its instance and invocation. Unknown instances are left out.

    A build that asks for nothing is only seen, if it has asked before. pause: seconds after which a build that was not
    seen begins anew; None: it never does.
    """
    each = [asked for _, _, asked in builds]
    connection.execute(
        _COUNT,
        {
            "instances": [instance for instance, _, _ in builds],
            "invocations": [invocation for _, invocation, _ in builds],
            "tools": [asked.tool for asked in each],
            "cached": [asked.cached for asked in each],
            "joined": [asked.joined for asked in each],
            "made": [asked.made for asked in each],
            "pause": pause,
            "ages": [now - asked.began for asked in each],
        },
    )
