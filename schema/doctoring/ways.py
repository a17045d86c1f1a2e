"""The ways to the server: do wake-ups arrive, and do the two clocks agree."""

import secrets

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from schema import clock
from schema.channel import PREFIX
from schema.doctoring.findings import Check, Verdict, duration, shown
from schema.engine import Database

#: Seconds a wake-up may take until it counts as lost, and until it counts as slow.
PATIENCE, SLOW = 2.0, 0.5
#: Seconds by which the clocks may differ.
OFFSET = 1.0
#: Times that the database is asked for the time; the quickest answer counts.
LOOKS = 5

_DIRECT = "set database.listen_url to a direct address of the same database if database.url goes through a pooler"
_NOTIFY = text("SELECT pg_notify(:channel, ''), current_database() AS database")
_NOW = text("SELECT extract(epoch FROM clock_timestamp())::float")


def wakeups(database: Database, *, patience: float = PATIENCE) -> Check:
    """Send a notification over the work connections and wait for it where wake-ups are listened for.

    `patience` is in seconds.
    """
    channel = f"{PREFIX}doctor_{secrets.token_hex(8)}"
    try:
        with database.listen() as listener:
            listener.execute(f"SET statement_timeout = {int(patience * 1000)}")
            listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            there = listener.execute("SELECT current_database()").fetchone()
            began = clock.monotonic()
            sent = database.run(lambda connection: connection.execute(_NOTIFY, {"channel": channel}).one())
            arrived = any(True for _ in listener.notifies(timeout=patience, stop_after=1))
            seconds = clock.monotonic() - began
    except psycopg.Error as error:
        reason = shown(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        return Check("wake-ups", Verdict.BAD, f"the listen connection does not work: {reason}", _DIRECT)
    listening = there[0] if there else None
    if not arrived:
        where = "" if listening == sent.database else (
            f"; work is on database {shown(sent.database)}, listening on {shown(listening)}"
        )  # fmt: skip
        found = f"a notification did not arrive within {patience:g} s, so that work waits for the next poll{where}"
        return Check("wake-ups", Verdict.BAD, found, _DIRECT)
    return judge_wakeup(seconds)


def judge_wakeup(seconds: float) -> Check:
    """A notification that arrived after so many seconds."""
    found, figures = (
        f"a notification arrived after {seconds * 1000:.1f} ms",
        {"round_trip_ms": round(seconds * 1000, 3)},
    )
    if seconds > SLOW:
        remedy = "look for a slow network or a server without free processor time"
        return Check("wake-ups", Verdict.WARNING, found, remedy, figures)
    return Check("wake-ups", Verdict.OK, found, None, figures)


def clocks(connection: Connection) -> Check:
    """Compare this host's clock with the database's."""
    looks = []
    for _ in range(LOOKS):
        before, start = clock.wall(), clock.monotonic()
        now = float(connection.execute(_NOW).scalar_one())
        half = (clock.monotonic() - start) / 2
        looks.append((half, now - before - half))
    uncertainty, offset = min(looks)
    return judge_clocks(offset, uncertainty)


def judge_clocks(offset: float, uncertainty: float) -> Check:
    """The database's clock is `offset` seconds ahead of ours, give or take `uncertainty` seconds."""
    figures = {"offset_ms": round(offset * 1000, 3) + 0.0, "uncertainty_ms": round(uncertainty * 1000, 3)}
    way = "ahead of" if offset >= 0 else "behind"
    size = f"{abs(offset) * 1000:.1f} ms" if abs(offset) < 10 else duration(abs(offset))
    found = f"the database's clock is {size} {way} this host's, ± {uncertainty * 1000:.1f} ms"
    if abs(offset) - uncertainty <= OFFSET:
        return Check("clocks", Verdict.OK, found, None, figures)
    remedy = "let both hosts follow NTP: stored times are the database's, so logs and histories do not match"
    return Check("clocks", Verdict.WARNING, found, remedy, figures)
