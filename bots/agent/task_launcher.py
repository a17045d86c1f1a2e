"""The launcher of a bot that serves an app: commands are calls of tasks, and run in warm child processes.

As many children as the bot has units run one `def` task each; one child runs all `async def` tasks. A child that ends
takes the run with it that it has begun, and another one is started. Runs for which there is no room wait, because a bot
that runs short tasks holds some leases in advance (`Lookahead`). Some of them wait in the sockets of children that run
short `def` tasks, so that a child goes on without waiting for the agent, which then looks at all children only every
few milliseconds: that halves the processor time of the agent for a task that does nothing.

One module because one thread decides about runs and children together, on one state.
"""

import contextlib
import itertools
import math
import os
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from leasehold import wire
from leasehold.errors import LeaseholdError
from leasehold.runtime.call_messages import CallEnd

from bots.agent.attempts.attempt import Assignment, AttemptRun, RunContext
from bots.agent.attempts.run import READY_AFTER
from bots.agent.capacity import Lookahead
from bots.agent.guardian import kill
from bots.agent.launcher import Launcher
from bots.agent.warm_children import OVERDUE, PIPE_BYTES, App, OutputPipe, Queue, TaskRun, WarmChild
from bots.protocol import Outcome
from schema import clock
from schema.timing import STUCK_AFTER

_log = structlog.get_logger("leasehold.agent")

