"""Calls while they are settled: who may be let in, and what is known of each."""

import hmac
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from bots import reports
from bots.protocol import Sync, Work
from bots.sessions import digest
from schema.errors import Conflict
from schema.moves import Ended, Room
from schema.states import BotStatus


@dataclass(frozen=True)
class Asked:
    """A call that came when the monotonic clock showed `began`."""

    sync: Sync
    began: float


@dataclass(frozen=True)
class Waiting:
    """A sync without news: the answer may be held back for as long as the bot would wait, if its session is kept alive
    meanwhile, or until a wake-up for the bot arrives."""

    bot: str
    bot_id: int
    epoch: int
    seq: int
    began: float


Call = Asked | Waiting

#: Of so many calls that may fetch, one leaves the bot's room to jobs at gates while some wait.
YIELDING = 4
#: 2^32 over the golden ratio, by which multiples of it are spread most evenly (Knuth, TAOCP 3, 6.4).
GOLDEN = 2654435769


@dataclass
class Visit:
    """One call that is being settled, the `nth` of them, by a bot whose row is locked.

    `held`: live leases before it, `due`: after it; `ended`: what became of jobs that it has ended; `before`: seconds
    that had surely passed since the call was sent when the rest of the session was measured.
    """

    nth: int
    call: Call
    bot: Row[Any]
    held: list[Row[Any]] = field(default_factory=list)
    account: reports.Account = field(default_factory=reports.Account)
    ended: list[Ended] = field(default_factory=list)
    due: list[Row[Any]] = field(default_factory=list)
    before: float = 0.0
    remaining: float = 0.0
    room: Room = field(init=False)

    def __post_init__(self) -> None:
        self.room = Room(self.bot.capacity, self.bot.in_use, self.bot.held, self.bot.reserved)

    @property
    def sync(self) -> Sync | None:
        """What the bot says; a call that was held says nothing any more."""
        return self.call.sync if isinstance(self.call, Asked) else None

    @property
    def seq(self) -> int:
        """The number of the call in its session."""
        return self.call.sync.seq if isinstance(self.call, Asked) else self.call.seq

    @property
    def actor(self) -> str:
        """The bot, as events name it."""
        return f"bot:{self.bot.name}"

    @property
    def leaves(self) -> bool:
        """Whether the bot closes its session."""
        return self.sync is not None and self.sync.status == BotStatus.GONE.value

    @property
    def status(self) -> str:
        """How the bot is, by its own word; one that leaves is there until its session is closed."""
        return str(self.bot.status if self.sync is None or self.leaves else self.sync.status)

    @property
    def yields(self) -> bool:
        """Whether jobs wait at gates and this is one of those calls that leave the bot's room to them: assigners alone
        can give it to them. Spread evenly over the calls, whichever of them end something."""
        return bool(self.bot.gated) and (self.bot.id + self.seq) * GOLDEN % 2**32 < 2**32 // YIELDING

    @property
    def healthy(self) -> bool:
        """Whether the bot may be given work. A bot that is being closed is not let in."""
        return self.status == BotStatus.OK and not self.bot.draining

    def size(self) -> None:
        """Take the capacity that the bot says it has. One that says less than it uses keeps what it uses until that
        has ended."""
        said = None if self.sync is None else self.sync.capacity
        self.room.capacity = max(self.room.capacity if said is None else said, self.room.in_use)


def name(call: Call) -> str:
    """The bot whose call it is."""
    return call.sync.bot if isinstance(call, Asked) else call.bot


def ends_something(call: Call) -> bool:
    """Whether the bot says that something is over, and so may want more."""
    return isinstance(call, Asked) and any(report.state == "completed" for report in call.sync.leases)


def let_in(nth: int, call: Call, bot: Row[Any] | None) -> Visit:
    """The visit of a bot whose session is open and whose call is not older than what was answered. Raises Conflict."""
    if isinstance(call, Asked):
        bot = check_session(bot, epoch=call.sync.epoch, secret=call.sync.secret)
        late = call.sync.seq < bot.sync_seq
    else:
        bot = _check_epoch(bot, epoch=call.epoch)
        late = call.seq != bot.sync_seq
    if late:
        raise Conflict("stale_seq", "a later call of this session has been answered")
    return Visit(nth, call, bot)


def check_session(bot: Row[Any] | None, *, epoch: int, secret: str) -> Row[Any]:
    """The bot, if this is its open session. Raises Conflict."""
    bot = _check_epoch(bot, epoch=epoch)
    if not hmac.compare_digest(bot.session, digest(secret)):
        raise Conflict("session_over", "this session is over: open a new one")
    return bot


def _check_epoch(bot: Row[Any] | None, *, epoch: int) -> Row[Any]:
    if bot is None or bot.session is None or bot.closing:
        raise Conflict("session_over", "this session is over: open a new one")
    if bot.epoch != epoch:
        raise Conflict("session_superseded", "a newer session of this bot is open")
    return bot


def work(row: Row[Any]) -> Work:
    """A lease as its bot is told of it."""
    return Work(
        job=str(row.public_id),
        fence=row.fence,
        state=row.state,
        stop_reason=row.stop_reason,
        instance=row.instance,
        attempt=row.attempts,
        timeout=row.timeout_seconds,
        payload=None if row.payload is None else dict(row.payload),
    )
