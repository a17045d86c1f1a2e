"""The leases of one session: running ones, and ended ones that the server does not know of yet."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from leasehold import wire
from leasehold.transport import Record
from pydantic_core import to_json

from bots.agent.attempts.attempt import Assignment, AttemptRun, RunContext, StopReason
from bots.agent.attempts.run import Run
from bots.agent.inputs import InputReader, wanted
from bots.agent.job_files import Unsent
from bots.agent.task_launcher import TaskLauncher
from bots.agent.warm_children import TaskRun
from bots.protocol import Outcome, Progress, Work
from schema import clock, validation

_log = structlog.get_logger("leasehold.agent")

#: The most bytes of output in one sync. The output of one ended job always fits, unless a proxy takes less; further
#: jobs wait for the next sync.
SYNC_OUTPUT_BYTES = validation.MAX_OUTPUT_BYTES
#: The least that this may become if a proxy takes no calls of that size.
LEAST_OUTPUT_BYTES = 4096
#: The most bytes that the progress of an attempt takes: a character has at most six, beside its share and its number.
PROGRESS_BYTES = 6 * wire.MAX_PROGRESS_TEXT + 100
#: The most bytes of results, checkpoints and progress in one sync, escaped as in its body. JSON text grows less than
#: threefold when it is escaped, so that those of one ended job always fit.
SYNC_JSON_BYTES = 3 * (validation.MAX_RESULT_BYTES + validation.MAX_CHECKPOINT_BYTES) + PROGRESS_BYTES
#: The most leases that are remembered after their end.
REMEMBERED = 10_000
#: The most leases that the log names one by one for each answer: a line for each of many short tasks would take an
#: eighth of the agent's processor time.
LOGGED_EACH = 10
#: A report waits for a number of starts and ends of tasks. Beyond it only each eighth wakes the syncing thread.
WAKE_EACH = 8
#: Seconds for which a sync of a bot that holds leases in advance leaves a task out that has begun.
JUST_BEGUN = 0.01

#: Why a bot that drains gives a lease back.
NO_NEW_WORK = "the bot takes no new work"


class LeaseKey(NamedTuple):
    """Identifies one grant."""

    job: str
    fence: int


class HeldLease:
    """One lease: it has a run once that is made, or an outcome (`settled`) without one."""

    def __init__(self, settled: Outcome | None) -> None:
        self._settled = settled
        self.run: AttemptRun | None = None
        #: The state that the last sync reported.
        self.told: str | None = None
        #: Offset at which the output in the current sync ends.
        self.carried = 0
        #: The checkpoint and the progress in the current sync.
        self.checkpoint: Unsent | None = None
        self.progress: Progress | None = None
        #: True once the server has asked to stop it.
        self.stopping = False
        #: True if the last sync left it out, so that the server takes it for pending.
        self.unlisted = False

    def settle(self, outcome: Outcome) -> None:
        """End it without a run, unless it has ended so before."""
        self._settled = self._settled or outcome

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended; None before it has."""
        return self._settled if self.run is None else self.run.outcome

    @property
    def has_result(self) -> bool:
        """True if the attempt ended with a result of its own, not because it was stopped."""
        return self.outcome is not None and self.outcome.verdict in ("succeeded", "failed", "error")

    @property
    def state(self) -> str:
        """The state for a LeaseReport."""
        if self.outcome is not None:
            return "completed"
        return "active" if self.run is not None and self.run.has_started else "pending"

    @property
    def may_be_unlisted(self) -> bool:
        """True if the server need not hear of it: it waits, or its task has just begun and may be over at once."""
        if self.outcome is not None or self.stopping or self.told not in (None, "pending"):
            return False
        return self.run is None or (isinstance(self.run, TaskRun) and self.run.age < JUST_BEGUN)


class News(NamedTuple):
    """What the server does not know of the leases.

    changed: leases that have started or ended. reported: those of them that the next report lists. starting: some lease
    has neither started nor ended yet.
    """

    changed: int
    reported: int
    starting: bool


