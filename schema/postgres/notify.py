"""Wake-ups over LISTEN/NOTIFY: they make an idle pool quick, and losing one costs no more than one poll.

A NOTIFY takes a lock that all commits share, so it is only sent while somebody sleeps: a process that waits for a
topic holds the topic's advisory lock shared, and the SQL function `wake` sends nothing while that lock is free.

Who sleeps does it in this order: flag (`idle`), look, wait. Work committed before the flag is found by the look, work
whose sender saw the flag is announced. What remains is a sender that looked for the flag just before it was raised
and committed just after the look: that work waits for the poll.
"""

import math
import os
import random
import selectors
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
import structlog
from psycopg import sql
from sqlalchemy import Connection, text

from schema import clock
from schema.postgres.engine import Database

# One connection's side of wake-ups: channels heard, idle flags held, notifications received.


#: Of the names of channels, before the topic.
PREFIX = "leasehold_"
RAISE = "SELECT pg_advisory_lock_shared(hashtext('leasehold.idle'), hashtext(%s))"
LOWER = "SELECT pg_advisory_unlock_shared(hashtext('leasehold.idle'), hashtext(%s))"


class Channel:
    """Belongs to one thread. Every method raises psycopg.Error when the connection is lost; flags end with it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._arrived: list[tuple[str, str]] = []
        # Notifications that come in while a statement runs go to the handler, the others are taken from libpq.
        connection.add_notify_handler(lambda notify: self._arrived.append((notify.channel, notify.payload)))

    def fileno(self) -> int:
        """Readable when there may be something to receive."""
        return self._connection.fileno()

    def hear(self, topic: str) -> None:
        """From now on notifications of `topic` arrive here."""
        self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(PREFIX + topic)))

    def raise_flag(self, topic: str) -> bool:
        """Say that somebody here sleeps on `topic`; tells whether that worked."""
        try:
            self._connection.execute(RAISE, (topic,))
        except psycopg.errors.LockNotAvailable:
            return False  # a sender is looking at it, for longer than a lock time-out
        return True

    def lower_flag(self, topic: str) -> None:
        """Say that nobody here sleeps on `topic` any more."""
        self._connection.execute(LOWER, (topic,))

    def receive(self) -> dict[str, frozenset[str]]:
        """Topic → all the keys that have arrived since the last call; does not wait.

        An empty set is about everything: one notification without keys makes the others of its topic pointless. libpq
        may hold notifications although its socket is silent, so receive before waiting for the socket.
        """
        self._connection.pgconn.consume_input()
        while (notify := self._connection.pgconn.notifies()) is not None:
            self._arrived.append((notify.relname.decode(), notify.extra.decode()))
        united: dict[str, set[str]] = {}
        for channel, payload in self._arrived:
            united.setdefault(channel.removeprefix(PREFIX), set()).update(payload.split(","))
        self._arrived.clear()
        return {topic: frozenset() if "" in keys else frozenset(keys) for topic, keys in united.items()}


#: Gets the keys of all wake-ups that arrived together; an empty set means "look yourself".
Callback = Callable[[frozenset[str]], None]

#: Seconds `idle` waits at most for its flag; everything is correct without it.
FLAG_TIMEOUT = 0.05
#: Seconds a flag stays up after its last holder left, so that a pool that is now busy, now idle does not toggle it.
LINGER = 1.0
#: Longest payload of one NOTIFY, bytes; PostgreSQL refuses 8,000.
MAX_KEYS_BYTES = 7_900
#: Seconds between attempts to reconnect: a random wait between 0 and the first, doubled each time, up to the last.
RECONNECT_FIRST, RECONNECT_LAST = 0.1, 2.0
#: Seconds until a flag that could not be had is tried again.
FLAG_RETRY = 0.1

WAKE = text("SELECT leasehold.wake(:topic, :keys)")

log = structlog.get_logger(__name__)


def wake(connection: Connection, topic: str, keys: Sequence[str] = ()) -> bool:
    """Announce news to whoever sleeps on `topic`, delivered when the caller's transaction commits.

    Tells whether anybody slept. More keys than fit one notification become "look yourself".
    """
    joined = ",".join(keys)
    fits = len(joined.encode()) <= MAX_KEYS_BYTES
    return bool(connection.execute(WAKE, {"topic": topic, "keys": joined if fits else ""}).scalar_one())


class Signal:
    """A `threading.Event` that wake-ups of a topic set; also usable alone. It is for one waiter."""

    def __init__(self, subscribe: Callable[[Callback], Callable[[], None]] | None = None) -> None:
        self._event = threading.Event()
        self._unsubscribe = subscribe(lambda _: self._event.set()) if subscribe else None

    def set(self) -> None:
        """Wake the waiter, or let its next wait return at once."""
        self._event.set()

    def clear(self) -> None:
        """Forget earlier wake-ups. To be done before the look that finds what they announced, never after it."""
        self._event.clear()

    def wait(self, seconds: float) -> bool:
        """Wait until woken, at most `seconds`; tells whether it was woken."""
        return clock.wait(self._event, seconds)

    def close(self) -> None:
        """Receive no more wake-ups. Idempotent."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


