"""The virtual clock of a database: its functions that tell the time answer what a program says.

The sessions of such a database look for functions first in the schema `leasehold`, then in `simulated_time`, and last
in `pg_catalog`. The statements of the pool call `now()` and the other functions unqualified, so they find those of
`simulated_time`, which read the setting `leasehold.virtual_now`: seconds since 1970. The database has to be migrated on
this path too, because a default of a column keeps the function that was found when it was made.

What tells the time in another way escapes the virtual clock. `find_escapes` finds it in definitions, and
`count_escaped` in rows.
"""

import math
import random

import sqlalchemy

from schema.postgres import migrate
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings, OtherSessions
from schema.postgres.notify import PREFIX
from schema.postgres.session import BEGIN, Message, Session
from schema.postgres.statements import Statement
from schema.sql import SCHEMA

#: The schema of the functions that tell virtual time.
TIME_SCHEMA = "simulated_time"
#: The setting that holds it.
SETTING = "leasehold.virtual_now"
#: `leasehold` is first, because migrations create their objects there.
SEARCH_PATH = f"{SCHEMA},{TIME_SCHEMA},pg_catalog,pg_temp"
#: Topics of wake-ups that a simulation answers.
TOPICS = ("jobs", "bots", "schedules")

# The planner inlines these functions, so that a condition such as `due_at < now()` still has its index.
_FUNCTIONS = f"CREATE SCHEMA {TIME_SCHEMA};\n" + "\n".join(
    f"CREATE FUNCTION {TIME_SCHEMA}.{name}() RETURNS timestamptz LANGUAGE sql {volatility} PARALLEL SAFE AS "
    f"$$ SELECT pg_catalog.to_timestamp(pg_catalog.current_setting('{SETTING}')::double precision) $$;"
    for name, volatility in (
        ("now", "STABLE"),
        ("transaction_timestamp", "STABLE"),
        ("statement_timestamp", "STABLE"),
        ("clock_timestamp", "VOLATILE"),
    )
)
_HAS_FUNCTIONS = f"SELECT to_regnamespace('{TIME_SCHEMA}') IS NOT NULL"
# Not a SELECT, which would take the snapshot of the transaction that it begins.
_SET = f"SET {SETTING} = '{{}}'"
_SEED = b"SELECT setseed($1)"
# Autovacuum runs when it likes, and then a kept plan is made anew.
_NO_AUTOVACUUM = """
DO $$
DECLARE one regclass;
BEGIN
    FOR one IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'leasehold'::regnamespace LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', one);
    END LOOP;
END $$
"""

# The functions of pg_catalog that tell the time, by their numbers in the server's parse trees; and the words of the SQL
# standard that do, such as CURRENT_TIMESTAMP.
_TREES = Statement(rf"""
WITH clocks AS (
    SELECT concat('([:]funcid (', string_agg(oid::text, '|'), ')\M|SQLVALUEFUNCTION [:]op [0-8]\M)') AS pattern
    FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
        AND proname IN ('now', 'transaction_timestamp', 'statement_timestamp', 'clock_timestamp', 'timeofday')
), trees AS (
    SELECT concat('the default of ', d.adrelid::regclass, '.', a.attname) AS place, d.adbin::text AS tree
    FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
    UNION ALL SELECT concat('the view or rule on ', ev_class::regclass), ev_action::text FROM pg_rewrite
        WHERE ev_class IN (SELECT oid FROM pg_class WHERE relnamespace = '{SCHEMA}'::regnamespace)
    UNION ALL SELECT concat('the trigger ', tgname), tgqual::text FROM pg_trigger WHERE tgqual IS NOT NULL
    UNION ALL SELECT concat('the index ', indexrelid::regclass), concat(indexprs::text, indpred::text) FROM pg_index
    UNION ALL SELECT concat('the constraint ', conname), conbin::text FROM pg_constraint WHERE conbin IS NOT NULL
    UNION ALL SELECT concat('the function ', oid::regproc), prosqlbody::text FROM pg_proc WHERE prosqlbody IS NOT NULL
        AND pronamespace = '{SCHEMA}'::regnamespace
)
SELECT t.place FROM trees t, clocks c WHERE t.tree ~ c.pattern ORDER BY 1
""")
# Functions whose text is read when they are called: they find the clock by their search path.
_BODIES = Statement(rf"""
SELECT concat('the function ', oid::regprocedure) AS place FROM pg_proc
WHERE pronamespace = '{SCHEMA}'::regnamespace AND prosqlbody IS NULL AND (
    prosrc ~* '\m(current_(timestamp|time|date)|localtime(stamp)?|timeofday)\M'
    OR prosrc ~* 'pg_catalog\.(now|transaction_timestamp|statement_timestamp|clock_timestamp)\M'
    OR EXISTS (SELECT FROM unnest(proconfig) AS setting
        WHERE starts_with(setting, 'search_path=') AND strpos(setting, '{TIME_SCHEMA}') = 0))
ORDER BY 1
""")
_TIME_COLUMNS = Statement(f"""
SELECT c.relname AS table_name, a.attname AS column_name
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = '{SCHEMA}'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
    AND a.atttypid = 'timestamptz'::regtype
ORDER BY 1, 2
""")


