"""Long polls: calls that wait in the gateway, without a thread each, until there is news for them.

News arrives in two ways. A wake-up brings it within milliseconds, but may be lost. A query every `poll` seconds finds
it for all waiting calls at once, and comes more rarely if it is long, as with 10,000 of them. A wake-up without keys
says only that something changed. The gateway then makes that query at once: of 10,000 waiting calls, only those with
news are answered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Self

import anyio
import anyio.to_thread
import structlog
from uvicorn.protocols.http.flow_control import FlowControl

from bots.gateway.metrics import GatewayMetrics
from schema import clock
from schema.postgres.connection import Connection
from schema.postgres.notify import Wakeups

#: Reads facts by key. A fact of None is always news; a key without a fact has none.
FactReader = Callable[[Connection, Sequence[str]], Mapping[str, Any]]
#: Runs work in a transaction, outside the event loop.
Run = Callable[[Callable[[Connection], Mapping[str, Any]]], Awaitable[Mapping[str, Any]]]
#: Returns True if a fact is news for a waiting call.
News = Callable[[Any], bool]

#: Seconds for which the idle flag stays set after the last waiting call has left.
LINGER = 1.0
#: LOOKING: the share of the time that periodic queries may take. If they take more, the pause between two becomes
#: longer, up to RARELY times `poll`. Only lost wake-ups wait for a periodic query.
LOOKING, RARELY = 0.005, 4
#: The most wake-ups remembered by key. A call may learn its key only after a wake-up for it has arrived.
REMEMBERED = 20_000

_log = structlog.get_logger(__name__)


def rest(took: float, *, poll: float) -> float:
    """Return the seconds until the next periodic query, after one that took `took` seconds.

    One for 10,000 calls takes the server 11 ms: each second that was a quarter of what such an idle pool cost it.
    """
    return min(max(poll, took / LOOKING), poll * RARELY)


class HangUp:
    """Tells who holds a request that its client has hung up. One for each connection, in the state of its requests.

    To wait for the client's next message instead would take a task for each held call: a seventh of what the event loop
    does for it.
    """

    __slots__ = ("_flow", "_has_happened", "_tell")

    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow
        self._has_happened = False
        self._tell: Callable[[], None] | None = None

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the client hangs up, at once if it has. A connection answers one request at a time."""
        self._tell = listener
        if self._has_happened:
            listener()
        else:
            self._flow.resume_reading()  # who does not read notices nothing

    def forget(self) -> None:
        """Call nobody any more."""
        self._tell = None

    def happens(self) -> None:
        """Note that the client is gone."""
        self._has_happened = True
        if self._tell is not None:
            self._tell()


class LongPoll:
    """One long poll, for the duration of its `async with` block.

    gone: the client has hung up. replaced: a later call of its session has come, so that nobody waits for this one.
    """

    def __init__(self, topic: "PollTopic", hang_up: HangUp | None, *, since: int | None = None) -> None:
        self._topic, self._hang_up = topic, hang_up
        self._since = topic.moment if since is None else since
        self._noticed: set[str] = set()
        #: True if the next wait returns at once. `_waiting`: what a wait that is under way waits for.
        self._is_over = False
        self._waiting: asyncio.Future[None] | None = None
        self.keys: dict[str, News] = {}
        self.gone = self.replaced = False

    async def __aenter__(self) -> Self:
        if self._hang_up is not None:
            self._hang_up.tell(self._hung_up)
        try:
            await self._topic.enter(self)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # Without the reference from the connection, this object is freed without a garbage collection.
        if self._hang_up is not None:
            self._hang_up.forget()
        self._topic.leave(self)

    def add(self, key: str, news: News) -> None:
        """Wait for `key` too. Wake-ups for it count from the beginning of the poll, even those before this call."""
        self.keys[key] = news
        if self._topic.register(key, self, since=self._since):
            self.notice(key)

    def drop(self, key: str) -> None:
        """Stop waiting for `key`."""
        if self.keys.pop(key, None) is not None:
            self._topic.unregister(key, self)

    def notice(self, key: str) -> None:
        """Wake this poll, because `key` has or may have news."""
        self._noticed.add(key)
        self.end()

    def replace(self) -> None:
        """Make the wait return at once, because a later call of the session has come."""
        self.replaced = True
        self.end()

    def end(self) -> None:
        """Make the wait return at once."""
        self._is_over = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, seconds: float) -> frozenset[str]:
        """Return the keys with news as soon as there are any.

        Returns no key after `seconds`, at shutdown, or if the client has hung up.
        """
        if not (self._is_over or self._topic.stopping):
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            end = loop.call_later(seconds, self.end)
            try:
                await self._waiting
            finally:
                self._waiting = None
                end.cancel()
        noticed, self._noticed = frozenset(self._noticed), set()
        self._is_over = self.gone
        return noticed

    def _hung_up(self) -> None:
        self.gone = True
        self.end()


