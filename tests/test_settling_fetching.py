"""What bots fetch whose calls are settled together: only what each may have, and no more than quotas leave."""

from typing import Any

import pytest

from tests.pool import Bot, Pool, active, completed
from tests.racing import Race
from tests.settling import alone, busied, crew, offered, statements, together
from tests.tenancy import Tenancy


def names(answers: list[Any]) -> list[list[str]]:
    """The instances of what each of them was given to start."""
    return [[lease["instance"] for lease in answer["leases"] if lease["state"] == "pending"] for answer in answers]


def finishing(bots: list[Bot], works: list[dict[str, Any]]) -> list[Any]:
    """Each bot reports the end of its job."""
    return [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]


def test_the_most_urgent_jobs_go_in_their_order_to_bots_in_theirs(pool: Pool) -> None:
    bots, works = crew(pool, 4)
    jobs = [pool.submit(priority=priority)[0] for priority in (3, 1, 2, 0)]
    answers = together(bots[0].desk, *finishing(bots, works))
    assert [offered(answer) for answer in answers] == [[jobs[3]], [jobs[1]], [jobs[2]], [jobs[0]]]


def test_no_job_goes_to_two_bots_of_one_batch_when_there_are_too_few(pool: Pool) -> None:
    bots, works = crew(pool, 5)
    jobs = pool.submit(3)
    answers = together(bots[0].desk, *finishing(bots, works))
    assert [offered(answer) for answer in answers] == [[job] for job in jobs] + [[], []]


def test_a_small_job_behind_large_ones_still_reaches_the_bots_with_little_room(pool: Pool) -> None:
    desk = pool.desk(to_capacity=True)
    bots, works = crew(pool, 3, capacity=4, desk=desk)
    bots[0].sync(active(works[0]), capacity=4)
    pool.submit(6, units=4, priority=-1)
    small = pool.submit(2, units=1, priority=1)
    calls = [bots[0].message(completed(works[0])), bots[1].message(active(works[1])), bots[2].message(active(works[2]))]
    answers = together(desk, *calls)
    assert [pool.job(job).units for job in offered(answers[0])] == [4]
    assert offered(answers[1]) + offered(answers[2]) == small


def test_no_bot_is_given_more_units_than_it_has_room_for_and_none_could_have_had_more(pool: Pool) -> None:
    desk = pool.desk(to_capacity=True)
    bots, works = crew(pool, 6, capacity=5, desk=desk)
    sizes = [pool.chance.randint(1, 5) for _ in range(30)]
    for size in sizes:
        pool.submit(units=size)
    calls = finishing(bots[:3], works[:3])
    calls += [bot.message(active(work)) for bot, work in zip(bots[3:], works[3:], strict=True)]
    together(desk, *calls)
    left = pool.row("SELECT min(units) AS smallest FROM jobs WHERE state = 'queued'").smallest
    rooms = [row.room for row in pool.rows("SELECT capacity - in_use AS room FROM bots")]
    assert left is None or max(rooms) < left


def test_bots_of_all_kinds_in_one_batch_get_only_what_they_may_have(pool: Pool) -> None:
    desk = pool.desk(to_capacity=True)
    for instance in ("alone", "shared-1", "shared-2"):
        pool.submit(instance=instance)
    pool.change("UPDATE instances SET pool = 'shared' WHERE name LIKE 'shared-%'")
    wide = {"capacity": 2, "desk": desk}
    bots = {
        "linux": pool.bot("linux", properties={"os": "linux"}, **wide),
        "linux-too": pool.bot("linux-too", properties={"os": "linux"}, **wide),
        "plan9": pool.bot("plan9", properties={"os": "plan9"}, **wide),
        "alone": pool.bot("alone", instance="alone", **wide),
        "shared": pool.bot("shared", pool="shared", **wide),
        "plain": pool.bot("plain", **wide),
    }
    pool.submit(2, instance="alone", priority=1)
    pool.submit(2, instance="shared-2", priority=1)
    pool.submit(5, instance="other", priority=-1, properties={"os": "linux"})
    pool.submit(5, instance="other", priority=-2, properties={"os": "beos"})
    answers = together(desk, *[bot.message() for bot in bots.values()])
    assert dict(zip(bots, names(answers), strict=True)) == {
        "linux": ["other"] * 2,
        "linux-too": ["other"] * 2,
        "plan9": ["alone", "shared-1"],
        "alone": ["alone"] * 2,
        "shared": ["shared-2"] * 2,
        "plain": ["shared-2"],
    }


def test_a_draining_or_unhealthy_bot_of_a_batch_is_given_nothing_that_the_others_are(pool: Pool) -> None:
    bots, works = crew(pool, 3)
    (job,) = pool.submit()
    pool.change("UPDATE bots SET draining = true WHERE name = 'bot-00'")
    calls = finishing(bots, works)
    answers = together(bots[0].desk, calls[0], calls[1].model_copy(update={"status": "unhealthy"}), calls[2])
    assert [offered(answer) for answer in answers] == [[], [], [job]]