class VirtualClock:
    """Seconds since 1970 that only `advance` changes. The object itself is the source of `schema.clock.replaced`."""

    def __init__(self, start: float) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, until: float) -> None:
        """Let it be `until`. Raises ValueError if that is in the past: no time goes back."""
        if until < self.now:
            raise ValueError("virtual time does not go back")
        self.now = until


class VirtualSessions:
    """Puts each session of a database on the virtual clock, seeds its chance, and listens on it.

    A session hears its own notifications with the answer to its COMMIT. So what one call of the pool announces is known
    when it returns, and does not depend on the speed of the machine. Notifications of other sessions are left out.
    """

    def __init__(self, clock: VirtualClock, *, seed: int) -> None:
        self._clock, self._seed = clock, seed
        #: Each session that was opened, with the time that its transactions begin with.
        self._opened: dict[Session, float] = {}

    @property
    def other(self) -> OtherSessions:
        """What the database has to be told."""
        settings = {"search_path": SEARCH_PATH, SETTING: repr(self._clock.now)}
        return OtherSessions(settings, self._open, self._tell)

    def news(self) -> dict[str, frozenset[str]]:
        """Take what was announced since the last call: topic → keys; an empty set means every key."""
        found: dict[str, set[str]] = {}
        every = set[str]()
        for session in self._opened:
            while (notify := session.pgconn.notifies()) is not None:
                if notify.be_pid == session.pgconn.backend_pid:
                    topic = notify.relname.decode().removeprefix(PREFIX)
                    keys = notify.extra.decode()
                    found.setdefault(topic, set()).update(keys.split(",") if keys else ())
                    if not keys:
                        every.add(topic)
        return {topic: frozenset() if topic in every else frozenset(keys) for topic, keys in found.items()}

    def _open(self, session: Session) -> None:
        chance = random.Random(f"{self._seed} {len(self._opened)}")
        session.send([Message(_SEED, (repr(chance.uniform(-1.0, 1.0)).encode(),))])
        for topic in TOPICS:
            session.execute_script(f"LISTEN {PREFIX}{topic}")
        self._opened[session] = -math.inf

    def _tell(self, session: Session) -> None:
        """Let each transaction of the session begin with the time, which costs no round trip of its own."""
        if self._opened[session] != self._clock.now:
            self._opened[session] = self._clock.now
            time = Message(_SET.format(repr(self._clock.now)).encode(), once=True)
            session.begins, session.settings = (BEGIN, time), (time,)


def make(url: str, clock: VirtualClock, *, seed: int) -> tuple[Database, VirtualSessions]:
    """Make the pool's tables in the database of `url`, on the virtual clock. It is empty, or a copy of one made so.

    The caller closes the database. Raises psycopg.Error, and NotReady if the server cannot be reached or is too old.
    """
    sessions = VirtualSessions(clock, seed=seed)
    settings = DatabaseSettings(statement_timeout=3600, lock_timeout=60, idle_in_transaction_timeout=3600)
    database = Database(url, settings, role="simulation", chance=random.Random(seed), other=sessions.other)
    with migrate.begin(database) as connection:
        if not connection.exec_driver_sql(_HAS_FUNCTIONS).scalar_one():
            connection.exec_driver_sql(_FUNCTIONS)
    migrate.upgrade(database)
    with migrate.begin(database) as connection:
        connection.execute(sqlalchemy.text(_NO_AUTOVACUUM))
    return database, sessions


def find_escapes(connection: Connection) -> list[str]:
    """Return the definitions that tell the time by another clock than the virtual one, each in words."""
    return [row.place for statement in (_TREES, _BODIES) for row in connection.execute(statement)]


def count_escaped(connection: Connection, *, since: float, until: float) -> dict[str, int]:
    """Count the stored times between two times of the host's clock, in seconds since 1970, by their columns.

    While the virtual time is years from there, each of them was told by another clock.
    """
    found = {}
    for table, column in connection.execute(_TIME_COLUMNS):
        counted = connection.execute(
            Statement(
                f'SELECT count(*) FROM "{table}" WHERE "{column}" BETWEEN to_timestamp(:since) AND to_timestamp(:until)'
            ),
            {"since": since, "until": until},
        ).scalar_one()
        if counted:
            found[f"{table}.{column}"] = counted
    return found
