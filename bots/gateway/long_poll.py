"""Long polls without a thread each: who waits for what, and how they learn of news.

News comes twice: by wake-ups, within milliseconds and possibly never, and by a look at the database every `poll`
seconds, one query for all who wait. A wake-up "look yourself" (no keys) becomes one such look at once, so that
10,000 waiting calls are not all answered for nothing.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import anyio
import anyio.to_thread
import structlog
from sqlalchemy import Connection, text
from starlette.requests import Request

from bots.gateway.metrics import GatewayMetrics
from bots.gateway.workers import WorkerPool
from schema.moves.sessions import renew
from schema.postgres.engine import Database
from schema.postgres.fragments import newest_leases, newest_version


class FactReader(Protocol):
    """What can be told of these keys: None of one that has news by that alone, nothing of one that has none."""

    def __call__(self, connection: Connection, keys: Sequence[str], /) -> Mapping[str, Any]: ...


#: Does work in a transaction, off the event loop.
Run = Callable[[Callable[[Connection], Mapping[str, Any]]], Awaitable[Mapping[str, Any]]]
#: Whether a fact is news to one who waits.
News = Callable[[Any], bool]

#: Seconds the idle flag stays up after the last who waited has left.
LINGER = 1.0
#: Wake-ups remembered by key, for those who learn their key only after the call during which they came.
REMEMBERED = 20_000

_log = structlog.get_logger(__name__)


class WakeSource(Protocol):
    """What long polls need of schema.wakeups.Wakeups."""

    @property
    def connected(self) -> bool: ...
    def subscribe(self, topic: str, callback: Callable[[frozenset[str]], None]) -> Callable[[], None]: ...
    def idle(self, topic: str) -> AbstractContextManager[None]: ...


class LongPoll:
    """One long poll, while the block lasts. `gone` says that its client has hung up."""

    def __init__(self, topic: "PollTopic", request: Request) -> None:
        self._topic, self._request = topic, request
        self._since = topic.moment
        self._event = asyncio.Event()
        self._noticed: set[str] = set()
        self.keys: dict[str, News] = {}
        self.gone = False
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listener = asyncio.create_task(self._until_hung_up())
        try:
            await self._topic.enter(self)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # Forgotten, because its end keeps this watch, and together they would be garbage that only a search finds.
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
        self._topic.leave(self)

    def add(self, key: str, news: News) -> None:
        """Wait for `key` too. Wake-ups since the watch began count, also those before this call."""
        self.keys[key] = news
        if self._topic.register(key, self, since=self._since):
            self.notice(key)

    def drop(self, key: str) -> None:
        """Wait for `key` no more."""
        if self.keys.pop(key, None) is not None:
            self._topic.unregister(key, self)

    def notice(self, key: str) -> None:
        """There is, or may be, news of `key`."""
        self._noticed.add(key)
        self._event.set()

    def end(self) -> None:
        """Let the wait, and any later one, return at once."""
        self._event.set()

    async def wait(self, seconds: float) -> frozenset[str]:
        """The keys with news, as soon as there are any; none after `seconds`, at shutdown, or if the client left."""
        if not self._topic.stopping:
            end = asyncio.get_running_loop().call_later(seconds, self._event.set)
            try:
                await self._event.wait()
            finally:
                end.cancel()
        noticed, self._noticed = frozenset(self._noticed), set()
        if not self.gone:
            self._event.clear()
        return noticed

    async def _until_hung_up(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._event.set()


class PollTopic:
    """Everybody who waits for news of one kind. Belongs to the event loop's thread."""

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

    def watch(self, request: Request) -> LongPoll:
        """Wait on behalf of this request. Enter before looking, so that nothing falls between look and wait."""
        return LongPoll(self, request)

    async def enter(self, watch: LongPoll) -> None:
        """From now on there is somebody who waits."""
        self._watches.add(watch)
        self._owner.metrics.waits.labels(self.name).inc()
        if self._owner.wakeups is not None:
            await self._raise_flag(self._owner.wakeups)
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._keep_looking())

    def leave(self, watch: LongPoll) -> None:
        """That one waits no more."""
        self._owner.metrics.waits.labels(self.name).dec()
        for key in list(watch.keys):
            watch.drop(key)
        self._watches.discard(watch)
        if not self._watches:
            asyncio.get_running_loop().call_later(LINGER, self._lower_flag)

    def register(self, key: str, watch: LongPoll, *, since: int) -> bool:
        """Tell `watch` of `key` from now on; returns whether a wake-up came, or may have come, since then."""
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
        """Let everybody go, for good."""
        for watch in self._watches:
            watch.end()

    async def close(self) -> None:
        """Stop looking and listening."""
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
        while self._watches:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._owner.poll):
                    await self._look_now.wait()
            self._look_now.clear()
            if not self._by_key:
                continue
            keys = list(self._by_key)
            try:
                facts = await self._run(partial(self._facts, keys))
            except Exception as error:
                _log.warning("long polls could not look for news", topic=self.name, kind=type(error).__name__)
                continue
            self._owner.metrics.looks.labels(self.name).inc()
            self._distribute(facts)

    def _facts(self, keys: Sequence[str], connection: Connection) -> Mapping[str, Any]:
        return self._read_facts(connection, keys)

    def _distribute(self, facts: Mapping[str, Any]) -> None:
        for key, fact in facts.items():
            for watch in self._by_key.get(key, ()):
                if fact is None or watch.keys[key](fact):
                    watch.notice(key)

    async def _raise_flag(self, wakeups: WakeSource) -> None:
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
    """The topics of one gateway. `poll` is the time between fallback looks, seconds."""

    def __init__(self, *, wakeups: WakeSource | None, poll: float, metrics: GatewayMetrics) -> None:
        self.wakeups, self.poll, self.metrics = wakeups, poll, metrics
        self.stopping = False
        self._topics: dict[str, PollTopic] = {}

    def topic(self, name: str, read_facts: FactReader, *, run: Run) -> PollTopic:
        """The topic of that name; the first call says how it looks for news, and who runs that look."""
        if name not in self._topics:
            self._topics[name] = PollTopic(name, read_facts, run=run, owner=self)
        return self._topics[name]

    def end(self) -> None:
        """Let every long poll return at once, also later ones."""
        self.stopping = True
        for topic in self._topics.values():
            topic.end()

    async def close(self) -> None:
        """Stop everything that was started for long polls."""
        self.end()
        for topic in self._topics.values():
            await topic.close()
        self._topics.clear()

    def subscribe(self, topic: str, woken: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Call `woken` on the event loop for each wake-up; what comes back ends that."""
        if self.wakeups is None:
            return lambda: None
        loop = asyncio.get_running_loop()

        def pass_on(keys: frozenset[str]) -> None:
            with suppress(RuntimeError):  # the loop was closed while the wake-up was under way
                loop.call_soon_threadsafe(woken, keys)

        return self.wakeups.subscribe(topic, pass_on)


def _entered(wakeups: WakeSource, topic: str) -> AbstractContextManager[None]:
    held = wakeups.idle(topic)
    held.__enter__()
    return held


# Watches over the calls that are held: looks for news of their bots, and keeps their sessions alive.
#
# A bot whose call is held cannot call, so the gateway renews its session on its behalf, for as long as the bot is
# connected. Both cost a statement for many bots, whatever their number.


#: Rounds in the life of a session. One that was missed because its bot's row was locked has two more chances.
ROUNDS = 6
#: Sessions renewed in one transaction.
CHUNK = 2000

# What could be news to a bot whose call is held: a lease it does not know, a stop, a drain, the end of its session.
# A bot that holds no lease has none to look at, which spares a second look for nearly all.
BOT_NEWS = text(f"""
SELECT told.id, b.epoch, b.draining, b.lively
FROM unnest(CAST(:ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:draining AS boolean[]))
    AS told (id, epoch, draining)
LEFT JOIN LATERAL (
    SELECT epoch, draining, status = 'gone' OR (held > 0 AND EXISTS (
        SELECT FROM {newest_leases("n.id", "n.held", columns="state")} l
        WHERE state IN ('pending', 'cancelling'))) AS lively
    FROM {newest_version("bots", "id", "told.id")} n) b ON true
WHERE b.lively IS NOT FALSE OR b.epoch <> told.epoch OR b.draining IS DISTINCT FROM told.draining
""")


@dataclass(frozen=True)
class BotNews:
    """What a look tells of one bot."""

    epoch: int
    draining: bool
    news: bool


@dataclass(eq=False, slots=True)
class KnownState:
    """What the bot of a held call knows. `draining` None = as the first look says."""

    bot_id: int
    epoch: int
    draining: bool | None

    def news(self, fact: BotNews | None) -> bool:
        """Whether this is news to the bot."""
        if fact is None:
            return True
        if self.draining is None:
            self.draining = fact.draining
        return fact.news or fact.epoch != self.epoch or fact.draining != self.draining


class HeldSessions:
    """Everything that is held. Belongs to the event loop's thread, except for `look`."""

    def __init__(self, database: Database, workers: WorkerPool, *, ttl: float, metrics: GatewayMetrics) -> None:
        self._database, self._worker_pool, self._ttl, self._metrics = database, workers, ttl, metrics
        self._held: dict[KnownState, None] = {}
        self._keeper: asyncio.Task[None] | None = None

    @contextmanager
    def renewing(self, told: KnownState) -> Iterator[None]:
        """Keep this bot's session alive until the block ends."""
        self._held[told] = None
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            del self._held[told]

    def read_facts(self, connection: Connection, _: Sequence[str]) -> Mapping[str, BotNews | None]:
        """Facts of the bots whose calls are held that are, or may be, news to them; None of a bot that is no more."""
        held = list(self._held)
        parameters = {
            "ids": _array(str(told.bot_id) for told in held),
            "epochs": _array(str(told.epoch) for told in held),
            "draining": _array(_WORDS[told.draining] for told in held),
        }
        return {
            str(row.id): None if row.epoch is None else BotNews(row.epoch, row.draining, row.lively)
            for row in connection.execute(BOT_NEWS, parameters)
        }

    def close(self) -> None:
        """Renew nothing any more."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        while self._held:
            await asyncio.sleep(self._ttl / ROUNDS)
            sessions = sorted({(told.bot_id, told.epoch) for told in self._held})
            try:
                for start in range(0, len(sessions), CHUNK):
                    await self._renew(sessions[start : start + CHUNK])
            except Exception as error:
                _log.warning("sessions of waiting bots could not be renewed", kind=type(error).__name__)

    async def _renew(self, sessions: Sequence[tuple[int, int]]) -> None:
        def work(connection: Connection) -> int:
            return renew(connection, sessions, ttl=self._ttl)

        self._metrics.renewals.inc(await self._worker_pool.run_unbounded(lambda: self._database.run(work, urgent=True)))


_WORDS = {None: "NULL", False: "f", True: "t"}


def _array(words: Iterator[str]) -> str:
    """An array as PostgreSQL reads it: for 10,000 numbers that is far cheaper than a list of parameters."""
    return "{" + ",".join(words) + "}"
