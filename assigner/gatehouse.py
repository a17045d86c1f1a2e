"""The way of jobs that ask for more than a place: their queues are read, those that may start go through and count."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from sqlalchemy import Connection

from assigner import admission, books, fairness, fitting, lines, metrics, portions, terms, timetable
from assigner.admission import Rank
from assigner.books import Rules
from assigner.checkers import FAILURES
from assigner.counted import POOL_JOBS
from assigner.heads import Heads
from assigner.pressure import Backpressure
from assigner.rate import Rate, Return
from assigner.terms import Book
from schema import backpressure, counters, gated, graph_shares, meters, moves, rates, shares
from schema.backpressure import Advice
from schema.clock import Monotonic
from schema.counters import Charge
from schema.gated import GatedQueue, Head, Place
from schema.moves import Granted
from schema.ready import Scope
from schema.shares import NOTE_INTERVAL

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
        self._after = gated.BEGINNING
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
        found = gated.queues(connection, scope, batch=batch, start=self._chance.random(), after=self._after)
        self._after = found.last
        if found.now is None or not found.queues or not found.room:
            return Admitted(empty="empty queue" if found.now is None else "no room")
        queues = self._asking(connection, found.queues)
        if any(map(timetable.windowed, queues)):
            meters.hold(connection)
        book = books.opened(connection, queues, now=found.now, pressed=found.pressed, rules=self._rules)
        if book.shares is not None:
            metrics.observe_fairness(fairness.index(book.shares, book))
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
        asking, now = books.instances([queue for queue in queues if queue.managed]), self._now()
        if all(self._noted.get(each, 0.0) > now for each in asking):
            return queues
        others = shares.note_demand(connection, asking, self._rules.fair)
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
            most = [min(terms.most(queue, book), queue.headroom or math.inf) for queue in lot]
            left += heads.first(lot, most)
            while len(admitted) < room:
                found = admission.admit(
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
        found = gated.queues(connection, scope, batch=most, start=self._chance.random(), after=gated.BEGINNING)
        queues = [queue for queue in found.owed if not fitting.need_of(queue)]
        if self._rules.checkers.checks_limits:
            queues = [queue for queue in queues if rates.resource(queue.terms) is None]
        if found.now is None or not queues:
            return []
        if any(map(timetable.windowed, queues)):
            meters.hold(connection)
        self._book = book = books.opened(connection, queues, now=found.now, pressed=found.pressed, rules=self._rules)
        open_ones = _open(queues, book)
        # A token would be taken long before the job starts.
        open_ones = [queue for queue in open_ones if not any(map(book.rates.get, rates.names(queue.terms)))]
        heads = Heads(connection, self._arrangement, room=OWED_LOOK * most, now=book.now).first(open_ones)
        heads = [head for head in heads if lines.waited(head, book) >= delay]
        return admission.admit(heads, book, room=most, ordering=self._arrangement.ordering).heads

    def reserve(self, connection: Connection, heads: Iterable[Head], fences: Mapping[int, int]) -> None:
        """Count what those jobs that `owed` gave last and that have these fences will take when they get the leases
        that room is reserved for."""
        book = self._book
        wanted = [head for head in heads if head.job.id in fences]
        charges = [Charge(head.job.id, fences[head.job.id] + 1, terms.amounts(head, book)) for head in wanted]
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
        graphs = {graph for queue in queues.values() if (graph := portions.graph_of(queue.terms)) is not None}
        if self._book.portion is not None:
            cap = self._book.portion.cap
            graph_shares.keep(connection, {portions.counter_of(each): cap for each in sorted(graphs)})
        for used in {_class_of(queue) for queue in queues.values()} & self._delays.keys():
            self._until[used] = self._now() + self._delays[used]

    def charge(self, connection: Connection, admitted: Admitted, granted: Sequence[Granted]) -> None:
        """Count what the jobs that have got a lease take. A limit that was reached meanwhile undoes the transaction."""
        fences = {lease.job_id: lease.fence for lease in granted}
        started = [head for head in admitted.heads if head.job.id in fences]
        of_bots = fitting.taken(connection, started, granted)
        charges = []
        for head in started:
            job, amounts = head.job.id, terms.amounts(head, self._book)
            charges.append(Charge(job, fences[job], {**amounts, **of_bots[job]} if job in of_bots else amounts))
        counters.take(connection, charges, may_overshoot=not self._rules.fair.budget_reserve)
        self._started(connection, started)
        self._dispatched = [head for head in started if portions.graph_of(head.queue.terms) is not None]

    def tell(self) -> None:
        """What was noted and charged last has been committed."""
        if self._noting:
            self._noted, self._noting = self._noting, {}
        for head in self._dispatched:
            log.debug(
                "leasehold.graph_job_started",
                job=head.job.public_id,
                graph=portions.graph_of(head.queue.terms),
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
            general = book.advice.get(backpressure.ALL, Advice(allowed=True))
            book.advice[backpressure.ALL] = Advice(general.allowed and allowed, max(general.delay, delay))
        now = self._now()
        used = {_class_of(queue) for queue in queues}
        self._delays = {each: delay for each in used if (delay := backpressure.of(book.advice, each).delay) > 0}
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
                moves.forget_skips(connection, used)
        if not failed:
            return
        asked = [each for each in queues if rates.resource(each.terms) in failed]
        heads = Heads(connection, self._arrangement, room=room, now=book.now).first(asked)
        skipped = [
            moves.Skipped(head.job.id, used := str(rates.resource(head.queue.terms)), failed[used]) for head in heads
        ]
        most = settings.max_rate_limit_skips
        for job in moves.skip(connection, skipped, most=most, pace=pace, actor=self._name):
            log.error("leasehold.rate_limiter_error_exhausted", job=job, skips=most)

    def _returns(self, queues: Sequence[GatedQueue], book: Book) -> Return | None:
        """When the first of the queues that wait for nothing else may start a job again."""
        found: list[Return] = []
        if not book.rates and not book.waits:
            return None
        for queue in queues:
            gate = terms.shut(queue, book)
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
    return queue.terms.get("resource_class") or backpressure.ALL
