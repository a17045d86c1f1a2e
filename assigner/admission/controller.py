"""Admission of constrained jobs: read their queues, ask the gates, lock the jobs that may start, and charge them."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from assigner import metrics
from assigner.admission import admit, fair_share, gates, graph_share, judging
from assigner.admission import ordering as orders
from assigner.admission import rules as admission_rules
from assigner.admission.admit import Admission, AdmissionInput, Rank
from assigner.admission.checkers import FAILURES
from assigner.admission.gates import ReleaseTime
from assigner.admission.heads import Heads
from assigner.admission.rules import Rules
from assigner.admission.state import POOL_JOBS, AdmissionState
from schema.accounting import counters, rates
from schema.accounting import fair_share as fair_share_reads
from schema.accounting.fair_share import DEMAND_INTERVAL
from schema.clock import Monotonic
from schema.moves.grant import Amounts
from schema.moves.waiting.rate_skips import SkippedJob, delete_skips, skip
from schema.picking import constrained
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId, QueueScan
from schema.picking.constrained_front import Front, read_front
from schema.picking.head_cursor import HeadCursor
from schema.picking.ready import Scope
from schema.policy import meters
from schema.postgres.connection import Connection

log = structlog.get_logger()

#: Heads read for each job that may evict others. Some have not waited long enough, or are too large.
HEADS_PER_PREEMPTION = 5
#: Instances that the first lot has beyond the number of free units, because each start moves all instances a little;
#: and the number from which on a lot may end between instances of one rank, whose order depends on their jobs.
FEW_MORE, MANY_ALIKE = 2, 100
#: The most constraint sets that an assigner remembers, and the most pairs of constraint set and instance whose charges
#: it remembers.
MAX_REMEMBERED = 20_000
#: Queues up to which all of them are read. Where there were more, the front is read, if it serves.
FEW_QUEUES = 100
#: Jobs of the front that are locked for each that is wanted, if some were refused the last time.
MOST_SPARE = 2
#: Seconds for which an assigner does not check whether the demand of an instance has to be recorded again.
DEMAND_RECHECK = DEMAND_INTERVAL / 2


#: Copies a state of admission.
Keep = Callable[[AdmissionState], AdmissionState]


@dataclass
class AdmissionMemory:
    """What admission knows from earlier cycles. Times are monotonic."""

    #: The queue at which the last walk ended.
    after: QueueId = constrained.FIRST_QUEUE
    #: How many queues the last read has found.
    queues: int = 0
    #: Jobs of the front that are locked for each that is wanted: more if some were refused the last time.
    spare: int = 1
    #: When the pauses end that backpressure advises, by resource class.
    paused_until: dict[str, float] = field(default_factory=dict)
    #: When the demand of an instance may have to be recorded again.
    demand_due: Mapping[int, float] = field(default_factory=dict)
    #: Constraint sets, which never change, by their ids.
    terms: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    #: What jobs of a constraint set and an instance are charged.
    charges: dict[Hashable, Any] = field(default_factory=dict)
    held: Collection[str] | None = None  # counters and rates that somebody holds, if he has hindered a cycle

    def bound(self) -> None:
        """Forget charges or constraint sets if there are too many of them."""
        for remembered in (self.charges, self.terms):
            if len(remembered) > MAX_REMEMBERED:
                remembered.clear()


@dataclass
class AdmissionResult:
    """What one cycle has admitted, and what has to be known until its transaction ends."""

    #: Jobs that may start, locked, in their order.
    heads: Sequence[QueueHead] = ()
    #: How many queues, and how many jobs, each gate keeps waiting, by its name.
    closed_queues: Mapping[str, int] = field(default_factory=dict)
    closed_jobs: Mapping[str, int] = field(default_factory=dict)
    #: Why there are no jobs, if no gate is the reason.
    empty: str | None = None
    #: When the first waiting job may start.
    returns: ReleaseTime | None = None
    #: Free units of the pool; None if they are enough for a whole batch.
    free_units: int | None = None
    #: What the gates were judged by; None if no queue was looked at.
    state: AdmissionState | None = None
    #: The pauses that are advised between two starts, in seconds, by resource class.
    pauses: Mapping[str, float] = field(default_factory=dict)
    #: When the demand that was recorded may have to be recorded again; empty if none was.
    demand_due: Mapping[int, float] = field(default_factory=dict)
    #: What the heads were chosen from; None unless it was to be kept.
    made_from: AdmissionInput | None = None
    #: Jobs of graphs that have been given a lease.
    started_graph_jobs: Sequence[QueueHead] = ()


class AdmissionController:
    """Admits constrained jobs for one assigner."""

    def __init__(self, rules: Rules, memory: AdmissionMemory, *, name: str, now: Monotonic) -> None:
        self._memory, self._name, self._now = memory, name, now
        self.reconfigure(rules)

    def reconfigure(self, rules: Rules) -> None:
        """Use other rules from the next cycle on."""
        self._rules, self._ordering_policy = rules, rules.ordering.policy()

    def read_queues(self, connection: Connection, scope: Scope, *, batch: int) -> QueueScan:
        """Read the queues of jobs that may be admitted next. The next call goes on behind them."""
        memory = self._memory
        memory.bound()
        found = constrained.queues(connection, scope, batch=batch, after=memory.after, terms=memory.terms)
        memory.after, memory.queues = found.last, len(found.queues)
        return found

    def read_front(self, connection: Connection, scope: Scope, cursor: HeadCursor, *, batch: int) -> Front | None:
        """Lock the first jobs of all queues together. With many queues this costs less than to read each of them.

        None if there are few queues, if the order does not follow from rank and age alone, or if most of these jobs
        cannot start. None for an assigner of some instances too: it would lock the jobs of others.
        """
        memory, policy = self._memory, self._ordering_policy
        by_rank = policy.within is None and policy.ageing is None and not self._rules.checkers.checks_limits
        few = memory.queues <= FEW_QUEUES or scope.instances is not None
        if few or not by_rank or not cursor.is_worthwhile():
            return None
        memory.bound()
        front = read_front(connection, scope, cursor, batch=batch, spare=memory.spare, terms=memory.terms)
        if front is None or any(queue.managed for queue in front.scan.queues) or _is_out_of_order(front):
            cursor.disable_for_a_while()
            return None
        if not front.is_cut:
            memory.queues = len(front.scan.queues)
        return front

    def suffices(self, front: Front, cursor: HeadCursor, admitted: AdmissionResult) -> bool:
        """Return whether enough jobs of the front may start. Otherwise the caller reads the queues."""
        wanted, memory = front.scan.free_units, self._memory
        is_short = front.is_cut and len(admitted.heads) < wanted
        if is_short and (memory.spare > 1 or 2 * len(admitted.heads) < wanted):
            cursor.disable_for_a_while()
            memory.spare = 1
            return False
        memory.spare = MOST_SPARE if is_short or admitted.closed_queues or admitted.closed_jobs else 1
        return True

    def pick(
        self,
        connection: Connection,
        found: QueueScan,
        *,
        lacking: Mapping[QueueId, str],
        batch: int,
        pace: float,
        heads: Sequence[QueueHead] | None = None,
        keep: Keep | None = None,
    ) -> AdmissionResult:
        """Lock up to `batch` jobs of these queues whose gates are open and for which a bot has room.

        found: the answer of `read_queues`. Of instances with one rank, those whose queues come first are looked at.
        heads: the jobs of the front, already locked, if it was read.
        lacking: the resource that no bot has left, by queue. pace: seconds in which a job's failed checks count once.
        keep: copies the state before anything is counted in it, to tell what the heads were chosen from.
        """
        if found.now is None or not found.queues or not found.free_units:
            return AdmissionResult(empty="empty queue" if found.now is None else "no room")
        queues, demand_due = self._record_demand(connection, found.queues)
        if any(map(gates.waits_for_windows, queues)):
            meters.lock_meters(connection, waits=self._memory.held is None)
        admission_state = self._read_state(connection, queues, found, lacking=lacking)
        self._settle_weights(connection, queues, admission_state)
        if admission_state.shares is not None:
            metrics.observe_fairness(fair_share.fairness_index(admission_state.shares, admission_state))
        pauses = self._advised(queues, admission_state)
        if self._rules.checkers.checks_limits:
            self._check(
                connection, _open(queues, admission_state), admission_state, free_units=found.free_units, pace=pace
            )
            admission_state.judge_again()
        closed, before = Counter[str](), None if keep is None else keep(admission_state)
        if heads is None:
            done = self._admit(connection, queues, admission_state, free_units=found.free_units, closed=closed)
        else:
            done = self._admit_front(heads, queues, admission_state, free_units=found.free_units, closed=closed)
        made_from = None
        if before is not None:
            made_from = AdmissionInput([*done.heads, *done.left], before, found.free_units)
        admitted = _spaced(done.heads, pauses)
        closed_queues = Counter(
            queue_admission.shut.name
            for queue_admission in admission_state.queue_admissions.values()
            if queue_admission.shut is not None
        )
        empty = None if admitted or closed or closed_queues else "others have them"
        room = found.free_units if found.free_units < batch else None
        # After a whole batch the next cycle comes at once, and does not wait for any of them.
        times = judging.release_times(queues, admission_state) if len(admitted) < found.free_units else ()
        returns = min(times, key=lambda each: each.due, default=None)
        return AdmissionResult(
            admitted, closed_queues, closed, empty, returns, room, admission_state, pauses, demand_due, made_from
        )

    def _record_demand(
        self, connection: Connection, queues: Sequence[ConstrainedQueue]
    ) -> tuple[Sequence[ConstrainedQueue], Mapping[int, float]]:
        """Record the demand of instances, at most every `DEMAND_RECHECK` seconds.

        Returns the queues, without those of instances that another assigner is recording as returned; and by instance
        when its demand may have to be recorded again.
        """
        asking, now = admission_rules.instance_ids([queue for queue in queues if queue.managed]), self._now()
        if all(self._memory.demand_due.get(each, 0.0) > now for each in asking):
            return queues, {}
        others = fair_share_reads.record_demand(connection, asking, self._rules.fair)
        due = dict.fromkeys({*asking} - others, now + DEMAND_RECHECK)
        return [queue for queue in queues if queue.instance not in others], due

    def _settle_weights(
        self, connection: Connection, queues: Sequence[ConstrainedQueue], admission_state: AdmissionState
    ) -> None:
        """Record at once the demand of instances whose weight was changed, so that their lifts fit the new weights."""
        shares = admission_state.shares
        reweighed = [] if shares is None else [each for each, share in shares.of.items() if share.is_reweighed]
        if reweighed:
            fair_share_reads.record_demand(connection, reweighed, self._rules.fair)
            admission_rules.read_shares(connection, queues, admission_state, self._rules)

    def _queue_batches(
        self, queues: Sequence[ConstrainedQueue], admission_state: AdmissionState, *, free_units: int
    ) -> Iterator[tuple[list[ConstrainedQueue], Rank | None]]:
        """Yield the open queues in lots, each with the rank of the first queue behind the lot.

        The first lot holds hardly more instances than there are free units. Each job that starts puts its instance
        behind others. So no instance of a later lot can come first, unless gates are closed for single jobs or an
        instance has few jobs.
        """
        lot, known, last, enough = list[ConstrainedQueue](), 0, None, free_units + FEW_MORE
        for rank, group in self._ordering_policy.ordering.ranked(queues, admission_state):
            if known >= enough and (rank != last or known >= MANY_ALIKE):
                yield lot, rank
                lot, known, enough = [], 0, 2 * enough
            open_ones = _open(group, admission_state)
            lot += open_ones
            known, last = known + bool(open_ones), rank
        yield lot, None

    def _admit(
        self,
        connection: Connection,
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,
        *,
        free_units: int,
        closed: Counter[str],
    ) -> Admission:
        """Admit heads of one lot of queues after another; read further heads where the next job may not be read yet."""
        reader = Heads(connection, self._ordering_policy, admission_state, free_units=free_units)
        admitted, left, refused = list[QueueHead](), list[QueueHead](), Counter[QueueId]()
        for lot, until in self._queue_batches(queues, admission_state, free_units=free_units):
            startable = [min(judging.max_starts(queue, admission_state), queue.headroom or math.inf) for queue in lot]
            if admitted and reader.cut:  # a queue whose heads are used up would be passed over in this lot
                left += reader.more(left, started=_by_queue(admitted), refused=refused)
            left += reader.first(lot, startable)
            while True:
                found = admit.admit(
                    left,
                    admission_state,
                    free_units=free_units - len(admitted),
                    ordering=self._ordering_policy.ordering,
                    closed=closed,
                    cut=reader.cut,
                    until=until,
                    refused=refused,
                )
                admitted, left = admitted + found.heads, found.left
                if not found.is_blocked or len(admitted) == free_units:
                    break
                left += reader.more(left, started=_by_queue(admitted), refused=refused)
            if len(admitted) == free_units:
                break
        return Admission(admitted, left, is_blocked=False)

    def _admit_front(
        self,
        heads: Sequence[QueueHead],
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,
        *,
        free_units: int,
        closed: Counter[str],
    ) -> Admission:
        """Admit heads of the front whose queues are open."""
        opened = {*_open(queues, admission_state)}
        return admit.admit(
            [head for head in heads if head.queue in opened],
            admission_state,
            free_units=free_units,
            ordering=self._ordering_policy.ordering,
            closed=closed,
        )

    def pick_below_minimum(self, connection: Connection, scope: Scope, *, most: int, delay: float) -> list[QueueHead]:
        """Lock up to `most` jobs of instances below their minimum quota whose gates are open.

        They must have been queued for at least `delay` seconds. No bot needs to have room for them. Jobs that take
        resources of bots, and jobs about which a checker would have to be asked, are left out.
        """
        found = constrained.queues(connection, scope, batch=most, after=constrained.FIRST_QUEUE)
        queues = [queue for queue in found.below_minimum if not queue.constraints.get("resources")]
        if self._rules.checkers.checks_limits:
            queues = [queue for queue in queues if rates.resource_of(queue.constraints) is None]
        if found.now is None or not queues:
            return []
        if any(map(gates.waits_for_windows, queues)):
            meters.lock_meters(connection, waits=self._memory.held is None)
        admission_state = self._read_state(connection, queues, found)
        units = HEADS_PER_PREEMPTION * most
        reader = Heads(connection, self._ordering_policy, admission_state, free_units=units)
        heads = reader.first(_open(queues, admission_state))
        heads = [head for head in heads if orders.waited_seconds(head, admission_state) >= delay]
        return admit.admit(heads, admission_state, free_units=most, ordering=self._ordering_policy.ordering).heads

    def _read_state(
        self, connection: Connection, queues: Sequence[ConstrainedQueue], found: QueueScan, **more: Any
    ) -> AdmissionState:
        assert found.now is not None
        return admission_rules.read_admission_state(
            connection,
            queues,
            now=found.now,
            rules=self._rules,
            pressed=found.pressed,
            reserved=found.reserved,
            charges=self._memory.charges,
            held=self._memory.held or (),
            **more,
        )

    def amounts(self, admitted: AdmissionResult) -> dict[int, Amounts]:
        """Return the amounts that each job takes of counters, by its id, without resources of bots."""
        state = admitted.state
        return {} if state is None else {head.job.id: judging.job_charges(head, state) for head in admitted.heads}

    def without_token(self, connection: Connection, admitted: AdmissionResult, *, wait: bool) -> set[int]:
        """Lock the rates of these jobs until the transaction ends, and return the ids of the jobs that have to wait,
        because other assigners have used up the rate since it was read. wait: see `rates.lock_buckets`."""
        if admitted.state is None or not admitted.state.rates:
            return set()
        state, known = admitted.state, admitted.state.rates
        needed = [judging.queue_admission(head.queue, state).charges.tokens for head in admitted.heads]
        wanted = [*(known.keys() & {*itertools.chain.from_iterable(needed)})]
        missing = [name for name in wanted if known[name].missing]
        left = dict.fromkeys(wanted, 0.0) | rates.lock_buckets(connection, wanted, missing=missing, wait=wait)
        without = set[int]()
        for head, names in zip(admitted.heads, needed, strict=True):
            drawn = [name for name in names if name in left]
            if drawn and min([left[name] for name in drawn]) < 1.0:
                without.add(head.job.id)
                continue
            for name in drawn:
                left[name] -= 1.0
        return without

    def charge(self, connection: Connection, admitted: AdmissionResult, taken: Sequence[tuple[int, Amounts]]) -> None:
        """Charge the counters with what the leases of these jobs have taken.

        taken: pairs of a job's id and its amounts. If a limit was reached meanwhile, raises psycopg.Error, so that
        `Database.run` repeats the transaction.
        """
        counters.take(
            connection,
            [amounts for _, amounts in taken],
            may_overshoot=not self._rules.fair.budget_reserve,
            numbers={} if admitted.state is None else admitted.state.lock_numbers,
        )
        ids = {job_id for job_id, _ in taken}
        started = [head for head in admitted.heads if head.job.id in ids]
        starts = Counter(head.queue for head in started)
        if admitted.state is not None:
            for gate in gates.GATES:
                gate.started(connection, starts, admitted.state)
        used = {key for queue in starts for key in rates.advised_as(_class_of(queue))} if admitted.pauses else set()
        for each in used & admitted.pauses.keys():
            self._memory.paused_until[each] = self._now() + admitted.pauses[each]
        of_graphs = {queue for queue in starts if graph_share.graph_of(queue.constraints) is not None}
        admitted.started_graph_jobs = [head for head in started if head.queue in of_graphs] if of_graphs else ()

    def after_commit(self, admitted: AdmissionResult) -> None:
        """Remember and log what this transaction has done, which has been committed."""
        if admitted.demand_due:
            self._memory.demand_due = admitted.demand_due
        for head in admitted.started_graph_jobs:
            assert admitted.state is not None
            log.debug(
                "leasehold.node_dispatched",
                job=head.job.public_id,
                graph=graph_share.graph_of(head.queue.constraints),
                priority=round(admitted.state.scores.get(head.job.id, head.rank), 2),
                active=int(admitted.state.of(POOL_JOBS).used),
            )

    def _advised(self, queues: Iterable[ConstrainedQueue], admission_state: AdmissionState) -> Mapping[str, float]:
        """Add the checker's advice to the state, and what is left of each pause. Returns the whole pauses, seconds.

        Each pause begins before the first start.
        """
        try:
            self._rules.checkers.add_pressure(admission_state.advice)
        except FAILURES as error:
            log.warning("leasehold.backpressure_checker_error", error=str(error))
        delays = {each: advice.delay for each, advice in admission_state.advice.items() if advice.delay > 0}
        used = {_class_of(queue) for queue in queues} if delays else set()
        pauses = {key: delays[key] for each in used for key in rates.advised_as(each) if key in delays}
        now, until = self._now(), self._memory.paused_until
        until = {each: min(until.get(each, now + delay), now + delay) for each, delay in pauses.items()}
        self._memory.paused_until = until
        admission_state.waits = {
            each: max(until[key] for key in paused) - now
            for each in used
            if (paused := [key for key in rates.advised_as(each) if key in until])
        }
        return pauses

    def _check(
        self,
        connection: Connection,
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,
        *,
        free_units: int,
        pace: float,
    ) -> None:
        """Ask the checker once for each resource. A failed check counts for the first jobs of queues that use it."""
        settings = self._rules.checkers
        asking = {each for queue in queues if (each := rates.resource_of(queue.constraints)) is not None}
        answers = settings.ask_limits(asking)
        admission_state.refused.update(answers.refused)
        failed = answers.failed
        for each, error in failed.items():
            log.warning("leasehold.rate_limiter_error", resource=each, error=error)
        delete_skips(connection, asking - failed.keys())
        if not failed:
            return
        asked = [each for each in queues if rates.resource_of(each.constraints) in failed]
        heads = Heads(connection, self._ordering_policy, admission_state, free_units=free_units).first(asked)
        skipped = [
            SkippedJob(head.job.id, used := str(rates.resource_of(head.queue.constraints)), failed[used])
            for head in heads
        ]
        most = settings.max_rate_limit_skips
        for job in skip(connection, skipped, most=most, pace=pace, actor=self._name):
            log.error("leasehold.rate_limiter_error_exhausted", job=job, skips=most)


def _by_queue(heads: Sequence[QueueHead]) -> Counter[QueueId]:
    return Counter(head.queue.id for head in heads)


def _open(queues: Sequence[ConstrainedQueue], admission_state: AdmissionState) -> list[ConstrainedQueue]:
    """Return the queues that no gate closes as a whole."""
    return [queue for queue in queues if judging.queue_admission(queue, admission_state).shut is None]


def _spaced(admitted: list[QueueHead], pauses: Mapping[str, float]) -> list[QueueHead]:
    """Return these jobs, but only the first of those between whose starts a pause is advised; the others wait."""
    if not pauses:
        return admitted
    found, begun = list[QueueHead](), set[str]()
    for head in admitted:
        of_job = rates.advised_as(_class_of(head.queue)) & pauses.keys()
        if not of_job & begun:
            begun |= of_job
            found.append(head)
    return found


def _is_out_of_order(front: Front) -> bool:
    """Return whether jobs behind the heads may come before them: deadlines change the order of one rank."""
    return front.is_cut and any(head.deadline is not None for head in front.heads)


def _class_of(queue: ConstrainedQueue) -> str:
    return queue.constraints.get("resource_class") or rates.ALL_CLASSES
