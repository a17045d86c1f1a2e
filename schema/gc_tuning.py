"""Python's search for garbage in cycles, made as seldom as a process of ours can afford."""

import contextlib
import gc
import threading
from collections.abc import Generator


@contextlib.contextmanager
def infrequent_gc(new: int, old: int, oldest: int) -> Generator[None, None, None]:
    """Search after `new` new objects, among older ones after `old` times as many, among the oldest at most after
    `oldest` times as many as that, and never in what is there already.

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