#: Seconds until another child is started after one that could not import the app: doubled each time, up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
#: Seconds between two tries to send to a child that does not read.
_SEND_AGAIN = 0.05
#: Seconds between two looks at children that have more than one call waiting each.
_GLANCE = 0.002
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
        #: What reads each of the sources, by its descriptor.
        self._handlers: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._guarding = threading.Lock()
        self._new: list[TaskRun] = []
        self._to_stop: list[TaskRun] = []
        #: How many runs are not over, and when the alarm has to ring if there are any.
        self._held = 0
        self._deadline: float | None = None
        self._waiting: deque[TaskRun] = deque()
        #: How many calls wait in children.
        self._queued = 0
        self._running: set[TaskRun] = set()
        self._in_use = 0
        #: Running ones with a timeout, or that have to stop.
        self._timed: set[TaskRun] = set()
        self._children: list[WarmChild] = []
        self._async: frozenset[str] = frozenset()
        #: How many children serve what; until one has imported the app, one is started.
        self._wanted = {"def": 1, "async": 0}
        self._allowed = self._closing = self._full = self._broken = False
        #: When it ends without the processes that were told to end.
        self._close_by = math.inf
        self._failures = 0
        self._start_at = 0.0
        #: The tasks that the app has, once it was imported.
        self.tasks: frozenset[str] = frozenset()
        #: Whether calls of other tasks go back, for other bots: the gateway has been told which tasks there are.
        self.gives_back_unknown = False
        self._name: str | None = None
        self._refusal: str | None = None
        self._decided = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._watch(self._woken.fileno(), self._take_new)
        self._thread = threading.Thread(target=self._work, name="tasks", daemon=True)

    def open(self) -> str:
        """Start the first child and return the name of the app. Raises LeaseholdError if it cannot be imported."""
        self._thread.start()
        self._allow(True)
        self._decided.wait()
        if self._name is None:
            hint = wire.withheld(self._refusal or "", os.environ.keys() - self._app.seen.keys())
            raise LeaseholdError(f"the app '{self._app.place}' cannot be used: {self._refusal}{hint}")
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
        return bool(self._waiting) or self._queued > 0

    @property
    def ahead(self) -> int:
        """The units that the bot should announce beyond its limit."""
        return self._lookahead.units(self.limit)

    @property
    def together(self) -> int:
        """How many ends the bot should report at once while others wait."""
        return self._lookahead.together(self.limit)

    def arm(self, deadline: float) -> None:
        # An idle bot may wait for news until after the deadline. Children without a run may live on meanwhile.
        with self._guarding:
            self._deadline = deadline
            if self._held:
                self._arm(deadline)
        self._allow(True)

    def _arm(self, deadline: float) -> None:
        try:
            super().arm(deadline)
        except OSError as error:
            # Such as while no process is left. The next answer of the gateway moves the alarm on, and tries again.
            _log.error("the guardian cannot be started", reason=error.strerror)

    def disarm(self) -> None:
        # The agent kills what is left of a session before it opens another; nothing may start meanwhile.
        self._allow(False)
        with self._guarding:
            self._deadline = None
            super().disarm()

    def close(self) -> None:
        self._close_by = clock.monotonic() + 2 * STUCK_AFTER
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
        back: list[TaskRun] = []
        for child in self._children:
            # Its supervisor kills it. What waits there must not begin before that.
            back += [run for run, _ in child.recall()]
            child.hang_up()
        with self._guarding:
            self._broken = True
            left = [*back, *self._waiting, *self._new]
        for run in (*left, *(run for child in self._children for run in child.runs.values())):
            run.refuse(FAILED)

    def _serve(self) -> None:
        while not (self._closing and (self._all_dismissed() or clock.monotonic() >= self._close_by)):
            for key, _ in self._sources.select(self._delay()):
                # A handler before it may have closed this source, and another may have its number.
                handler = self._handlers.get(key.fd)
                if handler is not None and handler is key.data:
                    handler()
            self._full = False
            for run in list(self._timed):
                if run in self._timed:
                    self._press(run)
            self._recall_overdue()
            self._replace_silent()
            self._fill()
            self._assign()
            if self._queued > len(self._children):
                clock.sleep(_GLANCE)

    def _all_dismissed(self) -> bool:
        """Let processes without a call end as programs do, with what they have registered for that.

        Returns whether all have ended, or were given up.
        """
        for child in self._children:
            if child.serves is not None and not child.runs and child.dismissed_until is None:
                child.dismiss()
        now = clock.monotonic()
        return all(child.dismissed_until is None or now >= child.dismissed_until for child in self._children)

    def _watch(self, source: int, handler: Callable[[], None]) -> None:
        """Let the handler read from this descriptor, unless one does already."""
        if source not in self._handlers:
            self._handlers[source] = handler
            self._sources.register(source, selectors.EVENT_READ, handler)

    def _ignore(self, source: int) -> None:
        """Read no more from this descriptor, which is still open."""
        if self._handlers.pop(source, None) is not None:
            self._sources.unregister(source)

    def _delay(self) -> float | None:
        """Return the seconds until there is something to do without a message; None = no such time."""
        now = clock.monotonic()
        instants = [child.begun + READY_AFTER for child in self._children if child.supervisor is None]
        instants += [child.dismissed_until for child in self._children if child.dismissed_until is not None]
        instants += [due for run in self._timed if (due := run.due()) is not None]
        if self._may_start:
            instants.append(self._start_at)
        if self._full:
            instants.append(now + _SEND_AGAIN)
        if self._stuck:
            instants.append(self._waiting[0].put_at + GIVE_BACK_AFTER)
        if self._queued:
            instants.append(now + OVERDUE)
        if self._closing:
            instants.append(self._close_by)
        left = min(instants, default=math.inf) - now
        return None if left == math.inf else max(0.0, left)

    # Runs

    def _put(self, run: TaskRun) -> None:
        run.put_at = clock.monotonic()
        with self._guarding:
            if not self._broken:
                self._new.append(run)
                self._held += 1
                if self._held == 1 and self._deadline is not None:
                    self._arm(self._deadline)
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
            if (outcome := run.check(self._name, self.tasks if self.gives_back_unknown else None)) is not None:
                self._forget()
                run.refuse(outcome)
            else:
                self._waiting.append(run)
        for run in to_stop:
            if run in self._running:
                self._timed.add(run)
                continue
            if run.child is not None and run.number in run.child.runs:
                self._recall(run.child)
            if run in self._waiting and run.end_before_start():
                self._waiting.remove(run)
                self._forget()

    def _press(self, run: TaskRun) -> None:
        """Do what is due to end a run."""
        child = run.child
        assert child is not None
        step = run.step()
        if step and child.serves == "def" and not self._is_alone(run, child):
            return
        match step:
            case "T" if child.serves == "async":
                run.must_cancel = True
            case "T":
                child.terminate()
            case "K":
                child.killed_for = child.killed_for or child.blocker or run
                child.ask_to_die()
            case "give up":
                _log.error("a process tree did not die", job=run.assignment.job, fence=run.assignment.fence)
                if child.supervisor is not None:
                    kill([child.supervisor], signal.SIGKILL)
                child.over = child.lost = True
                self._remove(child)
            case _:
                pass

    def _is_alone(self, run: TaskRun, child: WarmChild) -> bool:
        """Make sure that what ends a run in its child cannot reach the next call; return False if the run is over."""
        self._recall(child)
        self._read_all(child)
        return run in self._running

    def _recall(self, child: WarmChild) -> None:
        """Let calls wait here that a child has not taken yet."""
        back = child.recall()
        for run, knows_pipe in back:
            self._drop_pipe(run, child, reusable=knows_pipe)
            if run in self._running:
                self._leave_running(run)
            else:
                self._queued -= 1
            run.take_back()
        self._waiting.extendleft(run for run, _ in reversed(back))

    def _recall_overdue(self) -> None:
        """Take back what waits in children behind a task that is not short, or while too many units are in use."""
        if not self._queued:
            return
        for child in self._children:
            if len(child.runs) > 1 and child.serves == "def":
                first = next(iter(child.runs.values()))
                if first.age >= OVERDUE or self._in_use > self.limit:
                    self._recall(child)

    def _assign(self) -> None:
        """Hand waiting runs to children that are free, and tell children of cancelled ones."""
        for run in self._timed:
            if run.must_cancel and run.child is not None:
                run.must_cancel = not run.child.send({"cancel": run.number})
                self._full = self._full or run.must_cancel
        passed: list[TaskRun] = []
        while self._waiting and self._in_use < self.limit:
            run = self._waiting.popleft()
            if not self._begin(run):
                passed.append(run)
        self._waiting.extendleft(reversed(passed))
        if self._waiting:
            self._hand_over_ahead()
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
        if self._hand_over(run, free):
            return True
        self._full = True
        return False

    def _hand_over(self, run: TaskRun, child: WarmChild) -> bool:
        """Hand a run to a child, or end it if that fails; return False if the child has to read other messages."""
        waits = child.serves == "def" and bool(child.runs)
        try:
            if not run.hand_over(child, self._app):
                return False
        except OSError as error:
            self._forget()
            run.refuse(Outcome(verdict="error", reason=f"the command cannot be started: {error.strerror or error}"))
            return True
        run.after = None
        pipe = run.pipe
        assert pipe is not None
        self._watch(pipe.reader, partial(self._read_output, pipe, child))
        if waits:
            self._queued += 1
        else:
            self._note_begin(run)
        return True

    def _note_begin(self, run: TaskRun) -> None:
        run.begin()
        self._running.add(run)
        self._in_use += run.assignment.units
        if run.due() is not None:
            self._timed.add(run)

    def _hand_over_ahead(self) -> None:
        """Let calls of short tasks wait in children, the same number in each as far as possible."""
        deepest = self._lookahead.queue(self._most)
        open_ones = [child for child in self._children if child.takes_ahead(deepest)]
        shallowest = min((len(child.runs) for child in open_ones), default=0)
        for most in range(shallowest, deepest + 1):
            for child in open_ones:
                if len(child.runs) > min(most, child.clean_ends):
                    continue
                run, first = self._waiting[0], next(iter(child.runs.values()))
                ready = run.after is None or run.after.over.is_set()
                alike = self._serves(run) == "def" and run.assignment.units == first.assignment.units
                if not (ready and alike and run.may_wait and self._hand_over(run, child)):
                    return
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _read_output(self, pipe: OutputPipe, child: WarmChild) -> None:
        """Read what a call prints. What is there may have been read with the end of the call just now."""
        try:
            data = os.read(pipe.reader, PIPE_BYTES)
        except BlockingIOError:
            return
        if pipe.run is not None and data:
            pipe.run.output.write(data)
            return
        self._ignore(pipe.reader)
        if pipe.run is None:
            # Somebody writes who has no call, and shall not write into the output of the next one.
            child.pipes.remove(pipe)
            os.close(pipe.reader)

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
        serves = self._serves(run)
        for child in self._children:
            has_room = serves == "async" or not child.runs
            if child.serves == serves and has_room and not (child.over or child.retired or child.killed_for):
                return child
        return None

    def _serves(self, run: TaskRun) -> str:
        """Return what a child serves that can run it."""
        return "async" if run.task in self._async or not self._wanted["def"] else "def"

    def _leave_running(self, run: TaskRun) -> None:
        self._running.discard(run)
        self._timed.discard(run)
        self._in_use -= run.assignment.units

    def _drop_pipe(self, run: TaskRun, child: WarmChild, *, reusable: bool) -> None:
        reader = run.drop_pipe(reusable=reusable, child=child)
        if reader is not None:
            self._ignore(reader)
            os.close(reader)

    def _end(self, run: TaskRun, child: WarmChild, end: Callable[[], None], *, quiet: bool, reusable: bool) -> None:
        """End a run that a child had begun, by the function. quiet: it has printed nothing that has not been read.
        reusable: nobody else can write to its pipe.
        """
        if not quiet:
            run.read_to_end()
        self._drop_pipe(run, child, reusable=reusable)
        if run in self._running:
            self._leave_running(run)
        else:
            self._queued -= 1
        child.runs.pop(run.number, None)
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
    def _missing(self) -> bool:
        return sum(self._wanted.values()) > sum(not child.retired for child in self._children)

    @property
    def _may_start(self) -> bool:
        return self._missing and self._allowed and self._refusal is None

    def _fill(self) -> None:
        """Start the children that are missing."""
        while self._may_start and clock.monotonic() >= self._start_at:
            try:
                child = WarmChild.start(self._app, super().launch)
            except (OSError, LeaseholdError) as error:
                self._failed(f"its process cannot be started: {error}")
                return
            self._children.append(child)
            self._watch(child.control.fileno(), partial(self._listen, child))
            self._watch(child.channel.fileno(), partial(self._read_all, child))

    def _read(self, child: WarmChild) -> bool:
        """Read a message of a child; return False if there is none, now or ever."""
        try:
            message = child.read()
        except BlockingIOError:
            return False
        match message:
            case CallEnd():
                self._hear_end(child, message)
            case None:
                self._ignore(child.channel.fileno())
                # What can tell of no end any more would hold its calls for ever.
                child.ask_to_die()
                return False
            case {"ready": str(name), "async": list(side_by_side), "def": list(plain)} if child.serves is None:
                self._failures, self._async = 0, frozenset(side_by_side)
                self._wanted = {"def": self._most if plain else 0, "async": 1 if side_by_side else 0}
                self.tasks = self.tasks or frozenset([*side_by_side, *plain])
                serving = sum(each.serves == "def" and not each.retired for each in self._children)
                child.serve("def" if serving < self._wanted["def"] else "async")
                self._name = self._name or name
                self._decided.set()
            case {"failed": str(reason)}:
                child.failure = reason
            case {"blocks": int() | None as number, "where": str(where)} if child.serves == "async":
                self._note_blocker(child, None if number is None else child.runs.get(number), where)
            case {"cancelling": int(number)} if number in child.runs:
                child.runs[number].was_cancelled = True
        return True

    def _note_blocker(self, child: WarmChild, run: TaskRun | None, where: str) -> None:
        """Take note of the run that keeps all others of its process from going on, or that none does."""
        child.blocker, child.blocked_at = run, where
        if run is not None:
            _log.warning(
                "a task blocks the event loop that it shares with others",
                job=run.assignment.job,
                fence=run.assignment.fence,
                task=run.task,
                where=where,
                others=len(child.runs) - 1,
            )

    def _hear_end(self, child: WarmChild, told: CallEnd) -> None:
        run = child.runs.get(told.number)
        if run is not None and run in self._running:
            # What the process says of itself, because this thread may have looked late.
            self._lookahead.note(min(max(0.0, told.seconds), run.age + OVERDUE))
            self._end(run, child, lambda: run.end(told.code, told=told), quiet=told.quiet, reusable=told.clean)
            child.calls_run += 1
            if child.blocker is run:
                child.blocker = None
            self._go_on(child, clean=told.clean)
            self._retire(child)

    def _go_on(self, child: WarmChild, *, clean: bool) -> None:
        """Take note that a call of a child has ended, and the next one begins."""
        if child.serves != "def":
            return
        child.clean_ends = child.clean_ends + 1 if clean else 0
        if not clean:
            # It takes no other call before it is told to, and those that wait in it were to have that directory.
            self._recall(child)
            child.leave(self._app)
        elif child.runs:
            self._queued -= 1
            self._note_begin(next(iter(child.runs.values())))

    def _retire(self, child: WarmChild) -> None:
        """Replace a child that has reached a limit: another is started, and it ends once it has no call.

        One is started at a time, because that takes as long as the import of the app.
        """
        if not child.retired:
            limit = self._app.limits.reached(child)
            if limit is None or self._missing or any(each.serves is None for each in self._children):
                return
            _log.info(
                "a process of the app is replaced",
                app=self._name,
                process=child.pid,
                limit=limit,
                calls=child.calls_run,
            )
            child.retired = True
            if child.serves == "def":
                self._recall(child)
        if not child.runs and child.dismissed_until is None:
            child.dismiss()

    def _read_all(self, child: WarmChild) -> None:
        """Read everything that a child has said."""
        if child.channel.fileno() in self._handlers:
            while self._read(child):
                pass

    def _listen(self, child: WarmChild) -> None:
        child.listen()
        if not child.over:
            return
        # A lost one may still live. It takes no further call, so that only one is open after what it has said.
        self._recall(child)
        self._read_all(child)
        self._remove(child)

    def _remove(self, child: WarmChild) -> None:
        self._recall(child)
        for source in (child.control.fileno(), child.channel.fileno(), *(pipe.reader for pipe in child.pipes)):
            self._ignore(source)
        self._children.remove(child)
        runs, end = list(child.runs.values()), child.end
        for run in runs:
            self._end(run, child, lambda: None, quiet=False, reusable=False)
        if child.lost and not child.expired:
            # In a thread of its own, because it waits for processes to die.
            try:
                threading.Thread(target=self._sweep, args=(child, runs), name="sweep", daemon=True).start()
            except RuntimeError:
                self._sweep(child, runs)
        else:
            for run in runs:
                self._end_with(child, run, alone=len(runs) == 1)
            child.close(self._app)
        if child.expired:
            # The guardian starts nothing until its alarm is moved on.
            self._allowed = False
        elif child.dismissed_until is not None:
            pass
        elif child.supervisor is None and child.failure is None and self._name is not None:
            # The same, or the guardian is gone and the next message makes another one.
            self._start_at = clock.monotonic() + _FIRST_PAUSE
        elif child.serves is None:
            self._failed(child.failure or f"its process ended: {end}")
        else:
            _log.warning("a process of the app ended", app=self._name, process=child.pid, exit_code=child.exit_code)

    def _end_with(self, child: WarmChild, run: TaskRun, *, alone: bool) -> None:
        """End a run whose process has ended."""
        code, culprit = child.exit_code, child.killed_for
        if child.expired:
            run.expire()
        elif code is None:
            run.end(None)
        elif culprit is not None and run is not culprit and (culprit is child.blocker or culprit.was_cancelled):
            run.give_way("another task of its process did not let it go on, and was killed with the process")
        elif run is culprit and run is child.blocker:
            run.end(code, blamed=f"killed because it blocked other tasks of its process, at {child.blocked_at}")
        elif code != 0 and (run is child.killed_for or (child.killed_for is None and alone)):
            run.end(code)
        else:
            beside = "" if alone else "; other tasks ran beside it"
            run.end(None, broken=f"the process of the task ended: {child.end}{beside}")

    def _sweep(self, child: WarmChild, runs: Sequence[TaskRun]) -> None:
        """Kill what a lost supervisor left, so that the end of its runs is not reported before it."""
        places = [place for place in (child.directory, child.site.directory) if place is not None]
        left: list[int] = []
        until = clock.monotonic() + STUCK_AFTER
        for place in places:
            seconds = until - clock.monotonic()
            left += self.sweep(place, supervisor=child.supervisor, command=child.pid, account=None, seconds=seconds)
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
        if all(child.retired for child in self._children):
            told = f"the app '{self._name}' cannot be started: {reason}"
            while self._waiting:
                run = self._waiting.popleft()
                self._forget()
                run.refuse(Outcome(verdict="error", reason=wire.escaped(told, 400)))

    def _replace_silent(self) -> None:
        """Give up children whose supervisor does not come, with the guardian that should have started it. Kill those
        that do not end though they were dismissed.
        """
        now = clock.monotonic()
        for child in list(self._children):
            if child.dismissed_until is not None and now >= child.dismissed_until:
                # A thread that a task has left keeps it, or a process.
                child.dismissed_until = math.inf
                child.ask_to_die()
            if child.supervisor is None and now >= child.begun + READY_AFTER:
                child.over = child.lost = True
                self.replace(self.pid)
                self._remove(child)
