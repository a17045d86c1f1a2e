"""Meters: readings of usage that is counted outside the pool, with its limit, and hourly averages of past readings.

Operators and plug-ins write the readings. Admission reads only the stored row and calls nothing outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from leasehold import wire
from leasehold.errors import BadInput, NotFound

from schema import audit, validation
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement

#: The largest amount of a meter.
MAX_AMOUNT = 1e12
#: The least limit. A smaller one would be stored as 0.
MIN_LIMIT = 1e-6
#: How long ago and how far ahead a meter may say that it is reset. A reading may be made just before a reset and come
#: after it.
PASSED, AHEAD = timedelta(days=1), timedelta(days=366)
#: Days for which hourly averages are kept.
KEEP_DAYS = 28

READ = Statement(
    "SELECT name, used, most, resets_at, updated_at FROM usage_meters WHERE updated_at IS NOT NULL ORDER BY name"
)
LIMIT = Statement("SELECT most::double precision FROM usage_meters WHERE name = :name AND updated_at IS NOT NULL")
PUT = Statement(f"""
WITH put AS (
    INSERT INTO usage_meters AS m (name, used, most, resets_at, updated_at)
    VALUES (:name, :used, :most, :resets_at, clock_timestamp())
    ON CONFLICT (name) DO UPDATE SET used = EXCLUDED.used, most = EXCLUDED.most, resets_at = EXCLUDED.resets_at,
        updated_at = EXCLUDED.updated_at
), forgotten AS (
    DELETE FROM meter_hours WHERE name = :name AND hour < now() - interval '{KEEP_DAYS} days'
)
INSERT INTO meter_hours AS h (name, hour, readings, percents)
VALUES (:name, date_trunc('hour', clock_timestamp(), 'UTC'), 1, 100.0 * :used / :most)
ON CONFLICT (name, hour) DO UPDATE SET readings = h.readings + 1, percents = h.percents + EXCLUDED.percents
""")
REMOVE = Statement("""
WITH hours AS (DELETE FROM meter_hours WHERE name = :name)
DELETE FROM usage_meters WHERE name = :name RETURNING name
""")
HISTORY = Statement("""
SELECT name, hour, percents / readings AS percent FROM meter_hours WHERE name = ANY (CAST(:names AS text[]))
ORDER BY name, hour
""")
# A transaction that writes a new reading waits for transactions that use the old one.
LOCK_METERS = {
    waits: Statement(f"""
SELECT name FROM usage_meters WHERE name = ANY (ARRAY(SELECT meter FROM windows WHERE meter IS NOT NULL))
ORDER BY name FOR SHARE {"" if waits else "SKIP LOCKED"}
""")
    for waits in (True, False)
}
# Only one of several processes may begin to read a meter in one interval.
CLAIM_READING = Statement("""
INSERT INTO usage_meters AS m (name, polled_at) VALUES (:name, clock_timestamp())
ON CONFLICT (name) DO UPDATE SET polled_at = clock_timestamp()
    WHERE m.polled_at IS NULL OR m.polled_at <= clock_timestamp() - make_interval(secs => :interval)
RETURNING name
""")


@dataclass(frozen=True)
class Meter:
    """The last reading of a meter.

    used, most: amount used and its limit, in the meter's own unit.
    resets_at: when the amount begins at 0 again, None = not known.
    updated_at: when it was read.
    """

    name: str
    used: float
    most: float
    resets_at: datetime | None
    updated_at: datetime

    def percent(self, at: datetime) -> float:
        """Usage at `at` in percent of the limit, according to this reading; 0 if the meter has been reset since."""
        reset = self.resets_at is not None and self.updated_at < self.resets_at <= at
        return 0.0 if reset else 100.0 * self.used / self.most

    def fresh(self, at: datetime, max_age: float) -> bool:
        """True if this reading is at most `max_age` seconds old at `at`."""
        return (at - self.updated_at).total_seconds() <= max_age


@dataclass(frozen=True)
class Level:
    """Average of a meter over the hour that begins at `hour`, in percent of its limit."""

    hour: datetime
    percent: float


def meters(connection: Connection) -> list[Meter]:
    """All meters that have a reading, by name."""
    return [
        Meter(row.name, float(row.used), float(row.most), row.resets_at, row.updated_at)
        for row in connection.execute(READ)
    ]


def put(
    connection: Connection,
    name: str,
    *,
    used: float,
    most: float,
    resets_at: datetime | None = None,
    actor: str | None = None,
    reason: str = "",
) -> None:
    """Store a reading: `used` of `most`. Wakes the assigners, because windows may open. Raises BadInput.

    actor: operator to audit if this makes the meter or changes its limit. Readings themselves are too many to audit.
    """
    validation.check_name("name", name)
    if not 0 <= used <= MAX_AMOUNT:
        raise BadInput("used", f"must be between 0 and {MAX_AMOUNT:g}")
    if not MIN_LIMIT <= most <= MAX_AMOUNT:
        raise BadInput("limit", f"must be between {MIN_LIMIT:g} and {MAX_AMOUNT:g}")
    if resets_at is not None:
        _check_reset(resets_at, now=connection.now())
    before = None if actor is None else connection.execute(LIMIT, {"name": name}).scalar_one_or_none()
    connection.execute(PUT, {"name": name, "used": used, "most": most, "resets_at": resets_at})
    if actor is not None and before != most:
        details = {"before": before, "after": most, "reason": reason}
        audit.write(connection, "meter.set", actor=actor, subject=f"meter:{name}", details=details)
    wake(connection, "jobs")


def _check_reset(resets_at: datetime, *, now: datetime) -> None:
    if resets_at.tzinfo is None:
        raise BadInput("resets_at", "needs a time zone")
    if not now - PASSED <= resets_at <= now + AHEAD:
        raise BadInput("resets_at", "must be at most a day ago and at most a year ahead")


def remove(connection: Connection, name: str, *, actor: str, reason: str = "") -> None:
    """Remove a meter and its history. Windows that depend on it are closed until it is read again. Raises NotFound."""
    if connection.execute(REMOVE, {"name": name}).one_or_none() is None:
        raise NotFound(f"meter: no meter '{wire.escaped(name, 63)}'")
    audit.write(connection, "meter.remove", actor=actor, subject=f"meter:{name}", details={"reason": reason})


def history(connection: Connection, names: Sequence[str]) -> dict[str, list[Level]]:
    """Hourly averages of these meters, the oldest first."""
    found: dict[str, list[Level]] = {name: [] for name in names}
    for row in connection.execute(HISTORY, {"names": list(names)}):
        found[row.name].append(Level(row.hour, row.percent))
    return found


def lock_meters(connection: Connection, *, waits: bool = True) -> None:
    """Lock the meters of all windows against new readings until this transaction ends.

    waits: false = those that somebody holds are left as they are.
    """
    connection.execute(LOCK_METERS[waits])


def claim_reading(connection: Connection, name: str, *, interval: float) -> bool:
    """True if the caller must read the meter now, because nobody has begun to read it within `interval` seconds."""
    return connection.execute(CLAIM_READING, {"name": name, "interval": interval}).one_or_none() is not None
