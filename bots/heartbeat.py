"""A bot's own deadline: its work must be dead before the server gives it away."""

import threading
from collections.abc import Callable

from schema import clock
from schema.clock import Monotonic


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
