"""The oldest snapshot: rows that died after it was taken cannot be removed until it is gone."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.doctoring.findings import Check, Verdict, duration, gravest, quoted, shown

#: Seconds a snapshot may be old before it is a warning, and before it is bad.
WARNING_SECONDS, BAD_SECONDS = 60.0, 600.0
#: The same in transactions, for slots and standbys, of which the server does not know since when.
WARNING_TRANSACTIONS, BAD_TRANSACTIONS = 10_000, 1_000_000
#: Holders that are named.
NAMED = 3

# A transaction that has written holds the horizon of every database, since no snapshot may be newer than it; one that
# only reads holds that of its own database. VACUUM itself does not count.
_SESSIONS = text("""
SELECT 'session' AS kind, a.pid, coalesce(a.application_name, '') AS name, a.usename::text AS owner, a.state,
    a.datname::text AS database, extract(epoch FROM clock_timestamp() - a.xact_start)::float AS seconds,
    greatest(CASE WHEN a.datname = current_database() THEN age(a.backend_xmin) END, age(a.backend_xid)) AS transactions
FROM pg_stat_activity a
WHERE a.pid <> pg_backend_pid() AND a.backend_type IS DISTINCT FROM 'walsender'
    AND (a.datname = current_database() AND a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
    AND a.pid NOT IN (SELECT v.pid FROM pg_stat_progress_vacuum v)
""")
_PREPARED = text("""
SELECT 'prepared' AS kind, NULL AS pid, p.gid AS name, p.owner::text, NULL AS state, p.database::text AS database,
    extract(epoch FROM clock_timestamp() - p.prepared)::float AS seconds, age(p.transaction) AS transactions
FROM pg_prepared_xacts p
""")
_SLOTS = text("""
SELECT 'slot' AS kind, s.active_pid AS pid, s.slot_name::text AS name, NULL AS owner,
    CASE WHEN s.active THEN 'active' ELSE 'inactive' END AS state, s.database::text AS database,
    NULL AS seconds, age(s.xmin) AS transactions
FROM pg_replication_slots s WHERE s.xmin IS NOT NULL
""")
_STANDBYS = text("""
SELECT 'standby' AS kind, r.pid, coalesce(r.application_name, '') AS name, r.usename::text AS owner, r.state,
    NULL AS database, NULL AS seconds, age(r.backend_xmin) AS transactions
FROM pg_stat_replication r WHERE r.backend_xmin IS NOT NULL
""")


@dataclass(frozen=True)
class Holder:
    """Who keeps dead rows from being removed: a session, a prepared transaction, a replication slot or a standby.

    `transactions` is the age of the oldest one it may still see, `seconds` how long it has held it, None if unknown.
    """

    kind: str
    pid: int | None
    name: str
    owner: str | None
    state: str | None
    database: str | None
    seconds: float | None
    transactions: int


def check(connection: Connection) -> Check:
    """Look for all of them."""
    found = []
    for statement in (_SESSIONS, _PREPARED, _SLOTS, _STANDBYS):
        found += [Holder(**row._mapping) for row in connection.execute(statement)]
    return judge(found)


def judge(holders: Sequence[Holder]) -> Check:
    """The gravest of them decides; the oldest is named first."""
    if not holders:
        return Check("snapshots", Verdict.OK, "nobody holds a snapshot")
    ordered = sorted(holders, key=_weight, reverse=True)
    verdict, oldest = gravest(map(grade, holders)), ordered[0]
    figures: dict[str, object] = {
        "oldest_seconds": None if oldest.seconds is None else round(oldest.seconds, 3),
        "oldest_transactions": max(each.transactions for each in holders),
        "holders": [
            {"kind": each.kind, "pid": each.pid, "name": each.name, "owner": each.owner, "state": each.state,
             "age_seconds": each.seconds, "age_transactions": each.transactions}
            for each in ordered[:NAMED]
        ],
    }  # fmt: skip
    if verdict is Verdict.OK:
        return Check("snapshots", verdict, f"the oldest is held by {told(oldest)}", None, figures)
    if verdict is Verdict.UNKNOWN:
        hidden = "; ".join(told(each) for each in ordered if grade(each) is verdict)
        remedy = "let this role see the sessions of others: GRANT pg_monitor TO it"
        return Check("snapshots", verdict, f"since when is hidden from this role: {hidden}", remedy, figures)
    named = [each for each in ordered if grade(each) in (Verdict.WARNING, Verdict.BAD)][:NAMED]
    found = f"dead rows stay because of {'; '.join(map(told, named))}"
    return Check("snapshots", verdict, found, "; ".join(map(way_out, named)), figures)


def grade(holder: Holder) -> Verdict:
    """How grave it is that it holds on."""
    match holder.kind, holder.seconds:
        case "slot" | "standby", _:
            return _beyond(holder.transactions, WARNING_TRANSACTIONS, BAD_TRANSACTIONS)
        case _, None:
            return Verdict.UNKNOWN
        case _, seconds:
            return _beyond(seconds, WARNING_SECONDS, BAD_SECONDS)


def told(holder: Holder) -> str:
    """Who it is, for people."""
    age = f"{holder.transactions} transactions"
    if holder.seconds is not None:
        age = f"{duration(holder.seconds)}, {age}"
    match holder.kind:
        case "session":
            who = (
                f"session {holder.pid} ({shown(holder.name) or 'unnamed'}, user {shown(holder.owner)}, {holder.state})"
            )
        case "prepared":
            who = f"prepared transaction {quoted(holder.name)} of user {shown(holder.owner)}"
        case "slot":
            who = f"replication slot {quoted(holder.name)}, {holder.state}"
        case _:
            who = f"the standby {shown(holder.name) or 'unnamed'} by its feedback (walsender {holder.pid})"
    return f"{who}: {age}"


def way_out(holder: Holder) -> str:
    """How to end it."""
    match holder.kind:
        case "session":
            return f"end session {holder.pid}: SELECT pg_terminate_backend({holder.pid})"
        case "prepared":
            return f"in database {shown(holder.database)}: COMMIT PREPARED or ROLLBACK PREPARED {quoted(holder.name)}"
        case "slot" if holder.state == "inactive":
            return f"if nobody needs the slot: SELECT pg_drop_replication_slot({quoted(holder.name)})"
        case "slot":
            return f"end the long query of whoever uses slot {quoted(holder.name)} (pid {holder.pid})"
        case _:
            return f"end the long query on standby {shown(holder.name)}, or set hot_standby_feedback = off there"


def _beyond(age: float, warning: float, bad: float) -> Verdict:
    return Verdict.BAD if age >= bad else Verdict.WARNING if age >= warning else Verdict.OK


def _weight(holder: Holder) -> tuple[int, float, int]:
    return list(Verdict).index(grade(holder)), holder.seconds or 0.0, holder.transactions
