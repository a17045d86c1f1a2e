"""Many bots' calls in one transaction: each gets what it would have got alone, and one that is refused spoils none."""

import base64
import json
from typing import Any

import pytest
from leasehold.errors import LeaseholdError

from bots.protocol import Chunk, LeaseReport, Sync
from bots.sync.call import HeldCall, NewCall
from bots.sync.leases import DUE_LEASES
from schema import clock
from schema.moves.cancel import cancel
from schema.moves.sessions import drain
from tests.support.plans import round_trips, statements
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import Race
from tests.support.sync import alone, busied, crew, new_calls, offered, plain, tables, together
from tests.support.tenancy import Tenancy


def written(report: LeaseReport, data: bytes) -> LeaseReport:
    """The report with the first output of its attempt."""
    return report.model_copy(update={"output": [Chunk(start=0, data=base64.b64encode(data).decode())]})


def every_kind_of_call(pool: Pool) -> list[Sync]:
    """Calls of bots that leave, forget, start, run, finish, fail, give back, ail, shrink, idle and do not know."""
    bots, works = crew(pool, 11, locality_hint="warm", retry_failed=True)
    offers = [pool.bot(f"new-{n}", sync_service=bots[0].sync_service) for n in range(2)]
    pool.submit(2)
    pool.assigner().run_once()
    idle = [pool.bot(f"idle-{n}", sync_service=bots[0].sync_service) for n in range(2)]
    pool.submit(6, priority=5, locality_hint="warm")
    pool.database.run(lambda c: cancel(c, [works[8]["job"]], instances=None, sync=1.0, actor="test"))
    pool.database.run(lambda c: drain(c, "idle-1", draining=True, actor="test", reason="test"))
    begun = [active(work) for work in offers[0].sync()["leases"]]
    # What comes back to the queue comes first, or those before it could have it only in a batch.
    return [
        bots[10].message(completed(works[10], "released"), status="draining"),
        bots[0].message(active(works[0]), status="gone"),
        bots[1].message(),
        bots[2].message(active(works[2])),
        bots[3].message(written(completed(works[3], seconds=0.5), b"three")),
        bots[4].message(written(completed(works[4], "failed", exit_code=3, reason='it\'s \\ "so"'), b"\x00\xff")),
        bots[5].message(completed(works[5], "error", reason="no such programme: \u00e9\u4e2d\x1e")),
        bots[6].message(completed(works[6]), status="unhealthy"),
        bots[7].message(written(active(works[7]), b"seven"), capacity=0),
        bots[8].message(completed(works[8], "stopped")),
        bots[9].message(completed(works[9]), completed(works[3], "failed")),
        offers[0].message(*begun),
        offers[1].message(wait=10.0),
        idle[0].message(wait=10.0),
        idle[1].message(wait=10.0),
    ]


def test_bots_get_together_exactly_what_each_would_have_got_alone(pool: Pool, race: Race) -> None:
    calls, found = every_kind_of_call(pool), []
    for settle in (alone, together):
        with race.first() as first:
            answers = settle(first.sync_service(), *calls)
            found.append((answers, tables(first)))
            first.roll_back()

    (answers, after), (batched, after_batch) = found
    assert batched == answers
    assert after_batch == after
    assert [len(answer["leases"]) for answer in batched[4:7]] == [1, 1, 1], "who finished was given more"
    assert (offered(batched[12]) != [], batched[13], batched[14]["drain"]) == (True, "waits", True)
    assert after["outputs"]
    assert after["localities"]
    assert {move for _, move, *_ in after["events"]} >= {"finish", "retry", "expire", "requeue", "confirm_cancel"}


def test_a_batch_costs_as_many_statements_for_thirty_bots_as_for_two(pool: Pool) -> None:
    bots, works = crew(pool, 32, locality_hint="warm")
    pool.submit(40)
    reports = [bot.message(written(completed(work), b"x")) for bot, work in zip(bots, works, strict=True)]
    with statements() as few:
        together(bots[0].sync_service, *reports[:2])
    with statements() as many:
        answers = together(bots[0].sync_service, *reports[2:])
    assert [len(answer["leases"]) for answer in answers] == [1] * 30
    assert many == few