class PollTopic:
    """All long polls that wait for one kind of news. Only the event loop's thread may use it."""

    def __init__(self, name: str, read_facts: FactReader, *, run: Run, owner: "LongPolls") -> None:
        self.name = name
        self.moment = 0
        self._read_facts, self._run, self._owner = read_facts, run, owner
        self._watches: set[LongPoll] = set()
        self._by_key: dict[str, set[LongPoll]] = {}
        self._recent: OrderedDict[str, int] = OrderedDict()
        self._forgotten = 0
        self._look_asked = 0
        self._look_now = asyncio.Event()
        self._looker: asyncio.Task[None] | None = None
        self._flag: asyncio.Task[AbstractContextManager[None]] | None = None
        self._unsubscribe = owner.subscribe(name, self._woken)

    @property
    def stopping(self) -> bool:
        return self._owner.stopping

    def watch(self, hang_up: HangUp | None, *, since: int | None = None) -> LongPoll:
        """Begin a long poll. Enter it before reading the state, so that no change is missed.

        hang_up: that of its connection; None = the poll is cancelled when its client hangs up. since: the `moment` from
        which wake-ups count, at which another poll had been entered already; None = from now on.
        """
        return LongPoll(self, hang_up, since=since)

    async def enter(self, watch: LongPoll) -> None:
        """Add a long poll; the first one starts the listening and the periodic query."""
        self._watches.add(watch)
        self._owner.metrics.waits.labels(self.name).inc()
        if self._owner.wakeups is not None:
            await self._raise_flag(self._owner.wakeups)
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._keep_looking())

    def leave(self, watch: LongPoll) -> None:
        """Remove a long poll."""
        self._owner.metrics.waits.labels(self.name).dec()
        for key in list(watch.keys):
            watch.drop(key)
        self._watches.discard(watch)
        if not self._watches:
            asyncio.get_running_loop().call_later(LINGER, self._lower_flag)

    def register(self, key: str, watch: LongPoll, *, since: int) -> bool:
        """Notify `watch` of `key` from now on; return True if it may have missed a wake-up after `since`."""
        self._by_key.setdefault(key, set()).add(watch)
        if self._look_asked > since:
            self._look_now.set()
        return max(self._recent.get(key, 0), self._forgotten) > since

    def unregister(self, key: str, watch: LongPoll) -> None:
        waiting = self._by_key[key]
        waiting.discard(watch)
        if not waiting:
            del self._by_key[key]

    def end(self) -> None:
        """Make all long polls return at once."""
        for watch in self._watches:
            watch.end()

    async def close(self) -> None:
        """Stop the periodic query and the listening."""
        self._unsubscribe()
        if self._looker is not None:
            self._looker.cancel()
            with suppress(asyncio.CancelledError):
                await self._looker
        self._watches.clear()
        self._lower_flag()

    def _woken(self, keys: frozenset[str]) -> None:
        self.moment += 1
        if not keys:
            self._look_asked = self.moment
            self._look_now.set()
        for key in keys:
            self._recent[key] = self.moment
            self._recent.move_to_end(key)
            for watch in self._by_key.get(key, ()):
                watch.notice(key)
        while len(self._recent) > REMEMBERED:
            self._forgotten = self._recent.popitem(last=False)[1]

    async def _keep_looking(self) -> None:
        pause = self._owner.poll
        while self._watches:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_now.wait()
            self._look_now.clear()
            pause = self._owner.poll
            if not self._by_key:
                continue
            keys = list(self._by_key)
            began = clock.monotonic()
            try:
                facts = await self._run(partial(self._facts, keys))
            except Exception as error:
                _log.warning("long polls could not look for news", topic=self.name, kind=type(error).__name__)
                continue
            self._owner.metrics.looks.labels(self.name).inc()
            self._distribute(facts)
            pause = rest(clock.monotonic() - began, poll=self._owner.poll)

    def _facts(self, keys: Sequence[str], connection: Connection) -> Mapping[str, Any]:
        return self._read_facts(connection, keys)

    def _distribute(self, facts: Mapping[str, Any]) -> None:
        for key, fact in facts.items():
            for watch in self._by_key.get(key, ()):
                if fact is None or watch.keys[key](fact):
                    watch.notice(key)

    async def _raise_flag(self, wakeups: Wakeups) -> None:
        if self._flag is None:
            self._flag = asyncio.create_task(anyio.to_thread.run_sync(_entered, wakeups, self.name))
        if not self._flag.done():
            await asyncio.shield(self._flag)

    def _lower_flag(self) -> None:
        if self._watches or self._flag is None or not self._flag.done():
            return
        flag, self._flag = self._flag, None
        flag.result().__exit__(None, None, None)


class LongPolls:
    """The topics of one gateway. `poll`: seconds between two periodic queries."""

    def __init__(self, *, wakeups: Wakeups | None, poll: float, metrics: GatewayMetrics) -> None:
        self.wakeups, self.poll, self.metrics = wakeups, poll, metrics
        self.stopping = False
        self._topics: dict[str, PollTopic] = {}

    def topic(self, name: str, read_facts: FactReader, *, run: Run) -> PollTopic:
        """Return the topic of that name. The first call creates it, with its query and the function that runs it."""
        if name not in self._topics:
            self._topics[name] = PollTopic(name, read_facts, run=run, owner=self)
        return self._topics[name]

    def end(self) -> None:
        """Make every long poll return at once, including later ones."""
        self.stopping = True
        for topic in self._topics.values():
            topic.end()

    async def close(self) -> None:
        """End all long polls and stop their topics."""
        self.end()
        for topic in self._topics.values():
            await topic.close()
        self._topics.clear()

    def subscribe(self, topic: str, woken: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Call `woken` on the event loop for each wake-up; return a function that ends the subscription."""
        if self.wakeups is None:
            return lambda: None
        loop = asyncio.get_running_loop()

        def pass_on(keys: frozenset[str]) -> None:
            with suppress(RuntimeError):  # the loop was closed while the wake-up was under way
                loop.call_soon_threadsafe(woken, keys)

        return self.wakeups.subscribe(topic, pass_on)


def _entered(wakeups: Wakeups, topic: str) -> AbstractContextManager[None]:
    held = wakeups.idle(topic)
    held.__enter__()
    return held
