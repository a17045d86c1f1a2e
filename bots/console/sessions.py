"""The sessions of the people who are logged in to the console, with their tokens, in the memory of its process."""

import hashlib
import random
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, tzinfo

from leasehold.client import Client
from leasehold.errors import Forbidden, LeaseholdError, Unauthorised

#: Seconds after which a session ends that nobody uses, and after which every session ends.
IDLE, LONGEST = 1800.0, 12 * 3600.0
#: The most sessions at once, of all tokens and of one. One more of a token ends that one of its own sessions which was
#: not used for the longest time, and never one of another token.
MAX_SESSIONS, MAX_SESSIONS_OF_TOKEN = 200, 20
#: The most failed log-ins of one address, and the seconds for which each counts. Each log-in asks the gateway.
MAX_FAILURES, FAILURES_WITHIN = 10, 60.0
#: Bytes of chance in the id of a session.
ID_BYTES = 32
#: Seconds for one call to the gateway, and for repeating a call that the gateway did not answer.
TIMEOUT, PATIENCE = 10.0, 2.0


#: Colours of the pages: as the browser's system has them, or always one of the two.
THEMES = ("system", "light", "dark")


class TooManySessions(LeaseholdError):
    """There are as many sessions as there may be, and none of them is of the token that is to have one more."""


class SessionOver(LeaseholdError):
    """There is no such session: it never was, has expired, or was ended by a log-out."""


@dataclass
class Session:
    """A person who is logged in. Times are seconds of the monotonic clock.

    owner: a digest of the token. is_operator: the token's kind is operator, not submitter. theme: one of `THEMES`.
    zone: of the times on charts, which the browser tells.
    """

    client: Client
    owner: str
    is_operator: bool
    opened: float
    used: float
    theme: str = THEMES[0]
    zone: tzinfo = UTC
    id: str = field(default_factory=lambda: secrets.token_urlsafe(ID_BYTES), repr=False)


class Sessions:
    """Opens, finds and ends sessions. Only the server's event loop uses it.

    url: the gateway. now: the monotonic clock. on_close: is called with the id of each session that ends while the
    console runs.
    """

    def __init__(self, url: str, *, now: Callable[[], float]) -> None:
        self.url, self._now = url, now
        self.on_close: Callable[[str], None] = lambda _: None
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: Client, token: str, *, is_operator: bool) -> Session:
        """Open a session for a token that the gateway has accepted, with an id that nobody can guess.

        Raises TooManySessions.
        """
        self._expire()
        owner = _digest(token)
        own = [session for session in self._sessions.values() if session.owner == owner]
        if len(own) >= MAX_SESSIONS_OF_TOKEN or (own and len(self._sessions) >= MAX_SESSIONS):
            self.close(min(own, key=lambda each: each.used).id)
        if len(self._sessions) >= MAX_SESSIONS:
            raise TooManySessions("too many people are logged in")
        at = self._now()
        session = Session(client, owner, is_operator, opened=at, used=at)
        self._sessions[_digest(session.id)] = session
        return session

    def find(self, id: str | None, *, use: bool = True) -> Session:
        """Return the session with this id; `use`: it counts as used now. Raises SessionOver."""
        self._expire()
        session = self._sessions.get(_digest(id or ""))
        if session is None:
            raise SessionOver("you are not logged in")
        if use:
            session.used = self._now()
        return session

    def theme(self, id: str | None) -> str:
        """Return the colours that a session has chosen; without a session those of the system."""
        try:
            return self.find(id, use=False).theme
        except SessionOver:
            return THEMES[0]

    def close(self, id: str | None) -> None:
        """End a session, if there is one with this id, and forget its token."""
        session = self._sessions.pop(_digest(id or ""), None)
        if session is not None:
            session.client.close()
            self.on_close(session.id)

    def close_all(self) -> None:
        """Forget every session and its token, when the console has stopped."""
        for session in self._sessions.values():
            session.client.close()
        self._sessions.clear()

    def _expire(self) -> None:
        now = self._now()
        for session in list(self._sessions.values()):
            if now - session.used >= IDLE or now - session.opened >= LONGEST:
                self.close(session.id)


def _digest(id: str) -> str:
    """The key under which a session is kept: how long a look-up takes tells nothing of the id."""
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()


class Failures:
    """Log-ins that have failed lately, by the address that they came from. now: the monotonic clock."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        self._now = now
        self._times: dict[str, deque[float]] = {}

    def too_many(self, address: str) -> bool:
        """True if this address has had `MAX_FAILURES` failed log-ins lately, and so has to wait."""
        self._forget()
        return len(self._times.get(address, ())) >= MAX_FAILURES

    def add(self, address: str) -> None:
        """Count a log-in from this address as failed.

        It counts while the gateway is asked too, so that many at once are limited.
        """
        self._times.setdefault(address, deque()).append(self._now())

    def take_back(self, address: str) -> None:
        """Count one log-in from this address less: it has not failed."""
        times = self._times.get(address)
        if times is not None:
            times.pop()
            if not times:
                del self._times[address]

    def _forget(self) -> None:
        since = self._now() - FAILURES_WITHIN
        self._times = {address: times for address, times in self._times.items() if times[-1] > since}
        for times in self._times.values():
            while times[0] <= since:
                times.popleft()


def admitted(url: str, token: str) -> tuple[Client, bool]:
    """Ask the gateway who has this token; return a client for it, and whether it is an operator's.

    Raises Unauthorised for no token of this pool, Forbidden for a bot's, and other errors if the gateway fails.
    """
    if not token or not token.isascii() or not token.isprintable():
        raise Unauthorised("the text is not a token")
    client = Client(url, token, chance=random.SystemRandom(), timeout=TIMEOUT, patience=PATIENCE)
    try:
        client.status()
        try:
            client.call("GET", "/v1/limits")
        except Forbidden:
            return client, False
        return client, True
    except BaseException:
        client.close()
        raise