def test_what_a_call_writes_last_travels_with_its_commit(pool: Pool) -> None:
    bot = pool.bot()
    pool.submit()
    pool.assigner().run_once()
    (work,) = bot.take()
    seen = []
    for report in (active(work), completed(work)):
        with round_trips() as sent:
            together(bot.sync_service, bot.message(report))
        seen.append((len(sent), len(sent[-1])))
    assert seen == [(3, 2), (5, 5)]


def test_a_held_call_with_news_takes_two_round_trips(pool: Pool) -> None:
    sync_service, bot = pool.sync_service(), pool.bot()
    waiting = sync_service.answer(new_calls(bot.message(wait=10.0)))
    (job,) = pool.submit()
    pool.assigner().run_once()
    with round_trips() as sent:
        (answer,) = sync_service.answer(waiting)
    assert offered(plain(answer)) == [job]
    assert len(sent) == 2


def test_a_call_without_news_of_an_idle_worker_writes_nothing_but_its_first_and_renews_its_session(pool: Pool) -> None:
    sync_service, bot = pool.sync_service(), pool.bot()

    def calls() -> Any:
        call = NewCall(bot.message(wait=10.0), clock.monotonic(), of_worker=True)
        assert isinstance(sync_service.settle([call])[0], HeldCall)
        renewed = f"expires_at > now() + interval '{pool.timing.ttl * 0.9} s'"
        return pool.row(f"SELECT sync_seq, xmin, {renewed} AS renewed FROM bots")

    first = calls()
    assert (first.sync_seq, calls()) == (1, first)
    pool.change(f"UPDATE bots SET expires_at = now() + interval '{pool.timing.ttl * 0.8} s'")
    assert calls().renewed, "sooner than that of a bot, because it may have to find another door"


def test_a_call_reads_running_leases_once_and_a_repeated_one_tells_the_same_of_them(pool: Pool) -> None:
    bot = pool.bot(capacity=3)
    pool.submit(2, timeout_seconds=60)
    pool.assigner().run_once()
    works = bot.take()
    pool.database.run(lambda c: cancel(c, [works[0]["job"]], instances=None, sync=1.0, actor="test"))
    pool.submit()
    pool.assigner().run_once()
    for state, reads in ("pending", 1), ("active", 0):
        message = bot.message(*[active(work) for work in works])
        with statements() as sent:
            (answer,) = together(bot.sync_service, message)
        assert sent.count(DUE_LEASES.query.decode()) == reads, "what the bot needs to start a job is read once more"
        works = answer["leases"]
        assert [work["state"] for work in works] == ["cancelling", "active", state]
        assert together(bot.sync_service, message)[0]["leases"] == works


def test_a_result_of_another_fence_does_not_end_the_attempt_that_runs(pool: Pool) -> None:
    bot = pool.bot()
    (job,) = pool.submit()
    pool.assigner().run_once()
    (work,) = bot.take()
    for fence in (work["fence"] - 1, work["fence"] + 1):
        other = completed(work | {"fence": fence}, "failed")
        bot.sync(active(work), other)
        bot.sync(other, active(work))
    assert pool.job(job).state == "running"
    bot.sync(completed(work))
    row = pool.job(job)
    assert (row.state, row.result_fence) == ("succeeded", work["fence"])


