"""Proof that upkeep is alive, and the grace that follows when it was not."""

from sqlalchemy import Connection, text

# A gap (no upkeep anywhere, an outage) or a clock that jumped, in either direction, means that bots may have been
# unable to call: for one full session life nobody is expired.
BEGIN = text("""
INSERT INTO ticks (name, at, grace_until)
VALUES (:name, clock_timestamp(), clock_timestamp() + make_interval(secs => :grace))
ON CONFLICT (name) DO NOTHING
""")
# Taken before the clock is read, or a tick that waited for another one would see time go back.
HOLD = text("SELECT FROM ticks WHERE name = :name FOR NO KEY UPDATE")
TICK = text("""
UPDATE ticks t SET at = n.now, grace_until = CASE
    WHEN n.now - t.at > make_interval(secs => :gap) OR n.now < t.at THEN n.now + make_interval(secs => :grace)
    ELSE least(t.grace_until, n.now + make_interval(secs => :grace)) END
FROM (SELECT clock_timestamp() AS now) n
WHERE t.name = :name
RETURNING t.grace_until > t.at AS in_grace
""")


def tick(connection: Connection, name: str, *, gap: float, grace: float) -> bool:
    """Write the tick `name`; True while nobody may be expired.

    A silence longer than `gap` seconds since any process's last tick starts `grace` seconds without expiry.
    """
    connection.execute(BEGIN, {"name": name, "grace": grace})
    connection.execute(HOLD, {"name": name})
    in_grace: bool = connection.execute(TICK, {"name": name, "gap": gap, "grace": grace}).scalar_one()
    return in_grace