@dataclass
class _Topic:
    """What this process wants of one topic, and what its connection has of it; guarded by the owner's lock."""

    callbacks: dict[int, Callback] = field(default_factory=dict)
    holders: int = 0
    lower_at: float = 0.0
    listening: bool = False
    flag: threading.Event = field(default_factory=threading.Event)
    #: Somebody sleeps who may have missed a wake-up: its callbacks are called as soon as wake-ups arrive again.
    missed: bool = False

    @property
    def lingers(self) -> bool:
        """Whether its flag is up for nobody."""
        return self.flag.is_set() and self.holders == 0

    @property
    def ready(self) -> bool:
        """Whether no wake-up can be missed from now on."""
        return self.listening and (self.flag.is_set() or self.holders == 0)

    def over(self, now: float) -> bool:
        """Whether its flag has been up for nobody for long enough."""
        return self.lingers and self.lower_at <= now


class Wakeups:
    """One LISTEN connection for the whole process, served by one thread. Methods may be called from any thread.

    Callbacks run on the listener's thread and must be quick. If not `enabled`, no callback is ever called and nobody
    sends anything for the sake of this process, which then relies on its polls: for tests and transaction poolers.
    """

    def __init__(
        self,
        database: Database,
        *,
        enabled: bool = True,
        chance: random.Random | None = None,
        linger: float = LINGER,
    ) -> None:
        self._database = database
        self._enabled = enabled
        self._chance = chance or random.Random()
        self._linger = linger
        self._lock = threading.Lock()
        self._topics: dict[str, _Topic] = {}
        self._serial = 0
        self._failures = 0
        #: When the listener wakes up by itself, on the monotonic clock.
        self._alarm = math.inf
        self._connected = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._poke_end: int | None = None

    @property
    def connected(self) -> bool:
        """Whether wake-ups arrive at the moment."""
        return self._connected.is_set()

    def start(self) -> None:
        """Listen in the background, from as soon as the database can be reached. Idempotent."""
        with self._lock:
            if not self._enabled or self._thread is not None:
                return
            read_end, self._poke_end = os.pipe()
            os.set_blocking(self._poke_end, False)
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(read_end, self._stopping), name="leasehold-wakeups", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop listening, lower every flag and wait for the thread. Idempotent; `start` may follow."""
        with self._lock:
            self._stopping.set()
            self._poke()
            thread, self._thread = self._thread, None
            poke_end, self._poke_end = self._poke_end, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if poke_end is not None:
            os.close(poke_end)

    def subscribe(self, topic: str, callback: Callback) -> Callable[[], None]:
        """Call `callback` with the keys of each wake-up of `topic`; what comes back ends that."""
        with self._lock:
            self._serial += 1
            serial = self._serial
            self._topics.setdefault(topic, _Topic()).callbacks[serial] = callback
            self._poke()

        def unsubscribe() -> None:
            with self._lock:
                self._topics[topic].callbacks.pop(serial, None)

        return unsubscribe

    def signal(self, topic: str) -> Signal:
        """A new signal that every wake-up of `topic` sets, whatever its keys."""
        return Signal(partial(self.subscribe, topic))

    @contextmanager
    def idle(self, topic: str) -> Iterator[None]:
        """Inside it, wake-ups of `topic` are sent. Enter, look for work, then wait for a callback.

        Entering takes at most 50 ms, and no time at all while others are inside or have left within the last second.
        Whoever had to enter without the flag gets an empty callback once it is up.
        """
        with self._lock:
            wanted = self._topics.setdefault(topic, _Topic())
            wanted.holders += 1
            if not wanted.flag.is_set():
                self._poke()
        try:
            if self.connected and not clock.wait(wanted.flag, FLAG_TIMEOUT):
                log.debug("the idle flag is late", topic=topic)
            with self._lock:
                wanted.missed = wanted.missed or not wanted.flag.is_set()
            yield
        finally:
            with self._lock:
                wanted.holders -= 1
                wanted.lower_at = clock.monotonic() + self._linger
                # A process that is idle again and again need not wake its listener each time.
                if wanted.holders == 0 and self._alarm > wanted.lower_at:
                    self._poke()

    def _poke(self) -> None:
        """Make the listener look at what is wanted. Called with the lock held."""
        if self._poke_end is None:
            return
        with suppress(BlockingIOError):  # a full pipe wakes it just as well
            os.write(self._poke_end, b"!")

    def _run(self, read_end: int, stopping: threading.Event) -> None:
        try:
            while not stopping.is_set():
                try:
                    with self._database.listen() as connection:
                        self._serve(Channel(connection), read_end, stopping)
                except (psycopg.Error, OSError) as error:
                    self._disconnected()
                    clock.wait(stopping, self._backoff(error))
        finally:
            self._disconnected()
            os.close(read_end)

    def _backoff(self, error: Exception) -> float:
        bound = min(RECONNECT_LAST, RECONNECT_FIRST * 2.0 ** min(self._failures, 10))
        delay = self._chance.uniform(0.0, bound)
        self._failures += 1
        log.warning("wake-ups have no connection", error=type(error).__name__, retry_in=round(delay, 3))
        return delay

    def _disconnected(self) -> None:
        self._connected.clear()
        with self._lock:
            self._alarm = math.inf
            for topic in self._topics.values():
                topic.flag.clear()
                topic.listening, topic.missed = False, True

    def _serve(self, channel: Channel, read_end: int, stopping: threading.Event) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(read_end, selectors.EVENT_READ)
            while not stopping.is_set():
                self._fulfil(channel)
                self._failures = 0
                self._connected.set()
                self._call(channel.receive())
                with self._lock:
                    pause = None if self._alarm == math.inf else max(0.0, self._alarm - clock.monotonic())
                if any(key.fd == read_end for key, _ in selector.select(pause)):
                    os.read(read_end, 65536)

    def _fulfil(self, channel: Channel) -> None:
        """Give the connection what its process wants by now: channels first, then flags, then calls owed."""
        with self._lock:
            now = clock.monotonic()
            unheard = [name for name, topic in self._topics.items() if not topic.listening]
            wanted = [name for name, topic in self._topics.items() if topic.holders and not topic.flag.is_set()]
            unwanted = [name for name, topic in self._topics.items() if topic.over(now)]
            for name in unwanted:
                self._topics[name].flag.clear()
        for name in unheard:
            channel.hear(name)
        for name in unwanted:
            channel.lower_flag(name)
        raised = [name for name in wanted if channel.raise_flag(name)]
        with self._lock:
            for name in unheard:
                self._topics[name].listening = True
            for name in raised:
                self._topics[name].flag.set()
            self._alarm = min((topic.lower_at for topic in self._topics.values() if topic.lingers), default=math.inf)
            if len(raised) < len(wanted):
                self._alarm = min(self._alarm, clock.monotonic() + FLAG_RETRY)
            missed = [name for name, topic in self._topics.items() if topic.missed and topic.ready]
            for name in missed:
                self._topics[name].missed = False
        self._call(dict.fromkeys(missed, frozenset()))

    def _call(self, news: dict[str, frozenset[str]]) -> None:
        for name, keys in news.items():
            with self._lock:
                callbacks = list(self._topics[name].callbacks.values()) if name in self._topics else []
            for callback in callbacks:
                try:
                    callback(keys)
                except Exception:
                    log.exception("a wake-up callback failed", topic=name)