def test_a_call_that_is_refused_fails_alone_and_changes_nothing(pool: Pool) -> None:
    bots, works = crew(pool, 6)
    pool.submit(10)
    older = bots[0].message(completed(works[0]))
    bots[0].sync(active(works[0]))
    superseded = bots[1].message(completed(works[1]))
    pool.restarted(bots[1])
    guess = bots[2].message(completed(works[2])).model_copy(update={"secret": "guess"})
    unknown = bots[3].message(completed(works[3])).model_copy(update={"bot": "nobody"})
    garbled, cut_off = (
        bots[n].message(completed(works[n]).model_copy(update={"output": [Chunk(start=0, data=data)]}), status=status)
        for n, data, status in ((4, "!", "unhealthy"), (5, "QUJ", "ok"))
    )
    other = pool.bot("bot-99", sync_service=bots[0].sync_service, properties={"for": "it"})
    fine = busied(pool, other, properties={"for": "it"})
    refused = [older, superseded, guess, unknown, garbled, cut_off]
    before = tables(pool)

    assert together(bots[0].sync_service) == []
    every = together(bots[0].sync_service, *refused)
    assert tables(pool) == before
    answers = together(bots[0].sync_service, *refused[:3], other.message(completed(fine)), *refused[3:])

    codes = ["stale_seq", "session_superseded", "session_over", "session_over", "BadInput", "BadInput"]
    assert [*answers[:3], *answers[4:]] == every == codes
    assert len(answers[3]["leases"]) == 1
    assert pool.job(fine["job"]).state == "succeeded"
    after = tables(pool)
    mine = ("bot-99", pool.job(fine["job"]).id, pool.job(answers[3]["leases"][0]["job"]).id)
    for table in ("bots", "leases", "outputs"):
        assert others(after[table], mine) == others(before[table], mine), table
    goes_on = [bot.sync(active(work))["leases"][0]["state"] for bot, work in zip(bots[4:], works[4:], strict=True)]
    assert goes_on == ["active", "active"]


def others(rows: list[Any], mine: tuple[Any, ...]) -> list[Any]:
    return [row for row in rows if row[0] not in mine]


def test_a_repeated_call_gets_its_leases_again_among_others(pool: Pool) -> None:
    bots, works = crew(pool, 4)
    pool.submit(10)
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    first = together(bots[0].sync_service, *calls[:2])

    answers = together(bots[0].sync_service, calls[2], calls[1], calls[3], calls[0])

    assert [answers[3], answers[1]] == first
    assert [len(answer["leases"]) for answer in answers] == [1] * 4
    assert together(bots[0].sync_service, *reversed(calls)) == [answers[2], answers[0], answers[1], answers[3]]
    assert pool.row("SELECT count(*) AS n FROM job_events WHERE move = 'finish'").n == 4


def test_a_held_call_is_answered_together_with_new_ones(pool: Pool) -> None:
    sync_service = pool.sync_service()
    held, patient = pool.bot("held", sync_service=sync_service), pool.bot("patient", sync_service=sync_service)
    waiting = sync_service.answer(new_calls(held.message(wait=10.0), patient.message(wait=10.0)))
    assert all(isinstance(one, HeldCall) for one in waiting)
    pool.database.run(lambda c: drain(c, "patient", draining=True, actor="test", reason="test"))
    (job,) = pool.submit()
    pool.assigner().run_once()
    (fresh,), works = crew(pool, 1)
    pool.submit()

    answers = sync_service.answer([*waiting, *new_calls(fresh.message(completed(works[0])))])

    assert offered(plain(answers[0])) == [job]
    assert (plain(answers[1])["leases"], plain(answers[1])["drain"]) == ([], True), "its time was over, and it heard"
    assert len(offered(plain(answers[2]))) == 1
    again = [plain(answer) for answer in sync_service.answer(waiting)]
    assert again == [plain(answer) for answer in answers[:2]], "whoever asks again gets the same"


