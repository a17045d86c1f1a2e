"""Meters: what somebody else counts against a limit of its own, as it was last read, and what it stood at by the hour.

Operators and plug-ins write them; who schedules reads the row and asks nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from schema import audit, validation
from schema.errors import BadInput, NotFound
from schema.postgres.notify import wake

#: The largest amount of a meter.
MAX_AMOUNT = 1e12
#: Days for which it is kept what a meter stood at by the hour.
KEEP_DAYS = 28

READ = text(
    "SELECT name, used, most, resets_at, updated_at FROM usage_meters WHERE updated_at IS NOT NULL ORDER BY name"
)
LIMIT = text("SELECT most::double precision FROM usage_meters WHERE name = :name AND updated_at IS NOT NULL")
PUT = text(f"""
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
REMOVE = text("""
WITH hours AS (DELETE FROM meter_hours WHERE name = :name)
DELETE FROM usage_meters WHERE name = :name RETURNING name
""")
HISTORY = text("""
SELECT name, hour, percents / readings AS percent FROM meter_hours WHERE name = ANY (CAST(:names AS text[]))
ORDER BY name, hour
""")
# A reading that is being written waits for those who go by the one before it, and they see either of them.
LOCK_METERS = text("""
SELECT name FROM usage_meters WHERE name = ANY (ARRAY(SELECT meter FROM windows WHERE meter IS NOT NULL))
ORDER BY name FOR SHARE
""")
# Of several processes that want to read a meter only one does.
CLAIM_READING = text("""
INSERT INTO usage_meters AS m (name, polled_at) VALUES (:name, clock_timestamp())
ON CONFLICT (name) DO UPDATE SET polled_at = clock_timestamp()
    WHERE m.polled_at IS NULL OR m.polled_at <= clock_timestamp() - make_interval(secs => :interval)
RETURNING name
""")


@dataclass(frozen=True)
class Meter:
    """`used` of at most `most`, in a unit of its own, when it was read at `updated_at`; it begins at 0 again at
    `resets_at`, if that is known."""

    name: str
    used: float
    most: float
    resets_at: datetime | None
    updated_at: datetime

    def percent(self, at: datetime) -> float:
        """What it stands at then, in percent of its limit, as far as this reading tells."""
        reset = self.resets_at is not None and self.updated_at < self.resets_at <= at
        return 0.0 if reset else 100.0 * self.used / self.most

    def fresh(self, at: datetime, max_age: float) -> bool:
        """Whether this reading is not older than so many seconds."""
        return (at - self.updated_at).total_seconds() <= max_age


@dataclass(frozen=True)
class Level:
    """What a meter stood at, in percent of its limit, on average over one hour from `hour` on."""

    hour: datetime
    percent: float


def meters(connection: Connection) -> list[Meter]:
    """All that have been read, by name."""
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
    """A meter was read: it stands at `used` of `most`. Jobs that wait for it are looked at again. Raises BadInput.

    An `actor` is audited when it makes the meter or changes its limit; readings are too many.
    """
    validation.check_name("name", name)
    if not 0 <= used <= MAX_AMOUNT:
        raise BadInput("used", f"must be between 0 and {MAX_AMOUNT:g}")
    if not 0 < most <= MAX_AMOUNT:
        raise BadInput("limit", f"must be more than 0 and at most {MAX_AMOUNT:g}")
    if resets_at is not None and resets_at.tzinfo is None:
        raise BadInput("resets_at", "needs a time zone")
    before = None if actor is None else connection.execute(LIMIT, {"name": name}).scalar_one_or_none()
    connection.execute(PUT, {"name": name, "used": used, "most": most, "resets_at": resets_at})
    if actor is not None and before != most:
        details = {"before": before, "after": most, "reason": reason}
        audit.write(connection, "meter.set", actor=actor, subject=f"meter:{name}", details=details)
    wake(connection, "jobs")


def remove(connection: Connection, name: str, *, actor: str, reason: str = "") -> None:
    """Forget a meter and what it stood at. Windows that go by it are closed until it is read again. Raises NotFound."""
    if connection.execute(REMOVE, {"name": name}).one_or_none() is None:
        raise NotFound(f"meter: no meter '{validation.escaped(name, 63)}'")
    audit.write(connection, "meter.remove", actor=actor, subject=f"meter:{name}", details={"reason": reason})


def history(connection: Connection, names: Sequence[str]) -> dict[str, list[Level]]:
    """What these meters stood at, the oldest first."""
    found: dict[str, list[Level]] = {name: [] for name in names}
    for row in connection.execute(HISTORY, {"names": list(names)}):
        found[row.name].append(Level(row.hour, row.percent))
    return found


def lock_meters(connection: Connection) -> None:
    """Keep the meters that windows go by as they are until this transaction ends."""
    connection.execute(LOCK_METERS)


def claim_reading(connection: Connection, name: str, *, interval: float) -> bool:
    """Whether the caller is the one to read it now: nobody has begun to within `interval` seconds."""
    return connection.execute(CLAIM_READING, {"name": name, "interval": interval}).one_or_none() is not None
