"""Wake-ups by LISTEN and NOTIFY. They make an idle pool quick; a lost one costs no more than one poll interval.

NOTIFY takes a lock that all commits share, so it is sent only while a process sleeps. A process that sleeps on a topic
holds the topic's advisory lock shared: this is its idle flag. The SQL function `wake` sends nothing while nobody holds
that lock.

A waiting process keeps this order: raise the flag (`idle`), read the work, wait. The read finds work that was committed
before the flag. Work is announced if its sender saw the flag. One case remains: a sender tests the flag just before it
is raised, and commits just after the read. That work waits for the next poll.

A `Channel` is the connection's side of this, used by one thread. `Wakeups` serves all threads of a process.
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

from schema import clock
from schema.postgres.connection import Connection
from schema.postgres.engine import QUEUE_USAGE, Database
from schema.postgres.failures import said_of_outage
from schema.postgres.statements import Statement

#: Prefix of channel names, before the topic.
PREFIX = "leasehold_"
RAISE = "SELECT pg_advisory_lock_shared(hashtext('leasehold.idle'), hashtext(%s))"
LOWER = "SELECT pg_advisory_unlock_shared(hashtext('leasehold.idle'), hashtext(%s))"


class Channel:
    """One connection's channels, idle flags and received notifications; for one thread.

    Every method raises psycopg.Error when the connection is lost. The server then drops the flags too.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._arrived: list[tuple[str, str]] = []
        # Notifications that arrive while a statement runs go to the handler; `receive` takes the others from libpq.
        connection.add_notify_handler(lambda notify: self._arrived.append((notify.channel, notify.payload)))

    def fileno(self) -> int:
        """File descriptor that is readable when there may be something to receive."""
        return self._connection.fileno()

    def hear(self, topic: str) -> None:
        """Listen to notifications of `topic` from now on."""
        self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(PREFIX + topic)))

    def raise_flag(self, topic: str) -> bool:
        """Raise the idle flag of `topic`; false if its lock could not be had in time."""
        try:
            self._connection.execute(RAISE, (topic,))
        except psycopg.errors.LockNotAvailable:
            return False  # a sender has held the lock for longer than the lock time-out
        return True

    def lower_flag(self, topic: str) -> None:
        """Lower the idle flag of `topic`."""
        self._connection.execute(LOWER, (topic,))

    def probe(self) -> None:
        """Ask the server for an answer: a connection behind which it is gone would stay silent for ever."""
        self._connection.execute("SELECT")

    def receive(self) -> dict[str, frozenset[str]]:
        """Return topic → keys that have arrived since the last call, without waiting.

        An empty set means every key: a notification without keys includes all others of its topic. libpq may hold
        notifications although its socket is silent, so call this before waiting for the socket.
        """
        self._connection.pgconn.consume_input()
        while (notify := self._connection.pgconn.notifies()) is not None:
            self._arrived.append((notify.relname.decode(), notify.extra.decode()))
        united: dict[str, set[str]] = {}
        for channel, payload in self._arrived:
            united.setdefault(channel.removeprefix(PREFIX), set()).update(payload.split(","))
        self._arrived.clear()
        return {topic: frozenset() if "" in keys else frozenset(keys) for topic, keys in united.items()}


#: Receives the keys of all wake-ups that arrived together; an empty set means that anything may have changed.
Callback = Callable[[frozenset[str]], None]

#: Seconds for which `idle` waits for its flag. Nothing depends on the flag but speed.
FLAG_TIMEOUT = 0.05
#: Seconds for which a flag stays up after its last holder left, so that a pool that is often idle briefly does not
#: toggle it.
LINGER = 1.0
#: Bounds in seconds of the random wait before a reconnect: at first up to the first one, which doubles each time, at
#: most up to the last one.
RECONNECT_FIRST, RECONNECT_LAST = 0.1, 2.0
#: Seconds after which the log tells again that there is none: tries are many in an outage.
TELL_AGAIN = 30.0
#: Seconds between two questions whether the server still answers on the connection that listens.
PROBE = 5.0
#: Seconds until a flag that could not be raised is tried again.
FLAG_RETRY = 0.1