def test_a_bot_that_does_not_know_that_its_drain_is_over_is_told_at_once(pool: Pool) -> None:
    sync_service, bot = pool.sync_service(), pool.bot("bot")

    def asked(draining: bool, status: str) -> bytes | HeldCall | LeaseholdError:
        pool.database.run(lambda c: drain(c, "bot", draining=draining, actor="test", reason="test"))
        return sync_service.answer(new_calls(bot.message(status=status, wait=10.0)))[0]

    assert plain(asked(True, "ok"))["drain"] is True
    held = asked(True, "draining")
    assert isinstance(held, HeldCall)
    assert held.drain, "what is told of the bot from now on is compared with this"
    # The drain ended while no call of the bot was held: it had none, or its gateway was away.
    assert plain(asked(False, "draining"))["drain"] is False
    assert isinstance(asked(False, "ok"), HeldCall)
    assert isinstance(asked(True, "unhealthy"), HeldCall), "it takes no work anyway"


def test_the_answer_to_a_held_call_writes_its_bot_only_to_renew_the_session(pool: Pool) -> None:
    ttl = pool.timing.ttl
    sync_service = pool.sync_service()
    bots = [pool.bot(name, sync_service=sync_service) for name in ("fresh", "aging")]
    sent = clock.monotonic()
    waiting = sync_service.answer(new_calls(*[bot.message(wait=10.0) for bot in bots]))
    pool.change(f"UPDATE bots SET expires_at = now() + interval '{ttl / 2} s' WHERE name = 'aging'")
    pool.submit(2)
    pool.assigner().run_once()
    look = "SELECT name, ctid, extract(epoch FROM expires_at - now()) AS remaining FROM bots"
    before = {row.name: row for row in pool.rows(look)}

    answers = dict(zip(("fresh", "aging"), map(json.loads, sync_service.answer(waiting)), strict=True))

    after = {row.name: row for row in pool.rows(look)}
    assert after["fresh"].ctid == before["fresh"].ctid
    assert after["aging"].ctid != before["aging"].ctid
    for name, answer in answers.items():
        assert len(answer["leases"]) == 1
        assert after[name].remaining > ttl * 0.6
        # The bot counts from the sending of its call. What it is told never reaches beyond the end of its session.
        assert 0 < sent + answer["expires_in"] <= clock.monotonic() + float(after[name].remaining)


def test_a_held_call_of_a_session_that_is_over_is_refused_alone(pool: Pool) -> None:
    sync_service = pool.sync_service()
    bots = [pool.bot(name, sync_service=sync_service) for name in ("bot-1", "bot-2", "bot-3")]
    waiting = sync_service.answer(new_calls(*[bot.message(wait=10.0) for bot in bots]))
    pool.bot("bot-1")
    bots[1].sync()
    assert [plain(answer) for answer in sync_service.answer(waiting)[:2]] == ["session_superseded", "stale_seq"]
    assert plain(sync_service.answer(waiting)[2])["seq"] == bots[2].seq


def test_a_call_repeated_while_it_is_held_goes_on_waiting_and_spoils_no_other(pool: Pool) -> None:
    sync_service = pool.sync_service()
    patient, other = pool.bot("patient", sync_service=sync_service), pool.bot("other", sync_service=sync_service)
    message = patient.message(wait=10.0)
    sync_service.answer(new_calls(message))
    waits, answer = together(sync_service, message, other.message())
    assert (waits, answer) == ("waits", {"seq": other.seq, "leases": [], "drain": False, "sync_in": 0.5})


def test_the_call_of_a_bot_that_runs_its_leases_is_held_and_a_repetition_of_it_answered(pool: Pool) -> None:
    bots, works = crew(pool, 1)
    message = bots[0].message(active(works[0]), wait=10.0)
    # Its first answer never came, and its deadline goes on.
    answers = [alone(bots[0].sync_service, message)[0] for _ in range(2)]
    assert answers[0] == "waits"
    assert [(lease["job"], lease["state"]) for lease in answers[1]["leases"]] == [(works[0]["job"], "active")]
    assert alone(bots[0].sync_service, bots[0].message(completed(works[0]), wait=10.0)) != ["waits"]


