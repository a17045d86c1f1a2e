"""Rings: short walks over bots in the order of their random sample keys, from a random place and once around.

Two kinds of walk find bots for a queue: over the bots that offer what it requires, good when many of them are free, and
over the free bots that serve its instance, good when few are. The cost of neither depends on the size of the fleet.
"""

# How a bot may serve an instance: for every one, for that one, for its pool. Each is one range of the indexes of bots,
# so that a few bots of one tenant are found among any number of others'.
_SERVING = (
    "instance IS NULL AND pool IS NULL",
    "instance = {want}.instance AND pool IS NULL",
    "instance IS NULL AND pool = {want}.pool",
)
#: The order of the indexes of bots. It is named in full, because the planner does not take what is null for constant.
BOTS_ORDER = "cohort, instance, pool, sample_key"


def serving(columns: str, want: str, *, which: str, limit: str) -> str:
    """A query of up to `limit` bots in each way of serving the instance of `want`, in its cohort, that are `which`."""
    return "\n UNION ALL ".join(
        f"(SELECT {columns} FROM bots WHERE {which} AND cohort = {want}.cohort AND {served.format(want=want)}"
        f" ORDER BY {BOTS_ORDER} LIMIT {limit})"
        for served in _SERVING
    )


def offering(want: str, *, start: str, limit: str) -> str:
    """A query of `bot_id`: bots of the cohort that offer what `want` requires."""
    where = f"platform = {want}.platform AND cohort = {want}.cohort"
    return _ring("bot_id", "bot_platforms", where, start=start, limit=limit, order="sample_key")


def free(want: str, *, start: str, limit: str) -> str:
    """A query of `bot_id`: free bots of the cohort that serve the instance of `want`, up to `limit` in each way."""
    return "\n UNION ALL ".join(free_apart("id AS bot_id", want, start=start, limit=limit))


def free_apart(columns: str, want: str, *, start: str, limit: str, within: str = "true") -> tuple[str, str, str]:
    """A query of free bots of the cohort, those `within` a part of the ring, for each way of serving: every instance,
    the instance of `want`, its pool."""
    every, own, pooled = (
        _ring(
            columns,
            "bots",
            f"free AND cohort = {want}.cohort AND {served.format(want=want)} AND {within}",
            start=start,
            limit=limit,
            order=BOTS_ORDER,
        )
        for served in _SERVING
    )
    return every, own, pooled


def _ring(columns: str, table: str, where: str, *, start: str, limit: str, order: str) -> str:
    return f"""
    (SELECT * FROM (
        (SELECT {columns} FROM {table} WHERE {where} AND sample_key >= {start} ORDER BY {order} LIMIT {limit})
        UNION ALL
        (SELECT {columns} FROM {table} WHERE {where} AND sample_key < {start} ORDER BY {order} LIMIT {limit})
    ) ring LIMIT {limit})"""
