"""Admission of constrained jobs: read their queues, ask the gates, lock the jobs that may start, and charge them.

One module because the reader of heads and the controller share what is known of one cycle.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import structlog

from assigner import metrics
from assigner.admission import admit, fair_share, gates, graph_share
from assigner.admission import ordering as orders
from assigner.admission import rules as admission_rules
from assigner.admission.admit import Rank
from assigner.admission.checkers import FAILURES
from assigner.admission.gates import QueueCharges, ReleaseTime, queue_admission
from assigner.admission.ordering import OrderingPolicy, OrderWithinQueue
from assigner.admission.rules import Rules
from assigner.admission.state import POOL_JOBS, AdmissionState
from assigner.placement import resources
from assigner.placement.fleet import Fleet
from schema.accounting import counters, rates
from schema.accounting import fair_share as fair_share_reads
from schema.accounting.fair_share import DEMAND_INTERVAL
from schema.clock import Monotonic
from schema.moves.grant import Amounts
from schema.moves.hold import SkippedJob, delete_skips, skip
from schema.picking import constrained
from schema.picking.constrained import NO_HEADS, ConstrainedQueue, QueueHead, QueueId, ReadHeads
from schema.picking.ready import Scope
from schema.policy import meters
from schema.postgres.connection import Connection

# Heads are the first jobs of queues whose gates are open. They are read and locked in steps: first about as many as
# will start, then more of those queues from which most have started.


#: Heads read for each job that may be placed, if the order cannot tell before the gates are asked which ones start.
#: `LEAST`: the fewest that are read from a queue.
SPARE, LEAST = 4.0, 8
#: Heads of a window that are tried for each head that is wanted: others may have locked some.
TRIED = 8
#: The number of jobs of a queue that are expected to start is found as if parts of jobs could start, so that rounded up
#: it is about half a job too many. `ROUNDED` is taken from it. A queue from which `MANY` start has a job in reserve.
ROUNDED, MANY = 0.25, 16
#: The number of sparing reads of further heads. A sparing read takes more heads only of the queues that come next. A
#: later read takes `LEAST` heads of every queue. A queue is given up once `LEAST` of its heads in a row are refused.
MAX_SPARING_READS = 4
#: Heads read for each job that is expected to start, if the heads of a queue start in the order in which they are read.
#: More can be read when they are used up. `FEW`: the most heads that are read in addition.
EXACT, FEW = 1.2, 3


class HeadReader:
    """Reads the heads of queues, and locks them: in steps where jobs start in the order in which they are read, else
    those that come first of a window of each queue.

    cut: the ids of the queues that hold more jobs than have been read.
    usual: the share that each queue had in the jobs that started last time. A queue that is missing is expected to have
    an equal share.
    """

    def __init__(
        self,
        connection: Connection,
        arrangement: OrderingPolicy,
        admission_state: AdmissionState,
        *,
        free_units: int,
        usual: Mapping[QueueId, float] = MappingProxyType({}),
        is_used_up: Callable[[ConstrainedQueue], bool] = lambda _: False,
    ) -> None:
        """Prepare to read; at most `free_units` jobs can start. is_used_up: whether no further job of a queue can."""
        self._connection, self._ordering_policy, self._state = connection, arrangement, admission_state
        self._queues, self._bounds = dict[QueueId, ConstrainedQueue](), dict[QueueId, int]()
        self._free_units, self._usual, self._is_used_up = free_units, usual, is_used_up
        self._read, self._known = dict[QueueId, ReadHeads](), set[int]()
        self._repeats = 0
        self.cut: set[QueueId] = set()

    @property
    def cut_queues(self) -> dict[QueueId, ConstrainedQueue]:
        """The queues that hold more jobs than have been read, by id."""
        return {queue_id: self._queues[queue_id] for queue_id in self.cut}

    def first(
        self,
        queues: Sequence[ConstrainedQueue],
        most: Sequence[float] | None = None,
        expected: Mapping[QueueId, float] = MappingProxyType({}),
    ) -> list[QueueHead]:
        """Read the first heads of these queues, probably enough to fill the free units.

        most: for each queue the number of its jobs that can start at once; without it any number. expected: how many of
        them will probably start, if that can be told.
        """
        for queue, each in zip(queues, most or [math.inf] * len(queues), strict=True):
            self._queues[queue.id] = queue
            self._bounds[queue.id] = int(min(self._free_units + LEAST, LEAST + SPARE * each))
        ids = [queue.id for queue in queues]
        even = 1.0 / max(1, len(ids))
        if self._ordering_policy.within is None:
            alone = Counter(queue.instance for queue in queues)
            found = self._next(
                {
                    queue.id: _with_rest(expected[queue.id])
                    if queue.id in expected and alone[queue.instance] == 1
                    else _with_spare(self._free_units * self._usual.get(queue.id, even))
                    for queue in queues
                }
            )
            return found + self._further_dated(found, ids)
        return self._chosen(queues, self._ordering_policy.within, even)

    def _chosen(self, queues: Sequence[ConstrainedQueue], within: OrderWithinQueue, even: float) -> list[QueueHead]:
        """Read the window of each queue, and lock the jobs of it that come first by the order within a queue.

        At least `LEAST` of each, however few units are free: the first ones may be closed by a gate of their own.
        """
        window = min(constrained.WINDOW, max(LEAST, constrained.MOST_IN_WINDOWS // max(1, len(queues))))
        seen: dict[QueueId, list[QueueHead]] = defaultdict(list)
        for head in constrained.heads(
            self._connection,
            queues,
            limits=[window] * len(queues),
            now=self._state.now,
            ageing=self._ordering_policy.ageing,
            lock=False,
        ):
            seen[head.queue.id].append(head)
        count = max(LEAST, math.ceil(SPARE * self._free_units * even))
        most = sum(min(count, len(heads)) for heads in seen.values())
        # The first of each queue, then the second of each: what others have locked is replaced by what comes next.
        ranked = [[*enumerate(within(heads, self._state))] for heads in seen.values()]
        heads = [head for _, head in sorted(itertools.chain(*ranked), key=itemgetter(0))][: TRIED * most]
        locked = constrained.lock_first(self._connection, [head.job.id for head in heads], most=most)
        return [head for head in heads if head.job.id in locked]

    def more(
        self,
        left: Sequence[QueueHead],
        started: Mapping[QueueId, int],
        unread: Collection[QueueId] | None = None,
        refused: Mapping[QueueId, int] = MappingProxyType({}),
        expected: Mapping[QueueId, float] = MappingProxyType({}),
    ) -> list[QueueHead]:
        """Read the next heads of each queue that has too few heads `left`.

        `started`, the number of jobs of each queue that may start, tells how many will be needed. So does `expected`,
        how many more will probably start, if that can be told. A queue that is used up gets at least as many again as
        were read, if it is among the `unread`, without which the next head is not known; None stands for all. A queue
        gets none if no further job of it can start, or if many were `refused` since the last one that may start.
        Otherwise queues whose budgets end would be read to their ends.
        """
        self._repeats += 1
        awaited = self.cut if unread is None or self._repeats > MAX_SPARING_READS else unread
        unasked = Counter(head.queue.id for head in left)
        admitted = sum(started.values())
        pace = (self._free_units - admitted) / max(1, admitted)
        wanted = dict[QueueId, int]()
        for place in sorted(self.cut):
            has_started = started.get(place, 0)
            if refused.get(place, 0) >= LEAST or self._is_used_up(self._queues[place]):
                self.cut.discard(place)
                continue
            count = max(_with_spare(has_started * pace), math.ceil(expected.get(place, 0.0))) - unasked[place]
            if not unasked[place] and place in awaited:
                # No job of the queue has started: read at once all heads that are asked before the queue is given up.
                count = max(count, read := self._read_count(place), 0 if has_started else LEAST - read)
            if self._repeats > MAX_SPARING_READS:
                count = max(count, LEAST - unasked[place])
            if count > 0:
                wanted[place] = count
        # Where all that were waited for get none, the next head is known without a read.
        if unread is not None and wanted.keys().isdisjoint(unread):
            return []
        read_first = wanted.keys() - self._read.keys()
        found = self._next(wanted)
        return found + self._further_dated(found, read_first)

    def _further_dated(self, found: Sequence[QueueHead], read_first: Iterable[QueueId]) -> list[QueueHead]:
        """Read further heads of queues with deadlines that have been read for the first time: a job with a deadline may
        start before jobs in front of it."""
        dated = {head.queue.id for head in found if head.deadline is not None} & self.cut & {*read_first}
        count = math.ceil(SPARE * self._free_units / max(1, len(self._queues)))
        return self._next(dict.fromkeys(sorted(dated), count))

    def _next(self, wanted: Mapping[QueueId, int]) -> list[QueueHead]:
        ids = [queue_id for queue_id, count in wanted.items() if count]
        self.cut.update(wanted.keys() - ids)
        limits = [min(wanted[queue_id], self._bounds[queue_id] - self._read_count(queue_id)) for queue_id in ids]
        found = constrained.heads(
            self._connection,
            [self._queues[queue_id] for queue_id in ids],
            limits=limits,
            read=self._read,
            now=self._state.now,
            ageing=self._ordering_policy.ageing,
        )
        got = Counter(head.queue.id for head in found)
        last = {head.queue.id: head for head in found}
        for queue_id, limit in zip(ids, limits, strict=True):
            if queue_id in last:
                count, head = self._read_count(queue_id) + got[queue_id], last[queue_id]
                self._read[queue_id] = ReadHeads(count, head.rank, head.queued_at, head.job.id)
            has_more = got[queue_id] == limit and self._read_count(queue_id) < self._bounds[queue_id]
            (self.cut.add if has_more else self.cut.discard)(queue_id)
        # With ageing a number of jobs is stepped over. Others may have unlocked jobs in front of them since.
        found = [head for head in found if head.job.id not in self._known]
        self._known.update(head.job.id for head in found)
        return found

    def _read_count(self, queue_id: QueueId) -> int:
        return self._read.get(queue_id, NO_HEADS).jobs


def _with_rest(expected: float) -> int:
    return math.ceil(expected - ROUNDED + min(1.0, expected / MANY))


def _with_spare(expected: float) -> int:
    return math.ceil(EXACT * expected) + min(FEW, math.ceil(expected))


def _mean_cost(heads: Sequence[QueueHead]) -> float | None:
    return max(LEAST_COST, sum([head.estimate for head in heads]) / len(heads)) if heads else None


log = structlog.get_logger()

#: Heads read for each job that may evict others. Some have not waited long enough, or are too large.
HEADS_PER_PREEMPTION = 5
#: Instances that are looked at beyond the number of free units, because each start moves all instances a little; and
#: the most of further instances with the same rank, among which only their jobs tell which one comes first.
FEW_MORE, MANY_ALIKE = 2, 100
#: Constraint sets that an assigner remembers, and pairs of them with an instance whose charges it remembers.
MAX_REMEMBERED = 20_000
#: The least that a job is expected to cost, when it is foreseen how many of each instance will start.
LEAST_COST = 1e-3
#: Seconds for which an assigner does not check whether the demand of an instance has to be recorded again.
DEMAND_RECHECK = DEMAND_INTERVAL / 2


@dataclass(frozen=True)
class AdmissionResult:
    """Jobs that may start, locked, in their order.

    closed_queues, closed_jobs: the numbers that each gate keeps waiting, by its name. empty: why there are no jobs, if
    no gate is the reason. returns: when the first waiting job may start. free_units: those of the pool; None if they
    are enough for a whole batch.
    """

    heads: Sequence[QueueHead] = ()
    closed_queues: Mapping[str, int] = field(default_factory=dict)
    closed_jobs: Mapping[str, int] = field(default_factory=dict)
    empty: str | None = None
    returns: ReleaseTime | None = None
    free_units: int | None = None


class AdmissionController:
    """Admits constrained jobs for one assigner.

    Between two cycles it remembers the queue at which the last walk ended, the pauses that backpressure advises, and
    which demand it has recorded.
    """

    def __init__(self, rules: Rules, *, name: str, fleet: Fleet, chance: random.Random, now: Monotonic) -> None:
        self._name, self._fleet, self._chance, self._now = name, fleet, chance, now
        self._after = constrained.FIRST_QUEUE
        self._until: dict[str, float] = {}
        self._delays: dict[str, float] = {}
        self._state: AdmissionState
        self._started_graph_jobs: list[QueueHead] = []
        self._usual: dict[QueueId, float] = {}
        self._cost = 1.0
        self._noted, self._noting = dict[int, float](), dict[int, float]()
        self._charges, self._terms = dict[tuple[int, int], QueueCharges](), dict[int, Mapping[str, Any]]()
        self.reconfigure(rules)

    def reconfigure(self, rules: Rules) -> None:
        """Use other rules from the next cycle on."""
        self._rules, self._ordering_policy = rules, rules.ordering.policy()

    def pick(self, connection: Connection, scope: Scope, *, batch: int, pace: float) -> AdmissionResult:
        """Lock up to `batch` jobs whose gates are open and for which a bot has room.

        pace: seconds within which no job's failed check is counted twice.
        """
        self._noting, self._started_graph_jobs = {}, []
        for remembered in (self._charges, self._terms):
            if len(remembered) > MAX_REMEMBERED:
                remembered.clear()
        found = constrained.queues(connection, scope, batch=batch, after=self._after, terms=self._terms)
        self._after = found.last
        if found.now is None or not found.queues or not found.free_units:
            return AdmissionResult(empty="empty queue" if found.now is None else "no room")
        queues = self._record_demand(connection, found.queues)
        if any(map(gates.waits_for_windows, queues)):
            meters.lock_meters(connection)
        admission_state = admission_rules.read_admission_state(
            connection,
            queues,
            fleet=self._fleet,
            chance=self._chance,
            now=found.now,
            pressed=found.pressed,
            reserved=found.reserved,
            rules=self._rules,
            charges=self._charges,
        )
        self._settle_weights(connection, queues, admission_state)
        if admission_state.shares is not None:
            metrics.observe_fairness(fair_share.fairness_index(admission_state.shares, admission_state))
        self._state = admission_state
        self._advised(queues, admission_state)
        if self._rules.checkers.checks_limits:
            self._check(
                connection, _open(queues, admission_state), admission_state, free_units=found.free_units, pace=pace
            )
            admission_state.queue_admissions.clear()
        closed = Counter[str]()
        admitted = self._spaced(
            self._admit(connection, queues, admission_state, free_units=found.free_units, closed=closed)
        )
        started = Counter(head.queue.id for head in admitted)
        self._usual = {place: count / len(admitted) for place, count in started.items()}
        self._cost = _mean_cost(admitted) or self._cost
        closed_queues = Counter(
            queue_admission.shut.name
            for queue_admission in admission_state.queue_admissions.values()
            if queue_admission.shut is not None
        )
        empty = None if admitted or closed or closed_queues else "others have them"
        room = found.free_units if found.free_units < batch else None
        times = gates.release_times(queues, admission_state)
        returns = min(times, key=lambda each: each.due, default=None)
        return AdmissionResult(admitted, closed_queues, closed, empty, returns, room)

    def _record_demand(self, connection: Connection, queues: Sequence[ConstrainedQueue]) -> Sequence[ConstrainedQueue]:
        """Record the demand of instances, at most every `DEMAND_RECHECK` seconds.

        Returns the queues without those of instances that another assigner is recording as returned.
        """
        asking, now = admission_rules.instance_ids([queue for queue in queues if queue.managed]), self._now()
        if all(self._noted.get(each, 0.0) > now for each in asking):
            return queues
        others = fair_share_reads.record_demand(connection, asking, self._rules.fair)
        self._noting = dict.fromkeys({*asking} - others, now + DEMAND_RECHECK)
        return [queue for queue in queues if queue.instance not in others]

    def _settle_weights(
        self, connection: Connection, queues: Sequence[ConstrainedQueue], admission_state: AdmissionState
    ) -> None:
        """Settle the lifts of instances whose weight has been changed, whenever their demand was recorded last."""
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
        behind others, so that no further instance can come first, unless gates are closed for single jobs or an
        instance has few jobs.
        """
        lot, known, last, enough = list[ConstrainedQueue](), 0, None, free_units + FEW_MORE
        # If many instances have the same rank, chance decides which are looked at.
        shuffled = sorted(queues, key=lambda _: self._chance.random())
        for rank, group in self._ordering_policy.ordering.ranked(shuffled, admission_state):
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
    ) -> list[QueueHead]:
        ordering, admitted, left = self._ordering_policy.ordering, list[QueueHead](), list[QueueHead]()
        refused = Counter[QueueId]()
        heads = HeadReader(
            connection,
            self._ordering_policy,
            admission_state,
            free_units=free_units,
            usual=self._usual,
            is_used_up=lambda queue: queue_admission(queue, admission_state).is_used_up,
        )
        for lot, until in self._queue_batches(queues, admission_state, free_units=free_units):
            most = [min(gates.max_starts(queue, admission_state), queue.headroom or math.inf) for queue in lot]
            needed = free_units - len(admitted)
            expected = ordering.expected(lot, admission_state, free_units=needed, cost=self._cost)
            left += heads.first(lot, most, expected)
            while len(admitted) < free_units:
                found = admit.admit(
                    left,
                    admission_state,
                    free_units=free_units - len(admitted),
                    ordering=ordering,
                    closed=closed,
                    cut=heads.cut_queues,
                    until=until,
                    refused=refused,
                )
                admitted, left = admitted + found.heads, [*found.left]
                if not found.unread:
                    break
                cut, needed = [*heads.cut_queues.values()], free_units - len(admitted)
                cost = _mean_cost(admitted) or self._cost
                expected = ordering.expected(cut, admission_state, free_units=needed, cost=cost)
                started = Counter(head.queue.id for head in admitted)
                left += heads.more(left, started, found.unread, refused, expected)
            if len(admitted) == free_units:
                break
        return admitted

    def pick_below_minimum(self, connection: Connection, scope: Scope, *, most: int, delay: float) -> list[QueueHead]:
        """Lock up to `most` jobs of instances below their minimum quota whose gates are open.

        They have been queued for at least `delay` seconds. A bot need not have room for them. Jobs that take resources
        of bots, and jobs about which a checker would have to be asked, are left out.
        """
        found = constrained.queues(connection, scope, batch=most, after=constrained.FIRST_QUEUE)
        queues = [queue for queue in found.below_minimum if not resources.need_of(queue)]
        if self._rules.checkers.checks_limits:
            queues = [queue for queue in queues if rates.resource_of(queue.constraints) is None]
        if found.now is None or not queues:
            return []
        if any(map(gates.waits_for_windows, queues)):
            meters.lock_meters(connection)
        admission_state = admission_rules.read_admission_state(
            connection,
            queues,
            fleet=self._fleet,
            chance=self._chance,
            now=found.now,
            pressed=found.pressed,
            reserved=found.reserved,
            rules=self._rules,
            charges=self._charges,
        )
        heads = HeadReader(
            connection, self._ordering_policy, admission_state, free_units=HEADS_PER_PREEMPTION * most
        ).first(_open(queues, admission_state))
        heads = [head for head in heads if orders.waited_seconds(head, admission_state) >= delay]
        return admit.admit(heads, admission_state, free_units=most, ordering=self._ordering_policy.ordering).heads

    def _started(self, connection: Connection, starts: Mapping[ConstrainedQueue, int]) -> None:
        """Let the gates write what these starts change, and begin the pauses that are advised."""
        for gate in gates.GATES:
            gate.started(connection, starts, self._state)
        paused = {key for queue in starts for key in rates.advised_as(_class_of(queue))} & self._delays.keys()
        for each in paused:
            self._until[each] = self._now() + self._delays[each]

    def amounts(self, admitted: AdmissionResult) -> dict[int, Amounts]:
        """Return the amounts that each job takes of counters, by its id, without resources of bots."""
        return {head.job.id: gates.job_charges(head, self._state) for head in admitted.heads}

    def without_token(self, connection: Connection, admitted: AdmissionResult, *, wait: bool) -> set[int]:
        """Lock the rates of these jobs until the transaction ends, and return the ids of the jobs that have to wait,
        because other assigners have used up the rate since it was read. wait: see `rates.lock_buckets`."""
        if not self._state.rates:
            return set()
        drawn = {queue: rates.bucket_names(queue.constraints) for queue in {head.queue for head in admitted.heads}}
        known = sorted({name for names in drawn.values() for name in names} & self._state.rates.keys())
        locked = rates.lock_buckets(connection, known, wait=wait)
        left = {name: locked[name].tokens if name in locked else 0.0 for name in known}
        without = set[int]()
        for head in admitted.heads:
            needed = [name for name in drawn[head.queue] if name in left]
            if any(left[name] < 1.0 for name in needed):
                without.add(head.job.id)
            else:
                left.update((name, left[name] - 1.0) for name in needed)
        return without

    def charge(self, connection: Connection, admitted: AdmissionResult, taken: Sequence[tuple[int, Amounts]]) -> None:
        """Charge the counters with what the leases of these jobs have taken.

        If a limit was reached meanwhile, the transaction is undone.
        """
        counters.take(connection, [amounts for _, amounts in taken], may_overshoot=not self._rules.fair.budget_reserve)
        ids = {job_id for job_id, _ in taken}
        started = [head for head in admitted.heads if head.job.id in ids]
        starts = Counter([head.queue for head in started])
        self._started(connection, starts)
        of_graphs = {queue for queue in starts if graph_share.graph_of(queue.constraints) is not None}
        self._started_graph_jobs = [head for head in started if head.queue in of_graphs] if of_graphs else []

    def after_commit(self) -> None:
        """Take over what belongs to the last transaction, which has been committed."""
        if self._noting:
            self._noted, self._noting = self._noting, {}
        for head in self._started_graph_jobs:
            log.debug(
                "leasehold.node_dispatched",
                job=head.job.public_id,
                graph=graph_share.graph_of(head.queue.constraints),
                priority=round(self._state.scores.get(head.job.id, head.rank), 2),
                active=int(self._state.of(POOL_JOBS).used),
            )
        self._started_graph_jobs = []

    def _advised(self, queues: Iterable[ConstrainedQueue], admission_state: AdmissionState) -> None:
        """Set the advice and the pauses that are left, which begin before the first start."""
        try:
            self._rules.checkers.add_pressure(admission_state.advice)
        except FAILURES as error:
            log.warning("leasehold.backpressure_checker_error", error=str(error))
        delays = {each: advice.delay for each, advice in admission_state.advice.items() if advice.delay > 0}
        used = {_class_of(queue) for queue in queues} if delays else set()
        self._delays = {key: delays[key] for each in used for key in rates.advised_as(each) if key in delays}
        now = self._now()
        self._until = {
            each: min(self._until.get(each, now + delay), now + delay) for each, delay in self._delays.items()
        }
        admission_state.waits = {
            each: max(self._until[key] for key in paused) - now
            for each in used
            if (paused := [key for key in rates.advised_as(each) if key in self._until])
        }

    def _spaced(self, admitted: Sequence[QueueHead]) -> list[QueueHead]:
        """Return these jobs with one of those between whose starts a pause is advised; the others wait for it."""
        if not self._delays:
            return [*admitted]
        found, begun = list[QueueHead](), set[str]()
        for head in admitted:
            pauses = rates.advised_as(_class_of(head.queue)) & self._delays.keys()
            if not pauses & begun:
                begun |= pauses
                found.append(head)
        return found

    def _check(
        self,
        connection: Connection,
        queues: Sequence[ConstrainedQueue],
        admission_state: AdmissionState,
        *,
        free_units: int,
        pace: float,
    ) -> None:
        """Ask the checker once for each resource. If it fails, count that for the first jobs of the queue."""
        settings = self._rules.checkers
        asking = {each for queue in queues if (each := rates.resource_of(queue.constraints)) is not None}
        answers = settings.ask_limits(asking)
        admission_state.refused.update(answers.refused)
        failed = answers.failed
        for each, error in failed.items():
            log.warning("leasehold.rate_limiter_error", resource=each, error=error)
        for each in sorted(asking - failed.keys()):
            delete_skips(connection, each)
        if not failed:
            return
        asked = [each for each in queues if rates.resource_of(each.constraints) in failed]
        heads = HeadReader(connection, self._ordering_policy, admission_state, free_units=free_units).first(asked)
        skipped = [
            SkippedJob(head.job.id, used := str(rates.resource_of(head.queue.constraints)), failed[used])
            for head in heads
        ]
        most = settings.max_rate_limit_skips
        for job in skip(connection, skipped, most=most, pace=pace, actor=self._name):
            log.error("leasehold.rate_limiter_error_exhausted", job=job, skips=most)


def _open(queues: Sequence[ConstrainedQueue], admission_state: AdmissionState) -> list[ConstrainedQueue]:
    """Return the queues that no gate closes as a whole."""
    return [queue for queue in queues if queue_admission(queue, admission_state).shut is None]


def _class_of(queue: ConstrainedQueue) -> str:
    return queue.constraints.get("resource_class") or rates.ALL_CLASSES
