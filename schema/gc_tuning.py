"""Thresholds of Python's garbage collector for long-lived processes."""

import contextlib
import gc
import threading
from collections.abc import Generator


@contextlib.contextmanager
def infrequent_gc(new: int, old: int, oldest: int) -> Generator[None, None, None]:
    """Collect garbage rarely inside the block, and never among the objects that exist at its start.

    new: new objects after which the youngest generation is collected.
    old: collections of the youngest generation after which the middle one is collected.
    oldest: collections of the middle generation after which the oldest is collected, at the earliest.
    For the main thread of a process that does nothing else; in any other thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(new, old, oldest)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