class AgentLeases:
    """All leases of a session. Only the syncing thread adds and removes leases; any thread may stop runs."""

    def __init__(self, place: RunContext, *, notify: Callable[[], None], inputs: InputReader) -> None:
        self._place, self._notify, self._inputs = place, notify, inputs
        self._lock = threading.Lock()
        self._held: dict[LeaseKey, HeldLease] = {}
        #: Leases without a run, until `begin`.
        self._new: list[tuple[Work, HeldLease]] = []
        #: There was no thread for one of them.
        self._is_scarce = False
        #: Leases that the last answer has ended. `begin` drops them while the gateway works, because Python takes as
        #: long to delete them as to settle the answer.
        self._gone: Mapping[LeaseKey, HeldLease] = {}
        #: The latest run of each job, until it is over; also runs of leases that are no longer held.
        self._runs: dict[str, AttemptRun] = {}
        #: Latest leases that are no longer held. A server that has lost its last commits may offer one of them again.
        self._past: OrderedDict[LeaseKey, None] = OrderedDict()
        self._lost = self._told_of_news = False
        #: The most bytes of output in one call.
        self.output_room = SYNC_OUTPUT_BYTES
        #: The syncing thread waits for news.
        self._watched = True
        #: The news of tasks since the last report, and how many of them the syncing thread waits for.
        self._told_times, self.enough = 0, 0
        #: False for a gateway that takes no progress with the end of an attempt, because it is older.
        self.tells_progress = True
        #: How many results were dropped before the server knew them.
        self.undelivered = 0

    def __len__(self) -> int:
        """Return how many leases are held."""
        return len(self._held)

    @property
    def all_run(self) -> bool:
        """True if each lease has started and not ended."""
        return all(held.state == "active" for held in self._held.values())

    @property
    def empty(self) -> bool:
        """True if no lease is held. Then the server knows of every attempt that ended."""
        return not self._held

    def news(self, *, brief: bool = False) -> "News":
        """Return how many leases have changed their state so that the server should hear of it soon.

        brief: a brief report comes next, which leaves out some of them.
        """
        changed = unlisted = 0
        starting = False
        for held in self._held.values():
            state = held.state
            if state == "pending":
                starting = True
            elif state != held.told:
                changed += 1
                unlisted += brief and state == "active" and held.may_be_unlisted
        return News(changed, changed - unlisted, starting)

    def watch(self, watching: bool) -> None:
        """Let the syncing thread be woken by news of tasks, or not while it is busy with a call."""
        self._watched, self._told_of_news = watching, False

    @property
    def _starting(self) -> bool:
        return any(held.state == "pending" for held in self._held.values())

    def streams(self) -> list[tuple[LeaseKey, AttemptRun]]:
        """List the leases with output, a checkpoint or a progress that the gateway does not have yet."""
        with self._lock:
            held = [(key, one.run) for key, one in self._held.items() if one.run is not None]
        for _, run in held:
            if not run.over.is_set():
                run.checkpoint.look()
                run.progress.look()
        return [(key, run) for key, run in held if self._has_news(run)]

    def _has_news(self, run: AttemptRun) -> bool:
        waits = run.progress.unsent is not None and not run.over.is_set()
        return bool(run.output.unsent) or waits or self.unsent_checkpoint(run) is not None

    def send_less(self) -> bool:
        """Send output in smaller parts, because a proxy does not take calls of that size. False if they are as small as
        they may be."""
        if self.output_room <= LEAST_OUTPUT_BYTES:
            return False
        self.output_room //= 2
        _log.warning("a proxy takes no calls of this size, so output is sent in smaller parts", bytes=self.output_room)
        return True

    def unsent_checkpoint(self, run: AttemptRun) -> Unsent | None:
        """The checkpoint that the gateway should have and does not; None after a success, which needs none."""
        succeeded = run.outcome is not None and run.outcome.verdict == "succeeded"
        return None if succeeded else run.checkpoint.unsent

    def reports(self, *, brief: bool = False) -> tuple[list[Record], int]:
        """Build the reports on the leases for the next sync, each a `LeaseReport` without defaults.

        Returns the reports, and how many leases they leave out: none, unless they are `brief` and some lease waits.

        Not as models, because making one for each lease that waits takes a bot of short tasks longer than its
        bookkeeping. An ended lease whose output, result and checkpoint do not fit into this sync any more is reported
        as active.
        """
        self._told_times = 0
        room, json_room = self.output_room, SYNC_JSON_BYTES
        reports, unlisted = list[Record](), 0
        brief = brief and self._starting
        for key, held in self._held.items():
            state, unsent = held.state, 0
            held.unlisted = brief and state != "completed" and held.may_be_unlisted
            if held.unlisted:
                held.told, unlisted = "pending", unlisted + 1
                continue
            if state == "completed" and held.run is not None:
                unsent, held.checkpoint = held.run.output.unsent, self.unsent_checkpoint(held.run)
                held.progress = held.run.progress.unsent
                texts = self._escaped_size(held)
                if unsent > room or texts > json_room:
                    state, unsent, held.checkpoint, held.progress = "active", 0, None, None
                else:
                    room, json_room = room - unsent, json_room - texts
            held.told = state
            reports.append(self._report(key, held, state, unsent=unsent))
        return reports, unlisted

    def settle(self, leases: Sequence[Work], *, accept: bool, keep_unlisted: bool = False) -> bool:
        """Make the held leases match the answer of a sync. Without `accept`, new leases are returned to the pool;
        otherwise they start with `begin`. Returns whether there are new ones that will start.

        keep_unlisted: leases that the reports have left out are still held if the answer does not list them.
        """
        if len(self._runs) > len(self._held):
            with self._lock:
                self._runs = {job: run for job, run in self._runs.items() if not run.over.is_set()}
        listed = {LeaseKey(work.job, work.fence): work for work in leases}
        gone: dict[LeaseKey, HeldLease] = {}
        for key, held in self._held.items():
            if keep_unlisted and held.unlisted:
                continue
            if held.run is not None and held.told == "completed":
                if held.carried:
                    held.run.output.sent(held.carried)
                if held.checkpoint is not None:
                    held.run.checkpoint.sent(held.checkpoint.number)
                if held.progress is not None:
                    held.run.progress.sent(held.progress)
            if key not in listed:
                gone[key] = held
        self._forget(gone)
        taken: dict[LeaseKey, HeldLease] = {}
        new: list[tuple[Work, HeldLease]] = []
        for key, work in listed.items():
            held_already = self._held.get(key)
            if held_already is None:
                held = taken[key] = HeldLease(self._settled(key, work, accept=accept))
                if held.outcome is None:
                    new.append((work, held))
            elif work.state == "cancelling" and held_already.run is None:
                held_already.settle(Outcome(verdict="stopped"))
            elif work.state == "cancelling" and held_already.run is not None:
                if not held_already.stopping:
                    held_already.stopping = True
                    _log.info("lease is to be stopped", job=key.job, fence=key.fence, reason=work.stop_reason)
                held_already.run.stop(StopReason.CANCELLED)
        with self._lock:
            if self._lost:
                # Since the answer came. Nothing may start.
                return False
            self._held.update(taken)
        self._new += new
        started = ({"job": work.job, "fence": work.fence, "attempt": work.attempt} for work, _ in new)
        _log_each("lease started", started, count=len(new))
        return bool(new)

    def begin(self) -> None:
        """Start what the last answers have brought. The syncing thread may report other leases before.

        Without a thread, as where a command forks without end, a lease waits for the next time. The server takes it
        back if that does not come soon.
        """
        new, self._new = self._new, []
        for number, (work, held) in enumerate(new):
            before = self._runs.get(work.job)
            try:
                with self._lock:
                    if self._lost:
                        return
                    if self._held.get(LeaseKey(work.job, work.fence)) is not held or held.outcome is not None:
                        continue
                    run = held.run = self._run(_assignment(work), after=before)
                    self._runs[work.job] = run
                numbers = wanted(work.payload)
                if numbers:
                    self._inputs.start(run, numbers)
                else:
                    run.start()
            except (RuntimeError, OSError) as error:
                if not self._is_scarce:
                    told = "commands wait for a thread or a file"
                    _log.warning(told, job=work.job, fence=work.fence, reason=str(error))
                self._is_scarce = True
                with self._lock:
                    held.run = None
                    self._runs.pop(work.job, None)
                    if before is not None:
                        self._runs[work.job] = before
                self._new = new[number:]
                break
        else:
            self._is_scarce = False
        self._gone = {}

    def stop(self, why: StopReason, *, grace: float | None = None) -> None:
        """Stop all runs that have begun; with LOST, forget all leases too. Returns at once; see `wait`."""
        with self._lock:
            runs = list(self._runs.values())
            if why is StopReason.LOST:
                self.undelivered += sum(held.has_result for held in self._held.values())
                self._lost, self._held = True, {}
        for run in runs:
            run.stop(why, grace=grace)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until all runs are over; return True if they are."""
        give_up = clock.monotonic() + seconds
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            clock.wait(run.over, give_up - clock.monotonic())
        return all(run.over.is_set() for run in runs)

    def _escaped_size(self, held: HeldLease) -> int:
        """Return the bytes that an ended run's result, checkpoint and progress take in the body of a sync."""
        outcome = held.outcome
        size = 0 if held.checkpoint is None else len(to_json(held.checkpoint.text))
        if held.progress is not None and self.tells_progress:
            size += len(held.progress.model_dump_json(exclude_defaults=True).encode())
        if outcome is not None and outcome.result is not None:
            size += len(to_json(outcome.result))
        return size

    def _report(self, key: LeaseKey, held: HeldLease, state: str, *, unsent: int) -> Record:
        report: Record = {"job": key.job, "fence": key.fence, "state": state}
        if state == "completed":
            assert held.outcome is not None
            report["outcome"] = held.outcome.model_dump(exclude_defaults=True)
        if unsent and held.run is not None:
            pending = held.run.output.pending(unsent)
            held.carried = pending.end
            report["output"] = pending.chunks
        if held.progress is not None and self.tells_progress:
            report["progress"] = held.progress.model_dump(exclude_defaults=True)
        return report if held.checkpoint is None else report | held.checkpoint.fields

    def _settled(self, key: LeaseKey, work: Work, *, accept: bool) -> Outcome | None:
        """Return how a new lease ends without a run; None if its command is to start."""
        if work.state == "cancelling":
            return Outcome(verdict="stopped")
        if key in self._past:
            return Outcome(verdict="released", reason="the server has lost how this attempt ended")
        if not accept:
            return Outcome(verdict="released", reason=NO_NEW_WORK)
        if work.state == "active":
            return Outcome(verdict="released", reason="its bot does not know it any more")
        if work.payload is None:
            return Outcome(verdict="error", reason="the lease came without a payload")
        return None

    def _run(self, assignment: Assignment, *, after: AttemptRun | None) -> AttemptRun:
        launcher = self._place.launcher
        if isinstance(launcher, TaskLauncher):
            return launcher.run(assignment, self._place, notify=self._tell, after=after)
        return Run(assignment, self._place, notify=self._notify, after=after)

    def _tell(self) -> None:
        """Wake the syncing thread if it waits for news; while the end of a task leaves no process idle, only for the
        first news and when it is enough for a report.
        """
        launcher = self._place.launcher
        self._told_times += 1
        if not self._watched or (
            self._told_of_news
            and isinstance(launcher, TaskLauncher)
            and launcher.busy
            and (self._told_times < self.enough or self._told_times % WAKE_EACH)
        ):
            return
        self._told_of_news = True
        self._notify()

    def give_back(self, reason: str) -> None:
        """Return the leases of tasks that wait for others to end."""
        for held in self._held.values():
            if isinstance(held.run, TaskRun) and not held.run.has_started:
                held.run.give_back(reason)

    def _forget(self, gone: Mapping[LeaseKey, HeldLease]) -> None:
        """Hold these leases no more, and stop the runs of them that are not over."""
        self._gone = gone
        ended: list[tuple[LeaseKey, HeldLease]] = []
        with self._lock:
            for key, held in gone.items():
                self._held.pop(key, None)
                if held.run is not None and held.run.over.is_set() and self._runs.get(key.job) is held.run:
                    del self._runs[key.job]
        self._past.update(dict.fromkeys(gone))
        while len(self._past) > REMEMBERED:
            # In a plain dict finding the first key takes longer the more keys before it were deleted.
            self._past.popitem(last=False)
        for key, held in gone.items():
            run = held.run
            if run is None or run.over.is_set():
                ended.append((key, held))
            else:
                # The job may already run on another bot.
                _log.warning("lease is not ours any more", job=key.job, fence=key.fence)
                run.stop(StopReason.LOST, grace=0.0)
        told = (
            {"job": key.job, "fence": key.fence, "verdict": held.outcome.verdict if held.outcome else None}
            for key, held in ended
        )
        _log_each("lease ended", told, count=len(ended))


def _log_each(event: str, leases: Iterable[Mapping[str, Any]], *, count: int) -> None:
    """Log what happened to each of these leases, or only how many they are if they are many."""
    if count > LOGGED_EACH:
        _log.info(f"{event}, many times", leases=count)
        return
    for facts in leases:
        _log.info(event, **facts)


def _assignment(work: Work) -> Assignment:
    return Assignment(
        job=work.job,
        fence=work.fence,
        attempt=work.attempt,
        instance=work.instance,
        timeout=work.timeout,
        payload=work.payload,
        gpus=work.gpus,
        checkpoint=work.checkpoint,
        units=work.units or 1,
    )