def test_two_calls_of_one_bot_are_not_settled_together(pool: Pool) -> None:
    bots, works = crew(pool, 2)
    first, second = bots[0].message(active(works[0])), bots[0].message(completed(works[0]))
    before = tables(pool)
    with pytest.raises(ValueError, match="two calls of one bot"):
        bots[0].sync_service.answer(new_calls(first, bots[1].message(completed(works[1])), second))
    waiting = HeldCall(first.bot, 1, first.epoch, first.seq, False, 0.0, 0.0, [])
    with pytest.raises(ValueError, match="two calls of one bot"):
        bots[0].sync_service.answer([waiting, NewCall(second, clock.monotonic())])
    assert tables(pool) == before


def test_what_a_leaving_bot_gives_back_may_go_to_one_that_finishes_in_the_same_batch(pool: Pool) -> None:
    bots, works = crew(pool, 3)
    gone = bots[0].message(active(works[0]), status="gone")
    calls = [gone, bots[1].message(completed(works[1])), bots[2].message(status="gone")]
    answers = together(bots[0].sync_service, *calls)
    assert [answer["leases"] for answer in (answers[0], answers[2])] == [[], []]
    assert offered(answers[1]) == [works[0]["job"]]
    gone = pool.rows("SELECT status, session, in_use FROM bots WHERE name <> 'bot-01'")
    assert [tuple(row) for row in gone] == [("gone", None, 0)] * 2
    row = pool.job(works[2]["job"])
    assert (row.state, row.attempts, row.kills) == ("queued", 0, 0)


def test_an_output_goes_to_the_attempt_of_its_own_bot_only(pool: Pool) -> None:
    bots, works = crew(pool, 3)
    stranger = written(active(works[1]), b"from a stranger")
    together(
        bots[0].sync_service,
        bots[0].message(written(active(works[0]), b"zero"), stranger),
        bots[1].message(written(completed(works[1]), b"one")),
        bots[2].message(written(active(works[2]), b"")),
    )
    rows = pool.rows("SELECT j.public_id, o.data FROM job_outputs o JOIN jobs j ON j.id = o.job_id ORDER BY j.id")
    told = [(str(row.public_id), bytes(row.data)) for row in rows]
    assert told == [(works[0]["job"], b"zero"), (works[1]["job"], b"one")]


# What bots fetch whose calls are settled together: only what each may have, and no more than quotas leave.


def names(answers: list[Any]) -> list[list[str]]:
    """The instances of what each of them was given to start."""
    return [[lease["instance"] for lease in answer["leases"] if lease["state"] == "pending"] for answer in answers]


def finishing(bots: list[Bot], works: list[dict[str, Any]]) -> list[Any]:
    """Each bot reports the end of its job."""
    return [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]


def test_the_most_urgent_jobs_go_in_their_order_to_bots_in_theirs_and_none_to_two(pool: Pool) -> None:
    bots, works = crew(pool, 6)
    jobs = [pool.submit(priority=priority)[0] for priority in (3, 1, 2, 0)]
    answers = together(bots[0].sync_service, *finishing(bots, works))
    assert [offered(answer) for answer in answers] == [[jobs[3]], [jobs[1]], [jobs[2]], [jobs[0]], [], []]


def test_a_small_job_behind_large_ones_still_reaches_the_bots_with_little_room(pool: Pool) -> None:
    sync_service = pool.sync_service(to_capacity=True)
    bots, works = crew(pool, 3, capacity=4, sync_service=sync_service)
    bots[0].sync(active(works[0]), capacity=4)
    pool.submit(6, units=4, priority=-1)
    small = pool.submit(2, units=1, priority=1)
    calls = [bots[0].message(completed(works[0])), bots[1].message(active(works[1])), bots[2].message(active(works[2]))]
    answers = together(sync_service, *calls)
    assert [pool.job(job).units for job in offered(answers[0])] == [4]
    assert offered(answers[1]) + offered(answers[2]) == small


