"""Jobs that ask for more than a place: they wait at gates, take of counters while they run, and give back."""

from assigner.explain import explain
from schema import counters, moves
from tests.pool import Pool, active, completed


def limit(pool: Pool, name: str, most: float) -> None:
    pool.database.run(lambda c: counters.limit(c, name, most))


def used(pool: Pool, name: str) -> float:
    found = pool.database.run(lambda c: counters.read(c, [name]))
    return found[name].used if found else 0.0


def test_a_lock_is_held_by_one_job_at_a_time_and_keeps_nobody_behind_it_waiting(pool: Pool) -> None:
    first, second = pool.submit(2, terms={"locks": ["tree"]}, priority=-5)
    (free,) = pool.submit(terms={"locks": ["other"]})
    (plain,) = pool.submit()
    bot = pool.bot(capacity=10)
    pool.assigner().run_once()
    given = bot.take()
    assert {lease["job"] for lease in given} == {first, free, plain}
    assert used(pool, "lock:default:tree") == 1
    bot.sync(*(completed(lease) for lease in given))
    assert used(pool, "lock:default:tree") == 0
    pool.assigner().run_once()
    (last,) = bot.take()
    assert last["job"] == second
    bot.sync(completed(last, "failed"))


def test_a_lock_comes_back_when_the_bot_is_gone(pool: Pool) -> None:
    pool.submit(terms={"locks": ["tree"]})
    bot = pool.bot()
    pool.assigner().run_once()
    bot.take()
    pool.restarted(bot)
    assert used(pool, "lock:default:tree") == 0


def test_a_limit_on_running_jobs_of_a_managed_instance_holds(pool: Pool) -> None:
    pool.change("INSERT INTO instances (name, managed) VALUES ('acme', true)")
    limit(pool, "instance:acme:jobs", 3)
    pool.submit(8, instance="acme")
    bot = pool.bot(capacity=10)
    for _ in range(3):
        pool.assigner().run_once()
    given = bot.take()
    assert len(given) == 3
    bot.sync(*(completed(lease) for lease in given[:2]), active(given[2]))
    pool.assigner().run_once()
    assert used(pool, "instance:acme:jobs") == 3


def test_estimates_are_reserved_of_a_budget_and_what_was_used_stays(pool: Pool) -> None:
    pool.change("INSERT INTO instances (name, managed) VALUES ('acme', true)")
    limit(pool, "instance:acme:cost", 10)
    pool.submit(5, instance="acme", estimated_cost=4)
    bot = pool.bot(capacity=10)
    pool.assigner().run_once()
    given = bot.take()
    assert len(given) == 2, "a third one could overshoot"
    assert used(pool, "instance:acme:cost") == 8
    bot.sync(completed(given[0]), active(given[1]))
    assert used(pool, "instance:acme:cost") == 8, "nobody said what it cost, so it is what was estimated"
    pool.database.run(lambda c: counters.roll(c, window=-60, limit=10))
    assert used(pool, "instance:acme:cost") == 4
    pool.assigner().run_once()
    assert used(pool, "instance:acme:cost") == 8


def test_two_assigners_that_see_the_last_slot_do_not_both_take_it(pool: Pool) -> None:
    pool.submit(2, terms={"locks": ["tree"]})
    pool.bot(capacity=10)
    one, other = pool.assigner(), pool.assigner()
    one.run_once()
    other.run_once()
    assert used(pool, "lock:default:tree") == 1


def test_explain_names_the_gate_that_is_closed(pool: Pool) -> None:
    pool.submit(terms={"locks": ["tree"]})
    pool.bot(capacity=10)
    pool.assigner().run_once()
    (job,) = pool.submit(terms={"locks": ["tree"]})
    told = pool.database.run(lambda c: explain(c, job, instances=None, cooldown=600))
    assert told is not None
    assert [gate.gate for gate in told.gates if not gate.open] == ["locks"]
    assert told.sentence == "it does not run because lock 'tree' is held 1 times of 1"
    assert told.change == ["wait until the locks that it names are free"]


def test_a_job_that_fits_no_bot_now_keeps_nobody_behind_it_waiting(pool: Pool) -> None:
    pool.submit(30, terms={"locks": []}, units=8)
    (small,) = pool.submit(terms={"locks": []})
    bot = pool.bot(capacity=4)
    assigner = pool.assigner()
    for _ in range(3):
        assigner.run_once()
    assert [lease["job"] for lease in bot.take()] == [small]


def test_a_new_priority_is_a_new_place_in_the_line(pool: Pool) -> None:
    first, second = pool.submit(2, terms={"locks": ["tree"]})
    pool.database.run(lambda c: moves.set_priority(c, [second], -5, instances=None, reason=None, actor="test"))
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    assert [lease["job"] for lease in bot.take()] == [second]
    assert first != second
