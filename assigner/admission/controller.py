"""The way of jobs that ask for more than a place: their queues are read, those that may start go through and count."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

import structlog
from sqlalchemy import Connection

from assigner import metrics
from assigner.admission import admit, fair_share, gates, graph_share, state
from assigner.admission import ordering as ordering_admission
from assigner.admission import rules as rules_admission
from assigner.admission.admit import Rank
from assigner.admission.checkers import FAILURES
from assigner.admission.gates import POOL_JOBS, Backpressure, Rate, Return
from assigner.admission.ordering import Arrangement
from assigner.admission.rules import Rules
from assigner.admission.state import Book
from assigner.placement import resources
from schema import graphs as graphs_schema
from schema.accounting import counters, rates
from schema.accounting import fair_share as fair_share_accounting
from schema.accounting.counters import Charge
from schema.accounting.fair_share import NOTE_INTERVAL
from schema.accounting.rates import Advice
from schema.clock import Monotonic
from schema.moves.grant import Granted
from schema.moves.hold import Skipped, forget_skips, skip
from schema.picking import constrained
from schema.picking.constrained import GatedQueue, Head, Place
from schema.picking.ready import Scope
from schema.policy import meters

# The first jobs of queues whose gates are open, locked: first about as many as will start, then more of those queues
# that turn out to have more to start.


#: Heads that are read, and locked, for each job that may be placed, where any of them may start first; from each queue
#: `LEAST` are read.
SPARE, LEAST = 4.0, 8
#: Where those that are read first also start first, more can be read when they are used up: so many for each job that
#: is expected to start, and up to a few.
EXACT, FEW = 1.2, 3


class Heads:
    """`cut`: the places of those queues that have more than has been read.

    `usual`: which part of what started each queue had when it was looked at before; one that is not there is expected
    to have as much as any other.
    """

    def __init__(
        self,
        connection: Connection,
        arrangement: Arrangement,
        *,
        room: int,
        now: datetime,
        usual: Mapping[Place, float] = MappingProxyType({}),
    ) -> None:
        """`room` jobs can start."""
        self._connection, self._arrangement, self._now = connection, arrangement, now
        self._queues, self._bounds = dict[Place, GatedQueue](), dict[Place, int]()
        self._room, self._usual = room, usual
        self._read, self._known = Counter[Place](), set[int]()
        self.cut: set[Place] = set()

    def first(self, queues: Sequence[GatedQueue], most: Sequence[float] | None = None) -> list[Head]:
        """Of these queues so many that `room` can be filled, as far as one can tell before any has started. Of each
        `most` jobs can start at once, where it is given."""
        for queue, each in zip(queues, most or [math.inf] * len(queues), strict=True):
            self._queues[queue.place] = queue
            self._bounds[queue.place] = int(min(self._room, LEAST + SPARE * each))
        places = [queue.place for queue in queues]
        even = 1.0 / max(1, len(places))
        if self._arrangement.exact:
            found = self._next({place: _with_spare(self._room * self._usual.get(place, even)) for place in places})
            # Where jobs have deadlines, some of those behind may come before those in front.
            dated = {head.queue.place for head in found if head.deadline is not None} & self.cut
            return found + self._next(dict.fromkeys(sorted(dated), math.ceil(SPARE * self._room * even)))
        return self._next(dict.fromkeys(places, max(LEAST, math.ceil(SPARE * self._room * even))))

    def more(self, left: Sequence[Head], started: Mapping[Place, int]) -> list[Head]:
        """Those that come next in the queues of which not enough are `left`, if it goes on as it has gone so far: so
        many of each have `started`. Of a queue that is used up at least as many as have been read; none of one of which
        some were asked and none has started."""
        unasked = Counter(head.queue.place for head in left)
        admitted = sum(started.values())
        pace = (self._room - admitted) / max(1, admitted)
        wanted = dict[Place, int]()
        for place in sorted(self.cut):
            asked, has_started = self._read[place] - unasked[place], started.get(place, 0)
            if asked >= LEAST and not has_started:
                self.cut.discard(place)
                continue
            count = _with_spare(has_started * pace) - unasked[place]
            if not unasked[place]:
                # Where none has started, all those that are asked before it is given up at once.
                count = max(count, self._read[place], 0 if has_started else LEAST - self._read[place])
            if count > 0:
                wanted[place] = count
        return self._next(wanted)

    def _next(self, wanted: Mapping[Place, int]) -> list[Head]:
        places = list(wanted)
        limits = [min(wanted[place], self._bounds[place] - self._read[place]) for place in places]
        found = constrained.heads(
            self._connection,
            [self._queues[place] for place in places],
            limits=limits,
            skips=[self._read[place] for place in places],
            now=self._now,
            ageing=self._arrangement.ageing,
        )
        got = Counter(head.queue.place for head in found)
        # Where others have let go of rows in front since, some of those behind are the ones that were read before.
        found = [head for head in found if head.job.id not in self._known]
        self._known.update(head.job.id for head in found)
        for place, limit in zip(places, limits, strict=True):
            self._read[place] += got[place]
            has_more = got[place] == limit and self._read[place] < self._bounds[place]
            (self.cut.add if has_more and self._arrangement.exact else self.cut.discard)(place)
        return found


def _with_spare(expected: float) -> int:
    return math.ceil(EXACT * expected) + min(FEW, math.ceil(expected))


log = structlog.get_logger()

#: Heads that are looked at for each job that may be preempted for: some of them wait too short or are too large.
OWED_LOOK = 5
#: Instances that are looked at beyond those that there is room for, because what others get moves all of them a little;
#: and up to how many there are more where the last ones are alike, so that only their jobs tell who comes first.
FEW_MORE, MANY_ALIKE = 2, 100
#: Seconds for which an assigner need not look whether what it has noted of instances is to be noted again.
NOTED = NOTE_INTERVAL / 2


@dataclass(frozen=True)
class Admitted:
    """Jobs that may start, locked, in their order.

    `closed_queues`, `closed_jobs`: how many a gate has kept waiting, by its name; `empty`: why there are no jobs at
    all, if no gate has; `returns`: when the first of them may start.
    """

    heads: Sequence[Head] = ()
    closed_queues: Mapping[str, int] = field(default_factory=dict)
    closed_jobs: Mapping[str, int] = field(default_factory=dict)
    empty: str | None = None
    returns: Return | None = None


class Gatehouse:
    """What one assigner goes by, and what it keeps between two looks: how far it has come, and whom it lets wait."""

    def __init__(self, rules: Rules, *, name: str, chance: random.Random, now: Monotonic) -> None:
        self._name, self._chance, self._now = name, chance, now
        self._after = constrained.BEGINNING
        self._until: dict[str, float] = {}
        self._delays: dict[str, float] = {}
        self._book: Book
        self._dispatched: list[Head] = []
        self._usual: dict[Place, float] = {}
        self._noted, self._noting = dict[int, float](), dict[int, float]()
        self.reconfigure(rules)

    def reconfigure(self, rules: Rules) -> None:
        """Go by other rules from the next look on."""
        self._rules, self._arrangement = rules, rules.ordering.made()

    def pick(self, connection: Connection, scope: Scope, *, batch: int, pace: float) -> Admitted:
        """Lock up to `batch` jobs that go through their gates and for which a free bot is there. `pace`: seconds within
        which no job's failed check is counted twice."""
        self._noting = {}
        found = constrained.queues(connection, scope, batch=batch, start=self._chance.random(), after=self._after)
        self._after = found.last
        if found.now is None or not found.queues or not found.room:
            return Admitted(empty="empty queue" if found.now is None else "no room")
        queues = self._asking(connection, found.queues)
        if any(map(gates.windowed, queues)):
            meters.hold(connection)
        book = rules_admission.opened(connection, queues, now=found.now, pressed=found.pressed, rules=self._rules)
        if book.shares is not None:
            metrics.observe_fairness(fair_share.index(book.shares, book))
        self._book = book
        self._advised(queues, book)
        if self._rules.checkers.checks_limits:
            self._check(connection, _open(queues, book), book, room=found.room, pace=pace)
            book.tabs.clear()
        closed = Counter[str]()
        admitted = self._admit(connection, queues, book, room=found.room, closed=closed)
        started = Counter(head.queue.place for head in admitted)
        self._usual = {place: count / len(admitted) for place, count in started.items()}
        closed_queues = Counter(tab.shut.name for tab in book.tabs.values() if tab.shut is not None)
        empty = None if admitted or closed or closed_queues else "others have them"
        return Admitted(admitted, closed_queues, closed, empty, self._returns(queues, book))

    def _asking(self, connection: Connection, queues: Sequence[GatedQueue]) -> Sequence[GatedQueue]:
        """Note, now and then, who asks for something; leaves out those of whom somebody else notes that they have come
        back."""
        asking, now = rules_admission.instances([queue for queue in queues if queue.managed]), self._now()
        if all(self._noted.get(each, 0.0) > now for each in asking):
            return queues
        others = fair_share_accounting.note_demand(connection, asking, self._rules.fair)
        self._noting = dict.fromkeys({*asking} - others, now + NOTED)
        return [queue for queue in queues if queue.instance not in others]

    def _lots(
        self, queues: Sequence[GatedQueue], book: Book, *, room: int
    ) -> Iterator[tuple[list[GatedQueue], Rank | None]]:
        """The queues that no gate closes, in lots, and where the first one behind each lot stands. The first lot is of
        hardly more instances than there is room for: as each job that starts puts its instance behind others, no more
        can be the first, unless gates are closed for their jobs alone or they have few."""
        lot, known, last, enough = list[GatedQueue](), 0, None, room + room // 8 + FEW_MORE
        # Among many that are alike chance tells who is looked at.
        for rank, group in self._arrangement.ordering.ranked(self._chance.sample(queues, len(queues)), book):
            if known >= enough and (rank != last or known >= MANY_ALIKE):
                yield lot, rank
                lot, known, enough = [], 0, 2 * enough
            open_ones = _open(group, book)
            lot += open_ones
            known, last = known + bool(open_ones), rank
        yield lot, None

    def _admit(
        self,
        connection: Connection,
        queues: Sequence[GatedQueue],
        book: Book,
        *,
        room: int,
        closed: Counter[str],
    ) -> list[Head]:
        ordering, admitted, left = self._arrangement.ordering, list[Head](), list[Head]()
        heads = Heads(connection, self._arrangement, room=room, now=book.now, usual=self._usual)
        for lot, until in self._lots(queues, book, room=room):
            most = [min(state.most(queue, book), queue.headroom or math.inf) for queue in lot]
            left += heads.first(lot, most)
            while len(admitted) < room:
                found = admit.admit(
                    left, book, room=room - len(admitted), ordering=ordering, closed=closed, cut=heads.cut, until=until
                )
                admitted, left = admitted + found.heads, [*found.left]
                if not found.is_dry:
                    break
                left += heads.more(left, Counter(head.queue.place for head in admitted))
            if len(admitted) == room:
                break
        return admitted

    def owed(self, connection: Connection, scope: Scope, *, most: int, delay: float) -> list[Head]:
        """Lock up to `most` jobs that go through their gates and have been queued for `delay` seconds, of instances
        below their minimum quota, whether a free bot is there or not. What takes of a bot's resources or of a rate, and
        what a checker has to be asked about, is not among them."""
        found = constrained.queues(
            connection, scope, batch=most, start=self._chance.random(), after=constrained.BEGINNING
        )
        queues = [queue for queue in found.owed if not resources.need_of(queue)]
        if self._rules.checkers.checks_limits:
            queues = [queue for queue in queues if rates.resource(queue.terms) is None]
        if found.now is None or not queues:
            return []
        if any(map(gates.windowed, queues)):
            meters.hold(connection)
        self._book = book = rules_admission.opened(
            connection, queues, now=found.now, pressed=found.pressed, rules=self._rules
        )
        open_ones = _open(queues, book)
        # A token would be taken long before the job starts.
        open_ones = [queue for queue in open_ones if not any(map(book.rates.get, rates.names(queue.terms)))]
        heads = Heads(connection, self._arrangement, room=OWED_LOOK * most, now=book.now).first(open_ones)
        heads = [head for head in heads if ordering_admission.waited(head, book) >= delay]
        return admit.admit(heads, book, room=most, ordering=self._arrangement.ordering).heads

    def reserve(self, connection: Connection, heads: Iterable[Head], fences: Mapping[int, int]) -> None:
        """Count what those jobs that `owed` gave last and that have these fences will take when they get the leases
        that room is reserved for."""
        book = self._book
        wanted = [head for head in heads if head.job.id in fences]
        charges = [Charge(head.job.id, fences[head.job.id] + 1, state.amounts(head, book)) for head in wanted]
        counters.take(connection, charges, may_overshoot=not self._rules.fair.budget_reserve)
        self._started(connection, wanted)

    def _started(self, connection: Connection, started: Sequence[Head]) -> None:
        """Take the tokens of these jobs, keep the caps of their graphs, and begin to wait where that is advised."""
        times = Counter(head.queue.place for head in started)
        queues = {head.queue.place: head.queue for head in started}
        wanted = Counter[str]()
        for place, queue in queues.items():
            wanted.update(dict.fromkeys(self._book.tab(queue).buckets, times[place]))
        rates.draw(connection, wanted)
        graphs = {graph for queue in queues.values() if (graph := graph_share.graph_of(queue.terms)) is not None}
        if self._book.portion is not None:
            cap = self._book.portion.cap
            graphs_schema.keep(connection, {graph_share.counter_of(each): cap for each in sorted(graphs)})
        for used in {_class_of(queue) for queue in queues.values()} & self._delays.keys():
            self._until[used] = self._now() + self._delays[used]

    def charge(self, connection: Connection, admitted: Admitted, granted: Sequence[Granted]) -> None:
        """Count what the jobs that have got a lease take. A limit that was reached meanwhile undoes the transaction."""
        fences = {lease.job_id: lease.fence for lease in granted}
        started = [head for head in admitted.heads if head.job.id in fences]
        of_bots = resources.taken(connection, started, granted)
        charges = []
        for head in started:
            job, amounts = head.job.id, state.amounts(head, self._book)
            charges.append(Charge(job, fences[job], {**amounts, **of_bots[job]} if job in of_bots else amounts))
        counters.take(connection, charges, may_overshoot=not self._rules.fair.budget_reserve)
        self._started(connection, started)
        self._dispatched = [head for head in started if graph_share.graph_of(head.queue.terms) is not None]

    def tell(self) -> None:
        """What was noted and charged last has been committed."""
        if self._noting:
            self._noted, self._noting = self._noting, {}
        for head in self._dispatched:
            log.debug(
                "leasehold.graph_job_started",
                job=head.job.public_id,
                graph=graph_share.graph_of(head.queue.terms),
                priority=round(self._book.scores.get(head.job.id, head.rank), 2),
                active=int(self._book.of(POOL_JOBS).used),
            )
        self._dispatched = []

    def _advised(self, queues: Iterable[GatedQueue], book: Book) -> None:
        """What is advised, and for how long this assigner still waits: the first time before anything starts."""
        try:
            allowed, delay = self._rules.checkers.pressure.can_start()
        except FAILURES as error:
            log.warning("leasehold.backpressure_checker_error", error=str(error))
            allowed, delay = True, 0.0
        if not allowed or delay > 0:
            general = book.advice.get(rates.ALL, Advice(allowed=True))
            book.advice[rates.ALL] = Advice(general.allowed and allowed, max(general.delay, delay))
        now = self._now()
        used = {_class_of(queue) for queue in queues}
        self._delays = {each: delay for each in used if (delay := rates.of(book.advice, each).delay) > 0}
        self._until = {
            each: min(self._until.get(each, now + delay), now + delay) for each, delay in self._delays.items()
        }
        book.waits = {each: until - now for each, until in self._until.items()}

    def _check(
        self, connection: Connection, queues: Sequence[GatedQueue], book: Book, *, room: int, pace: float
    ) -> None:
        """Ask the checker once for each resource; count for the first jobs of a queue that it could not tell."""
        settings = self._rules.checkers
        failed: dict[str, str] = {}
        for used in sorted({each for queue in queues if (each := rates.resource(queue.terms)) is not None}):
            resource_class, _, model = used.partition("/")
            try:
                if settings.limits.is_rate_limited(resource_class, model or None):
                    book.refused[used] = f"'{used}' is limited, says the checker '{settings.rate_limit}'"
            except FAILURES as error:
                failed[used] = f"{type(error).__name__}: {error}"
                book.refused[used] = f"the rate limit of '{used}' cannot be checked: {failed[used]}"
                log.warning("leasehold.rate_limiter_error", resource=used, error=failed[used])
            else:
                forget_skips(connection, used)
        if not failed:
            return
        asked = [each for each in queues if rates.resource(each.terms) in failed]
        heads = Heads(connection, self._arrangement, room=room, now=book.now).first(asked)
        skipped = [Skipped(head.job.id, used := str(rates.resource(head.queue.terms)), failed[used]) for head in heads]
        most = settings.max_rate_limit_skips
        for job in skip(connection, skipped, most=most, pace=pace, actor=self._name):
            log.error("leasehold.rate_limiter_error_exhausted", job=job, skips=most)

    def _returns(self, queues: Sequence[GatedQueue], book: Book) -> Return | None:
        """When the first of the queues that wait for nothing else may start a job again."""
        found: list[Return] = []
        if not book.rates and not book.waits:
            return None
        for queue in queues:
            gate = state.shut(queue, book)
            if isinstance(gate, Rate):
                buckets = [book.rates[name] for name in rates.names(queue.terms) if name in book.rates]
                empty = [bucket for bucket in buckets if bucket.tokens < 1.0]
                if empty:
                    slowest = max(empty, key=lambda bucket: bucket.due)
                    found.append(Return(slowest.due, slowest.slack))
            elif isinstance(gate, Backpressure) and (wait := book.waits.get(_class_of(queue), 0.0)) > 0:
                found.append(Return(wait, wait))
        return min(found, key=lambda each: each.due, default=None)


def _open(queues: Sequence[GatedQueue], book: Book) -> list[GatedQueue]:
    """Those that no gate closes as a whole."""
    return [queue for queue in queues if book.tab(queue).shut is None]


def _class_of(queue: GatedQueue) -> str:
    return queue.terms.get("resource_class") or rates.ALL