def test_no_bot_is_given_more_units_than_it_has_room_for_and_none_could_have_had_more(pool: Pool) -> None:
    sync_service = pool.sync_service(to_capacity=True)
    bots, works = crew(pool, 6, capacity=5, sync_service=sync_service)
    sizes = [pool.chance.randint(1, 5) for _ in range(30)]
    for size in sizes:
        pool.submit(units=size)
    calls = finishing(bots[:3], works[:3])
    calls += [bot.message(active(work)) for bot, work in zip(bots[3:], works[3:], strict=True)]
    together(sync_service, *calls)
    left = pool.row("SELECT min(units) AS smallest FROM jobs WHERE state = 'queued'").smallest
    rooms = [row.room for row in pool.rows("SELECT capacity - in_use AS room FROM bots")]
    assert left is None or max(rooms) < left


def test_bots_of_all_kinds_in_one_batch_get_only_what_they_may_have(pool: Pool) -> None:
    sync_service = pool.sync_service(to_capacity=True)
    for instance in ("alone", "shared-1", "shared-2"):
        pool.submit(instance=instance)
    pool.change("UPDATE instances SET pool = 'shared' WHERE name LIKE 'shared-%'")
    wide = {"capacity": 2, "sync_service": sync_service}
    linux: dict[str, Any] = {"properties": {"os": "linux"}}
    offers: dict[str, dict[str, Any]] = {
        "linux": linux, "linux-too": linux, "plan9": {"properties": {"os": "plan9"}}, "alone": {"instance": "alone"},
        "shared": {"pool": "shared"}, "plain": {},
    }  # fmt: skip
    bots = {name: pool.bot(name, **offer, **wide) for name, offer in offers.items()}
    pool.submit(2, instance="alone", priority=1)
    pool.submit(2, instance="shared-2", priority=1)
    pool.submit(5, instance="other", priority=-1, properties={"os": "linux"})
    pool.submit(5, instance="other", priority=-2, properties={"os": "beos"})
    answers = together(sync_service, *[bot.message() for bot in bots.values()])
    assert dict(zip(bots, names(answers), strict=True)) == {
        "linux": ["other"] * 2,
        "linux-too": ["other"] * 2,
        "plan9": ["alone", "shared-1"],
        "alone": ["alone"] * 2,
        "shared": ["shared-2"] * 2,
        "plain": ["shared-2"],
    }


@pytest.mark.parametrize("to_capacity", [True, False])
@pytest.mark.parametrize("maximum", [0, 1, 5, None])
def test_a_batch_fetches_under_a_maximum_what_its_bots_would_have_fetched_alone(
    pool: Pool, tenancy: Tenancy, race: Race, maximum: int | None, to_capacity: bool
) -> None:
    sync_service = pool.sync_service(to_capacity=to_capacity)
    bots, works = crew(pool, 4, capacity=2, sync_service=sync_service, instance="team-b")
    tenancy.quota("team-a", maximum=maximum)
    pool.submit(12, instance="team-a", priority=-5)
    pool.submit(12, instance="team-c")
    calls, found = finishing(bots, works), []
    for settle in (alone, together):
        with race.first() as first:
            answers = settle(first.sync_service(to_capacity=to_capacity), *calls)
            found.append((answers, Tenancy(first).usage("team-a")))
            first.roll_back()
    assert found[1] == found[0]
    assert maximum is None or found[1][1] <= maximum


def test_bots_of_a_batch_take_back_what_they_gave_back_but_no_more_than_allowed(pool: Pool, tenancy: Tenancy) -> None:
    sync_service = pool.sync_service(to_capacity=True)
    tenancy.quota("team-a", maximum=4)
    bots, works = crew(pool, 4, capacity=3, sync_service=sync_service, instance="team-a")
    pool.submit(20, instance="team-a")
    answers = together(sync_service, *finishing(bots, works))
    assert tenancy.usage("team-a") == sum(len(answer["leases"]) for answer in answers) == 4


