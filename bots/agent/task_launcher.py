"""The launcher of a bot that serves an app: commands are calls of tasks, and run in warm child processes.

As many children as the bot has units run one `def` task each; one child runs all `async def` tasks. A child that ends
takes the runs with it that it has, and another one is started. Runs for which there is no room wait, because a bot
that runs short tasks holds some leases in advance (`Lookahead`).
"""

import contextlib
import itertools
import json
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import structlog
from leasehold import wire
from leasehold.errors import LeaseholdError

from bots.agent.capacity import Lookahead
from bots.agent.guardian import kill
from bots.agent.launcher import Launcher
from bots.agent.run import READY_AFTER, STUCK_AFTER, Assignment, AttemptRun, RunContext, describe_exit
from bots.agent.warm_children import App, Queue, TaskRun, WarmChild
from bots.protocol import Outcome
from schema import clock

_log = structlog.get_logger("leasehold.agent")

#: Seconds until another child is started after one that could not import the app: doubled each time, up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
#: Seconds between two tries to send to a child that does not read.
_SEND_AGAIN = 0.05
#: Seconds for which a lease waits at most while all units are in use.
GIVE_BACK_AFTER = 1.0
#: The outcome of a run that the launcher could not look after.
FAILED = Outcome(verdict="error", reason="the agent failed, see its log")


