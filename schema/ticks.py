"""Proof that upkeep is alive, and the grace that follows when it was not."""

from sqlalchemy import Connection, text

# A gap (no upkeep anywhere, an outage) or a clock that jumped, in either direction, means that bots may have been
# unable to call: for one full session life nobody is expired.
TICK = text("""
WITH span AS (SELECT now, now + make_interval(secs => :grace) AS grace_end FROM clock_timestamp() AS now)
INSERT INTO ticks AS t (name, at, grace_until) SELECT :name, now, grace_end FROM span
ON CONFLICT (name) DO UPDATE SET at = EXCLUDED.at, grace_until = CASE
    WHEN EXCLUDED.at - t.at > make_interval(secs => :gap) OR EXCLUDED.at < t.at THEN EXCLUDED.grace_until
    ELSE least(t.grace_until, EXCLUDED.grace_until) END
RETURNING grace_until > at AS in_grace
""")


def tick(connection: Connection, name: str, *, gap: float, grace: float) -> bool:
    """Write the tick `name`; True while nobody may be expired.

    A silence longer than `gap` seconds since any process's last tick starts `grace` seconds without expiry.
    """
    in_grace: bool = connection.execute(TICK, {"name": name, "gap": gap, "grace": grace}).scalar_one()
    return in_grace
