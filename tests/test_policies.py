"""Points that change while jobs wait, and quotas of owners and projects."""

import threading

from assigner import terms
from assigner.operator_resources.priorities import reprice
from schema import classes, counters, moves
from schema.requests import JobRequest
from tests.heads import book, head, queue
from tests.pool import Pool, completed


def of_class(pool: Pool, count: int = 1, **fields: object) -> list[str]:
    return pool.submit(count, **JobRequest(command=["true"], **fields).normal())  # type: ignore[arg-type]


def test_a_10_other_points_move_waiting_jobs_in_batches_while_the_pool_goes_on(pool: Pool) -> None:
    jobs = of_class(pool, 1200, job_class="random", project="site")
    others = of_class(pool, 3, job_class="serious")
    (explicit,) = of_class(pool, job_class="random", priority=60)
    (changed,) = of_class(pool, job_class="random")
    pool.database.run(lambda c: moves.set_priority(c, [changed], -5, instances=None, reason=None, actor="test"))
    pool.database.run(lambda c: classes.put_class(c, "random", points=95, actor="test"))
    bot, done = pool.bot(capacity=2000), threading.Event()

    def assign() -> None:
        while not done.is_set():
            pool.assigner(batch=20).run_once()

    placing = threading.Thread(target=assign)
    placing.start()
    try:
        reprice(pool.database, actor="test")
    finally:
        done.set()
        placing.join()
    waiting = pool.rows(
        "SELECT DISTINCT j.priority, j.rank FROM jobs j JOIN gatings g ON g.id = j.gating"
        ' WHERE j.state = \'queued\' AND g.terms = \'{"job_class": "random", "project": "site"}\''
    )
    assert {(row.priority, row.rank) for row in waiting} <= {(-5, -5)}
    assert {pool.job(job).priority for job in others} == {40}
    assert (pool.job(explicit).priority, pool.job(changed).priority) == (60, -5)
    assert len(bot.take()) + len(pool.rows("SELECT FROM jobs WHERE state = 'queued'")) == len(jobs) + 5
    assert reprice(pool.database, actor="test") == 0, "what is repeated changes nothing"


def test_sa_19_what_was_promoted_keeps_its_place_when_points_change(pool: Pool) -> None:
    (job,) = of_class(pool, job_class="background")
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 hours'")
    pool.change("UPDATE job_terms SET watch_at = now() - interval '1 hour'")
    pool.upkeep().run_once()
    assert pool.job(job).rank == 40.5
    pool.database.run(lambda c: classes.put_class(c, "background", points=15, actor="test"))
    assert reprice(pool.database, actor="test") == 1
    assert (pool.job(job).priority, pool.job(job).rank) == (85, 40.5)


def test_sa_31_a_job_of_an_owner_that_has_used_its_quota_waits_and_the_others_go_on(pool: Pool) -> None:
    pool.database.run(lambda c: counters.limit(c, "owner:default:ann:cost", 5))
    anns = of_class(pool, 4, owner="ann", estimated_cost=2)
    (bobs,) = of_class(pool, owner="bob", estimated_cost=2)
    bot = pool.bot(capacity=10)
    pool.assigner().run_once()
    given = bot.take()
    assert {lease["job"] for lease in given} == {*anns[:2], bobs}, "a third one could overshoot"
    bot.sync(*(completed(lease) for lease in given))
    pool.assigner().run_once()
    assert not bot.take(), "what was used counts until it is older than the window"
    pool.database.run(lambda c: counters.roll(c, window=-60, limit=100))
    pool.assigner().run_once()
    assert {lease["job"] for lease in bot.take()} == set(anns[2:])


def test_sa_32_the_quota_of_a_project_says_so_in_its_words(pool: Pool) -> None:
    limited = queue(project="site", owner="ann")
    full = book(counters={"project:default:site:cost": counters.Counter(10.0, 10.0)})
    near = book(counters={"owner:default:ann:cost": counters.Counter(9.0, 10.0)})
    closed = terms.closed(head(1, 0, of=limited), full)
    assert closed is not None
    assert closed[1] == "Project quota exceeded: 10 of 10 used, and this job is estimated at 1"
    assert terms.shut(limited, full) is not None
    assert terms.closed(head(1, 0, of=limited), near) is None
    small = head(1, 0, of=limited)
    near.tab(limited).take(small)
    again = terms.closed(small, near)
    assert again is not None
    assert again[1].startswith("User quota exceeded: 10 of 10 used")


def test_a_18_a_quota_that_is_just_used_up_is_closed_also_to_what_costs_nothing(pool: Pool) -> None:
    pool.database.run(lambda c: counters.limit(c, "owner:default:ann:cost", 0))
    (job,) = of_class(pool, owner="ann", estimated_cost=0)
    pool.bot()
    pool.assigner().run_once()
    assert pool.job(job).state == "queued"
