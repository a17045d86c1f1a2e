"""Lookups that begin with the newest version of a row.

While somebody holds a snapshot open, no dead version of a row can be removed, nor its entries in indexes. A lookup by
`key = value` reads all versions of a row, the oldest ones first; of a bot that calls twice a second these are hundreds
within minutes. Versions lie in an index roughly in the order in which they were made, so that a walk backwards through
the range of this one key meets the one to be seen at once, and ends there.
"""


def newest(table: str, key: str, value: str, *, columns: str = "*", where: str = "true", lock: str = "") -> str:
    """A query of those columns of the one row whose `key`, which is unique where `where` holds, is `value`. It gives
    what `=` would; a range keeps the planner from taking the order for granted, and so from walking forwards."""
    return (
        f"(SELECT {columns} FROM {table} WHERE {where} AND {key} >= {value} AND {key} <= {value}"
        f" ORDER BY {key} DESC LIMIT 1 {lock})"
    )


def newest_quota(row: str, *, columns: str, lock: str = "") -> str:
    """A query of those columns of the quota that the instance of `row` has in its cohort, if it has one."""
    return newest("quotas", "instance", f"{row}.instance", columns=columns, where=f"cohort = {row}.cohort", lock=lock)


#: A live lease, in words that match no index but the one of the latest leases of a bot.
NOT_OVER = "state NOT IN ('completed', 'cancelled')"


def latest_leases(bot: str, held: str, *, columns: str, but: str = "") -> str:
    """A query of the live leases of a bot, of which there are `held`, the latest first; of those that are not of the
    jobs `but`, an array. It ends with the last of them and does not look through those that have ended before."""
    others = f" AND job_id <> ALL ({but})" if but else ""
    return (
        f"(SELECT {columns} FROM leases WHERE bot_id = {bot} AND {NOT_OVER}{others}"
        f" ORDER BY granted_at DESC LIMIT greatest({held}, 0))"
    )