def test_what_one_bot_of_a_batch_gave_back_is_not_for_the_others(pool: Pool, tenancy: Tenancy) -> None:
    sync_service = pool.sync_service()
    tenancy.quota("team-a", maximum=1)
    bots, works = [], []
    for name, instance in (("bot-1", "team-b"), ("bot-2", "team-a")):
        bots.append(pool.bot(name, sync_service=sync_service))
        works.append(busied(pool, bots[-1], instance=instance))
    for bot, work in zip(bots, works, strict=True):
        bot.sync(active(work), capacity=3)
    pool.submit(3, instance="team-a", priority=-5)
    pool.submit(3, instance="team-c")
    assert names(together(sync_service, *finishing(bots, works))) == [["team-c"], ["team-a"]]


def test_without_a_maximum_bots_share_one_look_whatever_they_have_finished(pool: Pool) -> None:
    sync_service = pool.sync_service()
    bots, works = [], []
    for n in range(4):
        bots.append(pool.bot(f"bot-{n}", sync_service=sync_service))
        works.append(busied(pool, bots[-1], instance=f"team-{n}"))
    jobs = pool.submit(6)
    with statements() as sent:
        answers = together(sync_service, *finishing(bots, works))
    assert [offered(answer) for answer in answers] == [[job] for job in jobs[:4]]
    assert sum("first_heads" in statement or "FROM front" in statement for statement in sent) == 1


def test_a_minimum_is_filled_first_by_a_batch_and_not_beyond(pool: Pool, tenancy: Tenancy) -> None:
    bots, works = crew(pool, 5, instance="team-b")
    tenancy.quota("team-a", minimum=2)
    pool.submit(10, instance="team-a", priority=5)
    pool.submit(10, instance="team-c", priority=-5)
    with statements() as sent:
        answers = together(bots[0].sync_service, *finishing(bots, works))
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
    pool.rest_queues(3600, "units = 3")
    assert len(bot.sync(*[completed(work) for work in works])["leases"]) == 3
    assert pool.queue_of(large).looks == 1


@pytest.mark.parametrize("other", ["an older fence", "a lease of another bot"])
def test_a_bot_that_ends_as_many_leases_as_it_holds_but_not_the_same_ends_only_its_own(pool: Pool, other: str) -> None:
    pool.submit(3)
    stranger = pool.bot("stranger", capacity=1, sync_service=pool.sync_service(enabled=False))
    (foreign,) = pool.given(stranger)
    bot = pool.bot(capacity=2, sync_service=pool.sync_service(enabled=False))
    first, second = pool.given(bot)
    wrong = foreign if other == "a lease of another bot" else second | {"fence": second["fence"] - 1}
    answer = bot.sync(written(completed(first), b"said once"), completed(wrong))
    assert [pool.job(work["job"]).state for work in (first, foreign)] == ["succeeded", "running"]
    assert pool.history(second["job"])[-1] == "expire", "the bot did not report it"
    assert answer["leases"] == []
    assert [bytes(row.data) for row in pool.rows("SELECT data FROM job_outputs")] == [b"said once"]
    assert stranger.sync(completed(foreign))["leases"] == []
    assert pool.job(foreign["job"]).state == "succeeded"


def test_ends_of_all_that_a_bot_holds_are_settled_beside_a_start_of_another_bot(pool: Pool) -> None:
    sync_service = pool.sync_service(enabled=False)
    bots = [pool.bot(f"bot-{n}", capacity=2, sync_service=sync_service) for n in range(2)]
    pool.submit(4)
    pool.assigner().run_once()
    ending, starting = (bot.sync()["leases"] for bot in bots)
    together(
        sync_service,
        bots[0].message(*(completed(work, result='{"n": 1}') for work in ending)),
        bots[1].message(*map(active, starting)),
    )
    assert {pool.job(work["job"]).state for work in ending} == {"succeeded"}
    assert {pool.job(work["job"]).state for work in starting} == {"running"}
    assert [row.result for row in pool.rows("SELECT result FROM job_results")] == [{"n": 1}] * 2
