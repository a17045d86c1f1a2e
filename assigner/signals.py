"""Signals as something to wait for: a handler interrupts code that may hold any lock, a loop that reads holds none."""

import os
import selectors
import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Signals:
    """Collects the given signals for as long as it is entered, in the main thread only."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}
        self._read = self._write = self._fd_before = -1

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """The next signal, waiting at most `seconds` (None = for ever); None if none came."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            if not selector.select(None if seconds is None else max(0.0, seconds)):
                return None
        return signal.Signals(os.read(self._read, 1)[0])

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in self._numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._read)
        os.close(self._write)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """What matters is the byte that the interpreter has already written."""