class TaskLauncher(Launcher):
    """Runs calls of tasks in children that have imported the app. One thread serves all children and runs.

    most: how many children may run a `def` task each.
    """

    def __init__(self, guard: int, *, app: App, most: int, open_files: int, adopt: bool = False) -> None:
        super().__init__(guard, open_files=open_files, adopt=adopt)
        self._app, self._most = app, most
        #: The units that may be in use at once.
        self.limit = most
        self._lookahead = Lookahead()
        self._sources = selectors.DefaultSelector()
        self._numbers = itertools.count(1)
        self._guarding = threading.Lock()
        self._new: list[TaskRun] = []
        self._to_stop: list[TaskRun] = []
        #: How many runs are not over, and when the alarm has to ring if there are any.
        self._held = 0
        self._deadline: float | None = None
        self._waiting: deque[TaskRun] = deque()
        self._running: set[TaskRun] = set()
        self._in_use = 0
        #: Running ones with a timeout, or that have to stop.
        self._timed: set[TaskRun] = set()
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

    def run(
        self, assignment: Assignment, place: RunContext, *, notify: Callable[[], None], after: AttemptRun | None
    ) -> TaskRun:
        """Return a run that waits here for a child, once it is started and the run `after` it is over."""
        queue = Queue(put=self._put, heed=self._heed)
        return TaskRun(assignment, place, queue=queue, notify=notify, after=after)

    @property
    def busy(self) -> bool:
        """True if runs wait, so that the end of one does not leave a child idle."""
        return bool(self._waiting)

    @property
    def ahead(self) -> int:
        """The units that the bot should announce beyond its limit."""
        return self._lookahead.units(self.limit)

    def arm(self, deadline: float) -> None:
        # An idle bot may wait for news until after the deadline. Children without a run may live on meanwhile.
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
            self._fail()
        finally:
            self._decided.set()

    def _fail(self) -> None:
        """End everything after a failure of the launcher itself."""
        for child in self._children:
            # Its supervisor kills it.
            child.control.close()
            child.channel.close()
        with self._guarding:
            self._broken = True
            left = [*self._waiting, *self._running, *self._new]
        for run in left:
            run.refuse(FAILED)

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._sources.select(self._delay()):
                handler: Callable[[], None] = key.data
                # A handler before it may have closed this source.
                if key.fd in self._sources.get_map():
                    handler()
            self._full = False
            for run in list(self._timed):
                if run in self._timed:
                    self._press(run)
            self._replace_silent()
            self._fill()
            self._assign()

    def _delay(self) -> float | None:
        """Return the seconds until there is something to do without a message; None = no such time."""
        now = clock.monotonic()
        instants = [child.begun + READY_AFTER for child in self._children if child.supervisor is None]
        instants += [due for run in self._timed if (due := run.due()) is not None]
        if self._may_start:
            instants.append(self._start_at)
        if self._full:
            instants.append(now + _SEND_AGAIN)
        if self._stuck:
            instants.append(self._waiting[0].put_at + GIVE_BACK_AFTER)
        return max(0.0, min(instants) - now) if instants else None

    # Runs

    def _put(self, run: TaskRun) -> None:
        run.put_at = clock.monotonic()
        with self._guarding:
            if not self._broken:
                self._new.append(run)
                self._held += 1
                if self._held == 1 and self._deadline is not None:
                    super().arm(self._deadline)
                # The first new run has woken the thread, which takes all of them.
                if len(self._new) == 1:
                    self._wake()
                return
        run.refuse(FAILED)

    def _heed(self, run: TaskRun) -> None:
        with self._guarding:
            self._to_stop.append(run)
        self._wake()

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(65_536)
        with self._guarding:
            new, self._new = self._new, []
            to_stop, self._to_stop = self._to_stop, []
        for run in new:
            run.number = next(self._numbers)
            if (outcome := run.check(self._name)) is not None:
                self._forget()
                run.refuse(outcome)
            else:
                self._waiting.append(run)
        for run in to_stop:
            if run in self._running:
                self._timed.add(run)
            elif run in self._waiting and run.end_before_start():
                self._waiting.remove(run)
                self._forget()

    def _press(self, run: TaskRun) -> None:
        """Do what is due to end a run."""
        child = run.child
        assert child is not None
        match run.step():
            case "T" if child.serves == "async":
                run.must_cancel = True
            case "T":
                child.terminate()
            case "K":
                child.killed_for = child.killed_for or run
                child.ask_to_die()
            case "give up":
                _log.error("a process tree did not die", job=run.assignment.job, fence=run.assignment.fence)
                if child.supervisor is not None:
                    kill([child.supervisor], signal.SIGKILL)
                child.over = child.lost = True
                self._remove(child)

    def _assign(self) -> None:
        """Hand waiting runs to children that are free, and tell children of cancelled ones."""
        for run in self._timed:
            if run.must_cancel and run.child is not None:
                run.must_cancel = not run.child.send(json.dumps({"cancel": run.number}).encode())
                self._full = self._full or run.must_cancel
        passed: list[TaskRun] = []
        while self._waiting and self._in_use < self.limit:
            run = self._waiting.popleft()
            if not self._begin(run):
                passed.append(run)
        self._waiting.extendleft(reversed(passed))
        self._give_back()

    def _begin(self, run: TaskRun) -> bool:
        """Let a run start, or end it if it cannot; return False if it has to wait."""
        if run.end_before_start():
            self._forget()
            return True
        free = self._free_child(run)
        if free is None or (run.after is not None and not run.after.over.is_set()):
            return False
        if self._in_use + run.assignment.units > self.limit:
            return False
        try:
            if not run.begin(free, self._app):
                self._full = True
                return False
        except OSError as error:
            self._forget()
            run.refuse(Outcome(verdict="error", reason=f"the command cannot be started: {error.strerror or error}"))
            return True
        run.after = None
        self._running.add(run)
        self._in_use += run.assignment.units
        if run.due() is not None:
            self._timed.add(run)
        assert run.pipe is not None
        self._sources.register(run.pipe, selectors.EVENT_READ, lambda: self._read_output(run))
        return True

    def _read_output(self, run: TaskRun) -> None:
        if run.pipe is not None and not run.read():
            self._sources.unregister(run.pipe)

    def _give_back(self) -> None:
        """Return leases that wait for longer than short tasks take, to be run elsewhere."""
        oldest = clock.monotonic() - GIVE_BACK_AFTER
        while self._stuck and self._waiting[0].put_at <= oldest:
            self._lookahead.forget()
            self._forget()
            told = Outcome(verdict="released", reason="other tasks of the bot take longer than expected")
            self._waiting.popleft().refuse(told)

    @property
    def _stuck(self) -> bool:
        """True if the run that waits longest has to wait for the end of others."""
        return bool(self._waiting) and self._in_use + self._waiting[0].assignment.units > self.limit

    def _free_child(self, run: TaskRun) -> WarmChild | None:
        serves = "async" if run.task in self._async or not self._wanted["def"] else "def"
        for child in self._children:
            has_room = serves == "async" or not child.runs
            if child.serves == serves and has_room and not child.over and child.killed_for is None:
                return child
        return None

    def _end(self, run: TaskRun, end: Callable[[], None]) -> None:
        """End a run that a child had, by the function."""
        if run.pipe is not None and run.pipe in self._sources.get_map():
            self._sources.unregister(run.pipe)
        self._running.discard(run)
        self._timed.discard(run)
        self._in_use -= run.assignment.units
        if run.child is not None:
            run.child.runs.pop(run.number, None)
        self._forget()
        end()

    def _forget(self) -> None:
        """Take note of a run that is over."""
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
            case {"ready": str(name), "async": list(side_by_side), "def": bool(has_plain)} if child.serves is None:
                self._failures, self._async = 0, frozenset(side_by_side)
                self._wanted = {"def": self._most if has_plain else 0, "async": 1 if side_by_side else 0}
                serving = sum(each.serves == "def" for each in self._children)
                child.serves = "def" if serving < self._wanted["def"] else "async"
                child.send(json.dumps({"serve": child.serves}).encode())
                self._name = self._name or name
                self._decided.set()
            case {"failed": str(reason)}:
                child.failure = reason
            case {"over": int(number), "code": int(code), "clean": bool(clean), "result": str() | None as result}:
                if (run := child.runs.get(number)) is not None:
                    self._lookahead.note(run.age)
                    self._end(run, lambda: run.end(code, result=result, clean=clean))
                    if not clean and child.serves == "def":
                        child.leave(self._app)

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
        runs = list(child.runs.values())
        for run in runs:
            self._end(run, lambda: None)
        if child.lost and not child.expired:
            # In a thread of its own, because it waits for processes to die.
            threading.Thread(target=self._sweep, args=(child, runs), name="sweep", daemon=True).start()
        else:
            for run in runs:
                self._end_with(child, run, alone=len(runs) == 1)
            child.close(self._app)
        if child.expired:
            # The guardian starts nothing until its alarm is moved on.
            self._allowed = False
        elif child.supervisor is None and child.failure is None and self._name is not None:
            # The same, or the guardian is gone and the next message makes another one.
            self._start_at = clock.monotonic() + _FIRST_PAUSE
        elif child.serves is None:
            ended = "the guardian is gone" if child.exit_code is None else describe_exit(child.exit_code)
            self._failed(child.failure or f"its process ended: {ended}")
        else:
            _log.warning("a process of the app ended", app=self._name, process=child.pid, exit_code=child.exit_code)

    def _end_with(self, child: WarmChild, run: TaskRun, *, alone: bool) -> None:
        """End a run whose process has ended."""
        code = child.exit_code
        if child.expired:
            run.expire()
        elif code is None:
            run.end(None)
        elif code != 0 and (run is child.killed_for or (child.killed_for is None and alone)):
            run.end(code)
        else:
            beside = "" if alone else "; other tasks ran beside it"
            run.end(
                None, broken=f"the process of the task ended: {describe_exit(code) if code else 'exit code 0'}{beside}"
            )

    def _sweep(self, child: WarmChild, runs: Sequence[TaskRun]) -> None:
        """Kill what a lost supervisor left, so that the end of its runs is not reported before it."""
        places = [place for place in (child.directory, child.site.directory) if place is not None]
        left: list[int] = []
        for place in places:
            left += self.sweep(place, supervisor=child.supervisor, command=child.pid, account=None, seconds=STUCK_AFTER)
        if left:
            _log.error("processes of an ended task cannot be killed", app=self._name, processes=left)
        for run in runs:
            run.end(None)
        child.close(self._app)

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
            told = f"the app '{self._name}' cannot be started: {reason}"
            while self._waiting:
                run = self._waiting.popleft()
                self._forget()
                run.refuse(Outcome(verdict="error", reason=wire.escaped(told, 400)))

    def _replace_silent(self) -> None:
        """Give up children whose supervisor does not come, with the guardian that should have started it."""
        now = clock.monotonic()
        for child in list(self._children):
            if child.supervisor is None and now >= child.begun + READY_AFTER:
                child.over = child.lost = True
                self.replace(self.pid)
                self._remove(child)
