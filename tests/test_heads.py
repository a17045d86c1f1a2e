"""Heads are read as they are used up, and those that start are the same as if all had been read."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection

from assigner import admission, gatehouse
from assigner.gatehouse import RULES, Gatehouse
from assigner.heads import LEAST, Heads
from schema import accounts, counters, gated
from schema.accounts import Account
from schema.gated import Found, Head
from schema.ready import Scope
from tests.pool import Pool
from tests.tenancy import Tenancy

ARRANGEMENT = RULES.ordering.made()


def filled(pool: Pool, weights: Sequence[float], *, jobs: int) -> None:
    for nth, weight in enumerate(weights):
        account = Account(credit_weight=weight)
        name = f"i-{nth}"
        pool.database.run(lambda c, name=name, account=account: accounts.put_account(c, name, account, actor="test"))
        for priority in (3, 1, 2):
            pool.submit(jobs // 3, instance=name, priority=priority)


def queues(connection: Connection, *, batch: int) -> Found:
    return gated.queues(connection, Scope(), batch=batch, start=0.5, after=gated.BEGINNING)


def of_all(connection: Connection, *, room: int) -> list[int]:
    """The jobs that would start if every head had been read."""
    found = queues(connection, batch=room)
    assert found.now is not None
    book = gatehouse.opened(connection, found.queues, now=found.now, rules=RULES)
    heads = gated.heads(connection, found.queues, limits=[1000] * len(found.queues), now=found.now)
    admitted = admission.admit(heads, book, room=room, ordering=ARRANGEMENT.ordering)
    return [head.job.id for head in admitted.heads]


@pytest.mark.parametrize("weights", [(1, 1, 40), (1, 2, 3, 4, 5, 6), (0, 1), (7,)])
def test_what_starts_is_what_would_start_if_all_had_been_read(pool: Pool, weights: Sequence[float]) -> None:
    filled(pool, weights, jobs=90)
    pool.bot(capacity=100)
    keeper = Gatehouse(RULES, name="test", chance=pool.chance, now=lambda: 0.0)

    def both(connection: Connection) -> tuple[list[int], list[int]]:
        expected = of_all(connection, room=80)
        # The second look knows from the first which part each queue has.
        found = [keeper.pick(connection, Scope(), batch=80, pace=1.0).heads for _ in range(2)]
        assert found[0] == found[1]
        return [head.job.id for head in found[0]], expected

    found, expected = pool.database.run(both)
    assert found == expected
    assert len(found) == 80


def test_hardly_more_is_read_than_starts(pool: Pool) -> None:
    filled(pool, range(1, 11), jobs=90)
    pool.bot(capacity=100)

    def read(connection: Connection) -> tuple[Sequence[Head], set[int]]:
        found = queues(connection, batch=100)
        assert found.now is not None
        heads = Heads(connection, found.queues, ARRANGEMENT, room=100, now=found.now)
        first = heads.first()
        assert heads.cut == {queue.place for queue in found.queues}
        # One has used up all that was read, the others three of theirs.
        asked = [head for nth, head in enumerate(first) if head.queue.instance_name == "i-9" or nth % 5 == 0]
        left = [head for head in first if head not in asked]
        more = heads.more(left, Counter(head.queue.place for head in asked))
        assert {head.queue.instance_name for head in more} == {"i-9"}
        return [*first, *more], {head.job.id for head in [*first, *more]}

    heads, ids = pool.database.run(read)
    assert len(heads) == len(ids) <= 200


def test_a_head_is_read_once_though_others_let_go_of_those_in_front_of_it(pool: Pool) -> None:
    filled(pool, (1, 1), jobs=90)
    pool.bot(capacity=100)

    def read(connection: Connection) -> list[int]:
        found = queues(connection, batch=20)
        assert found.now is not None
        heads = Heads(connection, found.queues, ARRANGEMENT, room=20, now=found.now)
        with pool.database.engine.connect() as other:
            held = gated.heads(other, found.queues, limits=[5] * len(found.queues), now=found.now)
            first = heads.first()
            other.rollback()
        assert not {head.job.id for head in held} & {head.job.id for head in first}
        more = heads.more([], Counter(head.queue.place for head in first[::2]))
        return [head.job.id for head in [*first, *more]]

    ids = pool.database.run(read)
    assert len(ids) == len(set(ids)) > 20


def test_queues_of_which_few_jobs_may_start_are_not_read_to_their_end(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pool, [1] * 8, jobs=90)
    for nth in range(4):
        Tenancy(pool).quota(f"i-{nth}", maximum=1)
        pool.database.run(lambda c, nth=nth: counters.limit(c, f"instance:i-{nth + 4}:cost", 1.5))
    pool.change("UPDATE job_terms SET estimate = 2")
    pool.bot(capacity=500)
    read = Counter[str]()
    heads = gated.heads

    def counting(*arguments: Any, **fields: Any) -> list[Head]:
        found = heads(*arguments, **fields)
        read.update(heads=len(found), times=1)
        return found

    monkeypatch.setattr(gated, "heads", counting)
    keeper = Gatehouse(RULES, name="test", chance=pool.chance, now=lambda: 0.0)
    started = pool.database.run(lambda c: keeper.pick(c, Scope(), batch=500, pace=1.0).heads)
    assert sorted(head.queue.instance_name for head in started) == [f"i-{nth}" for nth in range(4)]
    assert read["times"] <= 4
    assert read["heads"] <= 4 * (LEAST + 4) + 4 * 78, "no more than at first"
