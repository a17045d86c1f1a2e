"""The agent's calls to the gateway, repeated until they are answered, and the deadline of its session."""

import threading
from collections.abc import Callable
from random import Random

import structlog
from leasehold.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, NotReady, Unauthorised
from leasehold.transport import FIRST_CONTACT, NoGateway, Record, Transport

from schema import clock
from schema.clock import Monotonic

_log = structlog.get_logger("leasehold.agent")

#: Seconds between tries: a random part of a pause that doubles from the first to the longest. It comes on top of what a
#: busy gateway asks for, up to the longest, so that the agents of a pool do not come back together.
_PAUSE_FIRST, _PAUSE_LONGEST = 0.1, 2.0


class Unanswered(LeaseholdError):
    """A held call failed. The agent cannot know whether the server kept the session alive meanwhile."""


class GatewayCaller:
    """Repeats calls until the gateway answers them, and can abandon a call that hangs.

    `waker` wakes the calling thread so that it runs `check`. An answer sets `waker` too.
    """

    def __init__(self, transport: Transport, waker: threading.Event, chance: Random) -> None:
        self._transport, self._waker, self._chance = transport, waker, chance
        #: Calls that nobody has answered since the last answer that was no refusal.
        self.unanswered = 0
        #: When the last request was sent that was answered, on the agent's monotonic clock.
        self.sent_at = clock.monotonic()
        self._abandoned: _Attempt | None = None
        self._reached = False

    @property
    def is_waiting(self) -> bool:
        """True while the last call that `check` has stopped still waits for its answer, which nobody will read."""
        return self._abandoned is not None and not self._abandoned.done.is_set()

    def call(
        self,
        path: str,
        body: Record | bytes,
        *,
        check: Callable[[], None],
        held: float = 0.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Record:
        """Send the same body until the gateway answers; `check` may raise at any time to stop that.

        meanwhile: what this thread does while the gateway works; it is done again with each repetition.
        Raises the errors of Transport that another try would meet again: BadInput, Unauthorised, Forbidden, NotFound,
        Conflict; and NoGateway where none has answered yet. A call that the gateway may hold for `held` seconds is not
        repeated: raises Unanswered.
        """
        failures, began = 0, clock.monotonic()
        while True:
            sent_at = clock.monotonic()
            attempt = _Attempt(self._transport, path, body, held=held, waker=self._waker)
            meanwhile()
            try:
                self._until(attempt.done, check, None)
            except BaseException:
                self._abandoned = attempt
                raise
            if attempt.answer is not None:
                self.unanswered, self.sent_at, self._reached = 0, sent_at, True
                return attempt.answer
            match attempt.error:
                case NoGateway() if not self._reached and clock.monotonic() >= began + FIRST_CONTACT:
                    raise attempt.error
                case BadInput() | Unauthorised() | Forbidden() | NotFound() | Conflict():
                    raise attempt.error
                case error:
                    self.unanswered += 1
                    if failures == 0:
                        _log.warning("the gateway does not answer", path=path, reason=str(error))
                    if held > 0:
                        raise Unanswered(str(error))
            failures += 1
            pause = self._chance.uniform(0.0, min(_PAUSE_LONGEST, _PAUSE_FIRST * 2.0 ** min(failures, 10)))
            if isinstance(error, NotReady) and error.retry_after is not None:
                pause += min(_PAUSE_LONGEST, error.retry_after)
            self._until(threading.Event(), check, clock.monotonic() + pause)

    def once(self, path: str, body: Record) -> Record:
        """Make one call in this thread, without repetition. Raises LeaseholdError."""
        return self._transport.call("POST", path, body=body)

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
    """One request in a thread of its own, if there can be one."""

    def __init__(
        self, transport: Transport, path: str, body: Record | bytes, *, held: float, waker: threading.Event
    ) -> None:
        self.done = threading.Event()
        self.answer: Record | None = None
        self.error: LeaseholdError | None = None
        self._transport, self._path, self._body, self._held, self._waker = transport, path, body, held, waker
        try:
            threading.Thread(target=self._ask, name="call", daemon=True).start()
        except RuntimeError:
            # No thread is left, as where a command forks without end. This one makes the call, and cannot give it up,
            # because the session and all other commands would end without it.
            self._ask()

    def _ask(self) -> None:
        try:
            self.answer = self._transport.call("POST", self._path, body=self._body, held=self._held)
        except LeaseholdError as error:
            self.error = error
        except Exception as error:
            # The session ended and closed the transport, or the answer is not HTTP.
            self.error = LeaseholdError(f"the call failed: {type(error).__name__}")
        finally:
            self.done.set()
            self._waker.set()


# The deadline of the session: the bot's commands must be dead before the server gives its jobs to other bots.


class Heartbeat:
    """Watches the deadline of one session on the bot's own monotonic clock.

    margin: seconds between the deadline and the end of the session. At the deadline the watching thread calls
    `on_lost` once. After that no beat revives the session.

    The watch has a thread of its own so that a hanging call cannot delay it.
    """

    def __init__(self, margin: float, *, on_lost: Callable[[], None], now: Monotonic = clock.monotonic) -> None:
        self._margin, self._on_lost, self._now = margin, on_lost, now
        self._deadline: float | None = None
        #: Seconds after the deadline at which it was noticed: large if this machine or process stood still.
        self.late = 0.0
        self._lock = threading.Lock()
        self._lost = False
        self._stopped = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    @property
    def lost(self) -> bool:
        """True if the deadline has passed, even if the watching thread has not noticed yet."""
        with self._lock:
            return self._check()

    def beat(self, sent_at: float, *, expires_in: float) -> bool:
        """Move the deadline after an answer: the session lives for `expires_in` seconds from `sent_at`.

        `sent_at` is when the call was sent. Returns False if the answer came after the old or the new deadline.
        """
        with self._lock:
            if self._check():
                return False
            self._deadline = sent_at + expires_in - self._margin
            late = self._check()
        self._changed.set()
        return not late

    def rest(self) -> None:
        """Suspend the deadline until the next beat; a session that is already lost stays lost.

        For a bot without commands, during a held call: the server keeps the session alive while it holds the call.
        """
        with self._lock:
            if not self._check():
                self._deadline = None
        self._changed.set()

    def start(self) -> None:
        """Start the watching thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; may be called more than once."""
        self._stopped = True
        self._changed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _check(self) -> bool:
        if not self._lost and self._deadline is not None and self._now() >= self._deadline:
            self._lost = True
            self.late = self._now() - self._deadline
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