@pytest.mark.parametrize("to_capacity", [True, False])
@pytest.mark.parametrize("maximum", [0, 1, 2, 4, 5, 7, None])
def test_bg_26_a_batch_fetches_under_a_maximum_what_its_bots_would_have_fetched_alone(
    pool: Pool, tenancy: Tenancy, race: Race, maximum: int | None, to_capacity: bool
) -> None:
    desk = pool.desk(to_capacity=to_capacity)
    bots, works = crew(pool, 4, capacity=2, desk=desk, instance="team-b")
    tenancy.quota("team-a", maximum=maximum)
    pool.submit(12, instance="team-a", priority=-5)
    pool.submit(12, instance="team-c")
    calls, found = finishing(bots, works), []
    for settle in (alone, together):
        with race.first() as first:
            answers = settle(first.desk(to_capacity=to_capacity), *calls)
            found.append((answers, Tenancy(first).usage("team-a")))
            first.roll_back()
    assert found[1] == found[0]
    assert maximum is None or found[1][1] <= maximum


def test_bg_26_bots_of_a_batch_take_back_what_they_gave_back_and_not_more_than_the_maximum(
    pool: Pool, tenancy: Tenancy
) -> None:
    desk = pool.desk(to_capacity=True)
    tenancy.quota("team-a", maximum=4)
    bots, works = crew(pool, 4, capacity=3, desk=desk, instance="team-a")
    pool.submit(20, instance="team-a")
    answers = together(desk, *finishing(bots, works))
    assert tenancy.usage("team-a") == sum(len(answer["leases"]) for answer in answers) == 4


def test_bg_26_what_one_bot_of_a_batch_gave_back_is_not_for_the_others(pool: Pool, tenancy: Tenancy) -> None:
    desk = pool.desk()
    tenancy.quota("team-a", maximum=1)
    bots, works = [], []
    for name, instance in (("bot-1", "team-b"), ("bot-2", "team-a")):
        bots.append(pool.bot(name, desk=desk))
        works.append(busied(pool, bots[-1], instance=instance))
    for bot, work in zip(bots, works, strict=True):
        bot.sync(active(work), capacity=3)
    pool.submit(3, instance="team-a", priority=-5)
    pool.submit(3, instance="team-c")
    assert names(together(desk, *finishing(bots, works))) == [["team-c"], ["team-a"]]


def test_without_a_maximum_bots_share_one_look_whatever_they_have_finished(pool: Pool) -> None:
    desk = pool.desk()
    bots, works = [], []
    for n in range(4):
        bots.append(pool.bot(f"bot-{n}", desk=desk))
        works.append(busied(pool, bots[-1], instance=f"team-{n}"))
    jobs = pool.submit(6)
    with statements(pool) as sent:
        answers = together(desk, *finishing(bots, works))
    assert [offered(answer) for answer in answers] == [[job] for job in jobs[:4]]
    assert sum("open_resting" in statement for statement in sent) == 1


def test_a_maximum_that_is_used_up_keeps_no_bot_of_a_batch_from_the_jobs_behind(pool: Pool, tenancy: Tenancy) -> None:
    bots, works = crew(pool, 5, instance="team-b")
    tenancy.quota("team-a", maximum=2)
    pool.submit(10, instance="team-a", priority=-5)
    pool.submit(10, instance="team-c")
    answers = together(bots[0].desk, *finishing(bots, works))
    assert names(answers) == [["team-a"]] * 2 + [["team-c"]] * 3


def test_a_minimum_is_filled_first_by_a_batch_and_not_beyond(pool: Pool, tenancy: Tenancy) -> None:
    bots, works = crew(pool, 5, instance="team-b")
    tenancy.quota("team-a", minimum=2)
    pool.submit(10, instance="team-a", priority=5)
    pool.submit(10, instance="team-c", priority=-5)
    with statements(pool) as sent:
        answers = together(bots[0].desk, *finishing(bots, works))
    assert names(answers) == [["team-a"]] * 2 + [["team-c"]] * 3
    assert sum("first_heads" in statement for statement in sent) == 1, "without a maximum bots that are alike share one"


def test_jobs_at_rest_are_released_only_into_the_room_that_is_left(pool: Pool) -> None:
    bot = pool.bot(capacity=4)
    pool.submit(4)
    pool.assigner().run_once()
    works = bot.sync()["leases"]
    bot.sync(*[active(work) for work in works])
    pool.submit(3)
    (large,) = pool.submit(units=3)
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 hour', considered = 5 WHERE units = 3")
    assert len(bot.sync(*[completed(work) for work in works])["leases"]) == 3
    assert pool.job(large).considered == 5
