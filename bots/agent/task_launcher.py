"""The launcher of a bot that serves an app: commands are calls of tasks, and run in warm child processes.

It does for the agent what the supervisors of commands do: it says `ready`, `started`, `exit` and `over`, and obeys the
letters T and K. As many children as the bot has units run one `def` task each; one child runs all `async def` tasks.
A child that ends takes the calls with it that it runs, and another one is started.
"""

import contextlib
import itertools
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

import structlog
from leasehold.errors import LeaseholdError
from leasehold.tasks import COMMAND

from bots.agent.launcher import Launcher
from bots.agent.run import READY_AFTER, ending
from bots.agent.warm_children import App, Call, WarmChild
from schema import clock

_log = structlog.get_logger("leasehold.agent")

#: Seconds until another child is started after one that could not import the app: doubled each time, up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
#: Seconds between two tries to send to a child that does not read.
_SEND_AGAIN = 0.05


class TaskLauncher(Launcher):
    """Runs calls of tasks in children that have imported the app. One thread serves all children and calls.

    most: how many children may run a `def` task each.
    """

    queues = True

    def __init__(self, guard: int, *, app: App, most: int, open_files: int, adopt: bool = False) -> None:
        super().__init__(guard, open_files=open_files, adopt=adopt)
        self._app, self._most = app, most
        self._sources = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._guarding = threading.Lock()
        self._new: list[Call] = []
        #: How many calls are not over, and when the alarm has to ring if there are any.
        self._held = 0
        self._deadline: float | None = None
        self._waiting: deque[Call] = deque()
        self._children: list[WarmChild] = []
        self._async: frozenset[str] = frozenset()
        #: How many children serve what; until one has imported the app, one is started.
        self._wanted = {"def": 1, "async": 0}
        self._allowed = self._closing = self._full = self._broken = False
        self._failures = 0
        self._start_at = 0.0
        self._name: str | None = None
        self._refusal: str | None = None
        self._decided = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._sources.register(self._woken, selectors.EVENT_READ, self._take_new)
        self._thread = threading.Thread(target=self._work, name="tasks", daemon=True)

    def open(self) -> str:
        """Start the first child and return the name of the app. Raises LeaseholdError if it cannot be imported."""
        self._thread.start()
        self._allow(True)
        self._decided.wait()
        if self._name is None:
            raise LeaseholdError(f"the app '{self._app.place}' cannot be used: {self._refusal}")
        return self._name

    def launch(self, output: int, stdin: int) -> socket.socket:
        """Return the control socket of a call, which waits for a child if none is free; see Launcher."""
        if self._broken:
            raise OSError("the agent failed, see its log")
        ours, theirs = socket.socketpair()
        call = Call(next(self._numbers), theirs, os.dup(output), os.dup(stdin))
        with self._guarding:
            self._new.append(call)
            self._held += 1
            if self._held == 1 and self._deadline is not None:
                super().arm(self._deadline)
        self._wake()
        return ours

    def arm(self, deadline: float) -> None:
        # An idle bot may wait for news until after the deadline. Children without a call may live on meanwhile.
        with self._guarding:
            self._deadline = deadline
            if self._held:
                super().arm(deadline)
        self._allow(True)

    def disarm(self) -> None:
        # The agent kills what is left of a session before it opens another; nothing may start meanwhile.
        self._allow(False)
        with self._guarding:
            self._deadline = None
            super().disarm()

    def close(self) -> None:
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        super().close()
        for child in self._children:
            child.close(self._app)
        self._children = []

    def _allow(self, allowed: bool) -> None:
        if self._allowed != allowed:
            self._allowed, self._start_at = allowed, 0.0
            self._wake()

    def _wake(self) -> None:
        # A full socket means that the thread has not read the earlier ones yet.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("the thread that serves the app failed; no task can start any more")
            self._broken = True
            for source in [key.fileobj for key in self._sources.get_map().values()]:
                if isinstance(source, socket.socket):
                    source.close()
        finally:
            self._decided.set()

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._sources.select(self._delay()):
                handler: Callable[[], None] = key.data
                # A handler before it may have closed this source.
                if key.fd in self._sources.get_map():
                    handler()
            self._full = False
            self._replace_silent()
            self._fill()
            self._assign()

    def _delay(self) -> float | None:
        """Return the seconds until there is something to do without a message; None = no such time."""
        now = clock.monotonic()
        instants = [child.begun + READY_AFTER for child in self._children if child.supervisor is None]
        if self._may_start:
            instants.append(self._start_at)
        if self._full:
            instants.append(now + _SEND_AGAIN)
        return max(0.0, min(instants) - now) if instants else None

    # Calls

    def _take_new(self) -> None:
        self._woken.recv(65_536)
        with self._guarding:
            new, self._new = self._new, []
        for call in new:
            self._sources.register(call.control, selectors.EVENT_READ, lambda call=call: self._hear(call))

    def _hear(self, call: Call) -> None:
        had = call.request is not None
        said = call.read()
        if said is None:
            if call.child is not None:
                self._kill(call.child, call)
            self._forget(call)
        elif not had and call.request is not None:
            if call.request["command"][0] != COMMAND or len(call.request["command"]) != 3:
                call.say(unable=f"this bot runs nothing but tasks of the app '{self._name}'", errno=None)
                self._forget(call)
            else:
                self._waiting.append(call)
        elif call.child is not None and b"K" in said:
            self._kill(call.child, call)
        elif call.child is not None and b"T" in said:
            if call.child.serves == "async":
                call.must_cancel = True
            else:
                call.child.terminate()

    def _kill(self, child: WarmChild, call: Call) -> None:
        child.killed_for = child.killed_for or call
        child.ask_to_die()

    def _assign(self) -> None:
        """Hand waiting calls to children that are free, and tell children of cancelled calls."""
        for child in self._children:
            for call in child.calls.values():
                if call.must_cancel:
                    call.must_cancel = not child.send({"cancel": call.number})
                    self._full = self._full or call.must_cancel
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            free = self._free_child(call)
            message = {"run": call.number, "stopped_before": free is not None and free.stopped_before}
            if free is None or not free.send(message, call.descriptors()):
                self._full = self._full or free is not None
                self._waiting.append(call)
                continue
            call.release()
            call.child = free
            free.stopped_before = False
            free.calls[call.number] = call
            call.say(ready=free.supervisor)
            call.say(started=free.pid, at=clock.monotonic())

    def _free_child(self, call: Call) -> WarmChild | None:
        assert call.request is not None
        serves = "async" if call.request["command"][2] in self._async or not self._wanted["def"] else "def"
        for child in self._children:
            has_room = serves == "async" or not child.calls
            if child.serves == serves and has_room and not child.over and child.killed_for is None:
                return child
        return None

    def _end(self, call: Call, code: int) -> None:
        call.say(exit=code, at=clock.monotonic())
        call.say(over=True, expired=False)
        self._forget(call)

    def _forget(self, call: Call) -> None:
        """Forget a call that is over, or that the agent has given up."""
        self._sources.unregister(call.control)
        call.control.close()
        call.release()
        if call in self._waiting:
            self._waiting.remove(call)
        if call.child is not None:
            call.child.calls.pop(call.number, None)
        with self._guarding:
            self._held -= 1
            if not self._held:
                super().disarm()

    # Children

    @property
    def _may_start(self) -> bool:
        missing = sum(self._wanted.values()) > len(self._children)
        return missing and self._allowed and self._refusal is None

    def _fill(self) -> None:
        """Start the children that are missing."""
        while self._may_start and clock.monotonic() >= self._start_at:
            try:
                child = WarmChild.start(self._app, super().launch)
            except (OSError, LeaseholdError) as error:
                self._failed(f"its process cannot be started: {error}")
                return
            self._children.append(child)
            self._sources.register(child.control, selectors.EVENT_READ, lambda child=child: self._listen(child))
            self._sources.register(child.channel, selectors.EVENT_READ, lambda child=child: self._read(child))

    def _read(self, child: WarmChild) -> None:
        match child.read():
            case None:
                self._sources.unregister(child.channel)
            case {"ready": str(name), "async": list(side_by_side), "def": bool(has_plain)}:
                self._failures, self._async = 0, frozenset(side_by_side)
                self._wanted = {"def": self._most if has_plain else 0, "async": 1 if side_by_side else 0}
                serving = sum(each.serves == "def" for each in self._children)
                child.serves = "def" if serving < self._wanted["def"] else "async"
                child.send({"serve": child.serves})
                self._name = self._name or name
                self._decided.set()
            case {"failed": str(reason)}:
                child.failure = reason
            case {"over": int(number), "code": int(code)}:
                if number in child.calls:
                    self._end(child.calls[number], code)

    def _listen(self, child: WarmChild) -> None:
        child.listen()
        if not child.over:
            return
        # What it has said of calls that ended before it ended itself.
        while child.channel in self._sources.get_map() and not child.lost:
            self._read(child)
        self._remove(child)

    def _remove(self, child: WarmChild) -> None:
        for source in (child.control, child.channel):
            if source in self._sources.get_map():
                self._sources.unregister(source)
        self._children.remove(child)
        alone = len(child.calls) == 1
        for call in list(child.calls.values()):
            code = child.exit_code
            if child.expired:
                call.say(over=True, expired=True)
            elif child.lost or code is None:
                pass  # its end without a word means that the supervisor is gone
            elif code != 0 and (call is child.killed_for or (child.killed_for is None and alone)):
                call.say(exit=code, at=clock.monotonic())
                call.say(over=True, expired=False)
            else:
                beside = "" if alone else "; other tasks ran beside it"
                call.say(broken=f"the process of the task ended: {ending(code) if code else 'exit code 0'}{beside}")
            self._forget(call)
        child.close(self._app)
        if child.expired:
            # The guardian starts nothing until its alarm is moved on.
            self._allowed = False
        elif child.supervisor is None and child.failure is None and self._name is not None:
            # The same, or the guardian is gone and the next message makes another one.
            self._start_at = clock.monotonic() + _FIRST_PAUSE
        elif child.serves is None:
            ended = "the guardian is gone" if child.exit_code is None else ending(child.exit_code)
            self._failed(child.failure or f"its process ended: {ended}")
        else:
            _log.warning("a process of the app ended", app=self._name, process=child.pid, exit_code=child.exit_code)

    def _failed(self, reason: str) -> None:
        """Note that a child could not be started or could not import the app; later ones start after a pause."""
        if self._name is None:
            self._refusal = reason
            self._decided.set()
            return
        pause = min(_LAST_PAUSE, _FIRST_PAUSE * 2**self._failures)
        self._failures += 1
        self._start_at = clock.monotonic() + pause
        _log.error("the app cannot be started again", app=self._name, reason=reason, seconds=pause)
        if not self._children:
            for call in list(self._waiting):
                call.say(ready=self.pid)
                call.say(broken=f"the app '{self._name}' cannot be started: {reason}")
                self._forget(call)

    def _replace_silent(self) -> None:
        """Give up children whose supervisor does not come, with the guardian that should have started it."""
        now = clock.monotonic()
        for child in list(self._children):
            if child.supervisor is None and now >= child.begun + READY_AFTER:
                child.over = child.lost = True
                self.replace(self.pid)
                self._remove(child)