WAKE = Statement("SELECT leasehold.wake(:topic, :keys)")

log = structlog.get_logger(__name__)


def wake(connection: Connection, topic: str, keys: Sequence[str] = ()) -> None:
    """Wake the processes that sleep on `topic` when the caller's transaction commits.

    It is sent with the next statement, or with COMMIT. If the keys do not fit into one notification, it is sent without
    keys, which means that anything may have changed.
    """
    connection.execute_later(WAKE, {"topic": topic, "keys": ",".join(keys)})


def queue_usage(connection: Connection) -> float:
    """Return which part of the server's queue of notifications is in use, 0 to 1. A full queue needs asking."""
    return float(connection.execute(QUEUE_USAGE).scalar_one())


class Signal:
    """A `threading.Event` for one waiter that wake-ups of a topic set. Without `subscribe` only `set` sets it."""

    def __init__(self, subscribe: Callable[[Callback], Callable[[], None]] | None = None) -> None:
        self._event = threading.Event()
        self._unsubscribe = subscribe(lambda _: self._event.set()) if subscribe else None

    def set(self) -> None:
        """Wake the waiter, or let its next wait return at once."""
        self._event.set()

    def clear(self) -> None:
        """Forget earlier wake-ups. Call it before the read that finds what they announced, never after that read."""
        self._event.clear()

    def wait(self, seconds: float, *, busy: bool = False) -> bool:  # noqa: ARG002
        """Wait until woken, at most `seconds`. True if it was woken. busy: see `SignalGroup.wake_next`."""
        return clock.wait(self._event, seconds)

    def wake_next(self) -> None:
        """Wake another waiter of the same group, because this one may leave work. Without a group it does nothing."""

    def close(self) -> None:
        """Stop receiving wake-ups. Idempotent."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


class SignalGroup:
    """Signals of threads that do the same work, of which a wake-up wakes one.

    It is the thread that went to rest last, whose caches are the freshest. Threads that do not rest are told too: they
    look again before they rest, because what they have read may be older than the wake-up, and what they have locked
    may be what the woken thread looks for. The woken thread must call `wake_next` if it leaves work to others, and if
    it fails.
    """

    def __init__(self, subscribe: Callable[[Callback], Callable[[], None]] | None = None) -> None:
        self._lock = threading.Lock()
        self._members: set[_Member] = set()
        #: Those that rest, the last one last, and whether each only pauses between two runs.
        self._resting: dict[_Member, bool] = {}
        self._unsubscribe = subscribe(lambda _: self.wake()) if subscribe else None

    def close(self) -> None:
        """Stop receiving wake-ups. Idempotent."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def signal(self) -> Signal:
        """A new signal of this group, for one thread."""
        return _Member(self)

    def wake(self) -> None:
        """Wake one of those that rest, and let all that do not rest look again."""
        with self._lock:
            for member in self._members - self._resting.keys():
                member.set()
            if self._resting:
                self._resting.popitem()[0].set()

    def wake_next(self) -> None:
        """Wake one of those that rest. A thread that is busy, and only pauses between two runs, keeps its pause."""
        with self._lock:
            idle = [member for member, busy in self._resting.items() if not busy]
            if idle:
                del self._resting[idle[-1]]
                idle[-1].set()

    def _rest(self, member: "_Member", seconds: float, *, busy: bool) -> bool:
        with self._lock:
            if member.is_set:
                return True
            self._resting[member] = busy
        try:
            return clock.wait(member._event, seconds)
        finally:
            # Who is chosen in this moment, after its time is up, looks before it rests again.
            with self._lock:
                self._resting.pop(member, None)


