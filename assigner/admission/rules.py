"""The configured rules for constrained jobs, and the read of the state by which their gates are judged."""

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

from assigner.admission.charges import queue_charges, smallest_numbers
from assigner.admission.checkers import CheckerSettings
from assigner.admission.ordering import OrderingSettings
from assigner.admission.state import POOL_JOBS, AdmissionState
from schema import graphs
from schema.accounting import class_reserves, counters, fair_share, rates
from schema.accounting.counters import Counter
from schema.accounting.fair_share import FairShareSettings
from schema.picking.constrained import ConstrainedQueue, QueueId
from schema.policy import priority_classes, time_windows
from schema.policy.time_windows import WindowSchedule
from schema.postgres.connection import Connection


@dataclass(frozen=True)
class Rules:
    """The configured rules for constrained jobs."""

    ordering: OrderingSettings = field(default_factory=OrderingSettings)
    checkers: CheckerSettings = field(default_factory=CheckerSettings)
    fair: FairShareSettings = field(default_factory=FairShareSettings)


#: The rules of an empty configuration.
RULES = Rules()


def read_admission_state(
    connection: Connection,
    queues: Sequence[ConstrainedQueue],
    *,
    now: datetime,
    rules: Rules,
    lacking: Mapping[QueueId, str] = MappingProxyType({}),
    pressed: bool = True,
    reserved: bool = True,
    charges: MutableMapping[Hashable, Any] | None = None,
    held: Collection[str] = (),
) -> AdmissionState:
    """Read the state by which the gates of these queues are judged.

    lacking: the resource that no bot has left, by queue, as the caller has found out. pressed: there may be advice of
    backpressure. reserved: something may be kept for a class. charges: what the caller remembers of earlier reads, to
    which this adds. held: counters and rates that somebody holds, so that nothing can be taken from them now.
    """
    reserves = class_reserves.read(connection) if reserved else {}
    of_classes = {class_reserves.running_counter(name) for name in reserves}
    known = {} if charges is None else charges
    charged = [queue_charges(queue, known) for queue in queues]
    shared = {each.shared for each in charged}
    buckets = rates.read_buckets(connection, [*{name for each in charged for name in each.tokens}])
    classes = sorted({each.job_class for each in shared if each.job_class is not None})
    admission_state = AdmissionState(
        now,
        {name: Counter(0.0, bucket.tokens) for name, bucket in buckets.items()},
        reserve=rules.fair.budget_reserve,
        rates=buckets,
        seconds=priority_classes.expected_seconds(connection, classes),
        openings=time_windows.read(connection) if classes else WindowSchedule(),
        lacking=lacking,
        reserves=reserves,
        charges=known,
    )
    if any(queue.managed for queue in queues):
        read_shares(connection, queues, admission_state, rules)
    of_keys = [name for each in charged for name in each.keys]
    taken = [each.beside_shares if admission_state.shares else each.counters for each in shared]
    admission_state.counters |= counters.read(connection, [*of_classes.union(of_keys, *taken)])
    admission_state.lock_numbers = numbers = smallest_numbers(charged)
    if numbers:
        counters.read_locks(connection, admission_state.counters, numbers)
    admission_state.counters |= {name: Counter(0.0, 0.0) for name in held if name in admission_state.counters}
    if pressed:
        admission_state.advice = rates.read_advice(connection)
    if rules.ordering.kind == "graph":
        limit = admission_state.of(POOL_JOBS).most
        admission_state.limit_graphs(
            rules.ordering.graph_share(limit=limit, graphs=graphs.active_graphs(connection)), queues
        )
    return admission_state


def read_shares(
    connection: Connection, queues: Sequence[ConstrainedQueue], admission_state: AdmissionState, rules: Rules
) -> None:
    """Read the shares of the instances of these queues into the state, with the counters that come with them."""
    admission_state.shares = fair_share.read_shares(connection, instance_ids(queues), rules.fair)
    admission_state.counters |= admission_state.shares.counters


def instance_ids(queues: Sequence[ConstrainedQueue]) -> list[int]:
    """Return the ids of the instances of these queues."""
    return sorted({queue.instance for queue in queues})
