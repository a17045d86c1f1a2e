"""Thresholds of Python's garbage collector, for the start of a process and for processes that live long."""

import atexit
import contextlib
import gc
import threading
from collections.abc import Generator

#: New objects after which the youngest generation is collected while a program starts. The imports of a gateway make
#: over 100,000 of them, and nearly all stay. With Python's threshold of 700, looking at them again and again takes an
#: eighth of the processor time of these imports; with this one the process needs no more memory.
STARTING = 100_000
_USUAL = gc.get_threshold()


def collect_rarely_at_start() -> None:
    """Collect garbage rarely from now on, until `infrequent_gc` or `collect_as_usual` takes over.

    The interpreter looks at all objects again when it ends, for a third of the processor time of a short command. They
    are left alone: the process ends, and destructors of reference cycles may run then or not.
    """
    gc.set_threshold(STARTING, *_USUAL[1:])
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Collect garbage as often as Python does by itself."""
    gc.set_threshold(*_USUAL)


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