class _Member(Signal):
    """The signal of one thread of a group."""

    def __init__(self, group: SignalGroup) -> None:
        super().__init__()
        self._group = group
        with group._lock:
            group._members.add(self)

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float, *, busy: bool = False) -> bool:
        return self._group._rest(self, seconds, busy=busy)

    def wake_next(self) -> None:
        self._group.wake_next()

    def close(self) -> None:
        with self._group._lock:
            self._group._members.discard(self)


@dataclass
class _Topic:
    """Subscribers and sleepers of one topic in this process, and the state of its connection. Guarded by the owner."""

    callbacks: dict[int, Callback] = field(default_factory=dict)
    holders: int = 0
    lower_at: float = 0.0
    listening: bool = False
    flag: threading.Event = field(default_factory=threading.Event)
    #: A sleeper may have missed a wake-up: the callbacks are called as soon as wake-ups arrive again.
    missed: bool = False

    @property
    def lingers(self) -> bool:
        """True if the flag is up although no thread sleeps."""
        return self.flag.is_set() and self.holders == 0

    @property
    def ready(self) -> bool:
        """True if no wake-up can be missed from now on."""
        return self.listening and (self.flag.is_set() or self.holders == 0)

    def over(self, now: float) -> bool:
        """True if the flag has been up without a sleeper for long enough and must be lowered."""
        return self.lingers and self.lower_at <= now


class Wakeups:
    """One LISTEN connection for the whole process, served by one thread. Methods may be called from any thread.

    Callbacks run on the listener's thread and must be quick. If not `enabled`, no callback is called and this process
    causes no notifications. It then relies on its polls. This is for tests and for transaction poolers.
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
        self._failures, self._told = 0, -math.inf
        #: When the listener wakes up by itself, on the monotonic clock.
        self._alarm = math.inf
        self._connected = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._poke_end: int | None = None

    @property
    def connected(self) -> bool:
        """True while wake-ups arrive."""
        return self._connected.is_set()

    def start(self) -> None:
        """Listen in a background thread, which connects as soon as the database can be reached. Idempotent."""
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
        """Call `callback` with the keys of each wake-up of `topic`. Returns a function that ends the subscription."""
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

    def group(self, topic: str) -> SignalGroup:
        """A new group of signals of which every wake-up of `topic` sets one, whatever its keys."""
        return SignalGroup(partial(self.subscribe, topic))

    @contextmanager
    def idle(self, topic: str) -> Iterator[None]:
        """Hold the idle flag of `topic`, so that wake-ups are sent. Enter, read the work, then wait for a callback.

        Entering takes at most 50 ms, and no time while another thread is inside or left within the last second. If the
        flag was not up in time, all callbacks of the topic are called without keys once it is.
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
                # The listener is not woken if an alarm will do so before the flag must go down.
                if wanted.holders == 0 and self._alarm > wanted.lower_at:
                    self._poke()

    def _poke(self) -> None:
        """Wake the listener's thread, so that it applies changes. Called with the lock held."""
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
        if self._failures == 1 or clock.monotonic() - self._told > TELL_AGAIN:
            self._told = clock.monotonic()
            reason = said_of_outage(error) or type(error).__name__
            log.warning("wake-ups have no connection", reason=reason, tries=self._failures, retry_in=round(delay, 3))
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
            probe_at = clock.monotonic() + PROBE
            while not stopping.is_set():
                self._fulfil(channel)
                if clock.monotonic() >= probe_at:
                    channel.probe()
                    probe_at = clock.monotonic() + PROBE
                if self._failures:
                    log.info("wake-ups have a connection again", tries=self._failures)
                self._failures = 0
                self._connected.set()
                self._call(channel.receive())
                with self._lock:
                    pause = max(0.0, min(self._alarm, probe_at) - clock.monotonic())
                if any(key.fd == read_end for key, _ in selector.select(pause)):
                    os.read(read_end, 65536)

    def _fulfil(self, channel: Channel) -> None:
        """Apply the wishes of the process to the connection: channels first, then flags, then missed callbacks."""
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
