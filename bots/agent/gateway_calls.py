"""Calls to the gateway that outlast its absence without holding the agent up."""

import threading
from collections.abc import Callable
from random import Random

import structlog

from bots.client.transport import Record, Transport
from schema import clock
from schema.clock import Monotonic
from schema.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, Unauthorised

_log = structlog.get_logger("leasehold.agent")

#: Seconds between tries: doubled from the first to the longest, times 0.5 to 1 by chance.
_PAUSE_FIRST, _PAUSE_LONGEST = 0.1, 2.0


class Unanswered(LeaseholdError):
    """A held call came to nothing: whether the session has been kept alive meanwhile is not known."""


class GatewayCaller:
    """Makes calls that are repeated until they are answered, and that can be given up while they hang.

    `bell` wakes the calling thread to look at `check`; an answer rings it too.
    """

    def __init__(self, transport: Transport, waker: threading.Event, chance: Random) -> None:
        self._transport, self._waker, self._chance = transport, waker, chance

    def call(self, path: str, body: Record, *, check: Callable[[], None], held: float = 0.0) -> Record:
        """Repeat the same body until it is answered; `check` may raise to stop that, also in the middle of a call.

        Raises the errors of Transport that repeating does not cure: BadInput, Unauthorised, Forbidden, NotFound,
        Conflict. A call that may be `held`, seconds, is not repeated: raises Unanswered.
        """
        failures = 0
        while True:
            attempt = _Attempt(self._transport, path, body, held=held, waker=self._waker)
            self._until(attempt.done, check, None)
            if attempt.answer is not None:
                return attempt.answer
            match attempt.error:
                case BadInput() | Unauthorised() | Forbidden() | NotFound() | Conflict():
                    raise attempt.error
                case error:
                    if failures == 0:
                        _log.warning("the gateway does not answer", path=path, reason=str(error))
                    if held > 0:
                        raise Unanswered(str(error))
            failures += 1
            pause = min(_PAUSE_LONGEST, _PAUSE_FIRST * 2.0 ** min(failures - 1, 10)) * self._chance.uniform(0.5, 1.0)
            self._until(threading.Event(), check, clock.monotonic() + pause)

    def once(self, path: str, body: Record) -> None:
        """One call in this thread, not repeated. Raises LeaseholdError."""
        self._transport.call("POST", path, body=body)

    def _until(self, event: threading.Event, check: Callable[[], None], limit: float | None) -> None:
        while True:
            self._waker.clear()
            if event.is_set():
                return
            check()
            left = 1.0 if limit is None else limit - clock.monotonic()
            if left <= 0:
                return
            clock.wait(self._waker, min(left, 1.0))


class _Attempt:
    """One request in a thread of its own."""

    def __init__(self, transport: Transport, path: str, body: Record, *, held: float, waker: threading.Event) -> None:
        self.done = threading.Event()
        self.answer: Record | None = None
        self.error: LeaseholdError | None = None
        self._transport, self._path, self._body, self._held, self._waker = transport, path, body, held, waker
        threading.Thread(target=self._ask, name="call", daemon=True).start()

    def _ask(self) -> None:
        try:
            self.answer = self._transport.call("POST", self._path, body=self._body, held=self._held)
        except LeaseholdError as error:
            self.error = error
        except Exception as error:
            # A transport that was closed because nobody waits for this any longer, or an answer that is no HTTP.
            self.error = LeaseholdError(f"the call failed: {type(error).__name__}")
        finally:
            self.done.set()
            self._waker.set()


# A bot's own deadline: its work must be dead before the server gives it away.


class Heartbeat:
    """Watches one session on the bot's own monotonic clock, in a thread, so that a hanging call cannot delay it.

    margin: seconds before the session expires at which `on_lost` is called, once, from the watching thread. After
    that no beat revives the session.
    """

    def __init__(self, margin: float, *, on_lost: Callable[[], None], now: Monotonic = clock.monotonic) -> None:
        self._margin, self._on_lost, self._now = margin, on_lost, now
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._lost = False
        self._stopped = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    @property
    def lost(self) -> bool:
        """Whether the deadline has passed, also if the watching thread has not noticed yet."""
        with self._lock:
            return self._check()

    def beat(self, sent_at: float, *, expires_in: float) -> bool:
        """The server answered a call sent at `sent_at`: the session lives for `expires_in` seconds from then. False
        if the answer came too late."""
        with self._lock:
            if self._check():
                return False
            self._deadline = sent_at + expires_in - self._margin
            late = self._check()
        self._changed.set()
        return not late

    def rest(self) -> None:
        """Nothing runs, and the server keeps the session while it holds our call: no deadline until the next beat. A
        session that is lost already stays so."""
        with self._lock:
            if not self._check():
                self._deadline = None
        self._changed.set()

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; idempotent."""
        self._stopped = True
        self._changed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _check(self) -> bool:
        if self._deadline is not None and self._now() >= self._deadline:
            self._lost = True
        return self._lost

    def _watch(self) -> None:
        while not self._stopped:
            self._changed.clear()
            with self._lock:
                lost = self._check()
                left = 3600.0 if self._deadline is None else self._deadline - self._now()
            if lost:
                self._on_lost()
                return
            clock.wait(self._changed, left)
