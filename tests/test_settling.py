"""Many bots' calls in one transaction: each gets what it would have got alone, and one that is refused spoils none."""

import base64
from typing import Any

import pytest

from bots.leases import Asked, Waiting
from bots.protocol import Chunk, LeaseReport, Sync
from schema import clock, moves
from schema.moves import Verdict
from tests.pool import Pool, active, completed
from tests.racing import Race
from tests.settling import alone, asked, busied, crew, offered, plain, statements, tables, together

Works = list[dict[str, Any]]


def written(report: LeaseReport, data: bytes) -> LeaseReport:
    """The report with the first output of its attempt."""
    return report.model_copy(update={"output": [Chunk(start=0, data=base64.b64encode(data).decode())]})


def every_kind_of_call(pool: Pool) -> list[Sync]:
    """Calls of bots that leave, forget, start, run, finish, fail, give back, ail, shrink, idle and do not know."""
    bots, works = crew(pool, 11, locality_hint="warm", retry_failed=True)
    offers = [pool.bot(f"new-{n}", desk=bots[0].desk) for n in range(2)]
    pool.submit(2)
    pool.assigner().run_once()
    idle = [pool.bot(f"idle-{n}", desk=bots[0].desk) for n in range(2)]
    pool.submit(6, priority=5, locality_hint="warm")
    pool.database.run(lambda c: moves.cancel(c, [works[8]["job"]], instances=None, sync=1.0, actor="test"))
    pool.database.run(lambda c: moves.drain(c, "idle-1", draining=True, actor="test", reason="test"))
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
            answers = settle(first.desk(), *calls)
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
    with statements(pool) as few:
        together(bots[0].desk, *reports[:2])
    with statements(pool) as many:
        answers = together(bots[0].desk, *reports[2:])
    assert [len(answer["leases"]) for answer in answers] == [1] * 30
    assert many == few


def test_a_call_that_is_refused_fails_alone_and_changes_nothing(pool: Pool) -> None:
    bots, works = crew(pool, 6)
    pool.submit(10)
    older = bots[0].message(completed(works[0]))
    bots[0].sync(active(works[0]))
    superseded = bots[1].message(completed(works[1]))
    pool.restarted(bots[1])
    guess = bots[2].message(completed(works[2])).model_copy(update={"secret": "guess"})
    unknown = bots[3].message(completed(works[3])).model_copy(update={"bot": "nobody"})
    without_outcome = bots[4].message(LeaseReport(job=works[4]["job"], fence=works[4]["fence"], state="completed"))
    garbled = bots[5].message(
        completed(works[5]).model_copy(update={"output": [Chunk(start=0, data="!")]}), status="unhealthy"
    )
    other = pool.bot("bot-99", desk=bots[0].desk, properties={"for": "it"})
    fine = busied(pool, other, properties={"for": "it"})
    refused = [older, superseded, guess, unknown, without_outcome, garbled]
    before = tables(pool)

    answers = together(bots[0].desk, *refused[:3], other.message(completed(fine)), *refused[3:])

    codes = ["stale_seq", "session_superseded", "session_over", "session_over", "BadInput", "BadInput"]
    assert [*answers[:3], *answers[4:]] == codes
    assert len(answers[3]["leases"]) == 1
    assert pool.job(fine["job"]).state == "succeeded"
    after = tables(pool)
    mine = ("bot-99", pool.job(fine["job"]).id, pool.job(answers[3]["leases"][0]["job"]).id)
    for table in ("bots", "leases", "outputs"):
        assert others(after[table], mine) == others(before[table], mine), table
    assert [bot.sync(active(work))["leases"][0]["state"] for bot, work in zip(bots[4:], works[4:], strict=True)] == [
        "active",
        "active",
    ], "the same bots may go on"


def others(rows: list[Any], mine: tuple[Any, ...]) -> list[Any]:
    return [row for row in rows if row[0] not in mine]


def test_every_call_of_a_batch_may_be_refused(pool: Pool) -> None:
    bots, works = crew(pool, 2)
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    for bot in bots:
        pool.restarted(bot)
    before = tables(pool)
    assert together(bots[0].desk, *calls) == ["session_superseded"] * 2
    assert together(bots[0].desk) == []
    assert tables(pool) == before


def test_a_repeated_call_gets_its_answer_byte_for_byte_among_others(pool: Pool) -> None:
    bots, works = crew(pool, 4)
    pool.submit(10)
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    first = bots[0].desk.answer(asked(*calls[:2]))

    answers = bots[0].desk.answer(asked(calls[2], calls[1], calls[3], calls[0]))

    assert [answers[3], answers[1]] == first
    assert [len(plain(answer)["leases"]) for answer in answers] == [1] * 4
    assert bots[0].desk.answer(asked(*reversed(calls))) == [answers[2], answers[0], answers[1], answers[3]]
    assert pool.row("SELECT count(*) AS n FROM job_events WHERE move = 'finish'").n == 4


def test_a_held_call_is_answered_together_with_new_ones(pool: Pool) -> None:
    desk = pool.desk()
    held, patient = pool.bot("held", desk=desk), pool.bot("patient", desk=desk)
    waiting = desk.answer(asked(held.message(wait=10.0), patient.message(wait=10.0)))
    assert all(isinstance(one, Waiting) for one in waiting)
    pool.database.run(lambda c: moves.drain(c, "patient", draining=True, actor="test", reason="test"))
    (job,) = pool.submit()
    pool.assigner().run_once()
    (fresh,), works = crew(pool, 1)
    pool.submit()

    answers = desk.answer([*waiting, *asked(fresh.message(completed(works[0])))])

    assert offered(plain(answers[0])) == [job]
    assert (plain(answers[1])["leases"], plain(answers[1])["drain"]) == ([], True), "its time was over, and it heard"
    assert len(offered(plain(answers[2]))) == 1
    assert desk.answer(waiting) == answers[:2], "whoever asks again gets the same"


def test_a_bot_that_reports_something_is_answered_at_once_while_an_idle_one_waits(pool: Pool) -> None:
    (busy,), works = crew(pool, 1)
    idle = pool.bot("idle", desk=busy.desk)
    report = busy.message(completed(works[0]), wait=10.0)
    answers = together(busy.desk, idle.message(wait=10.0), report)
    assert (answers[0], answers[1]["leases"]) == ("waits", [])


def test_a_held_call_of_a_session_that_is_over_is_refused_alone(pool: Pool) -> None:
    desk = pool.desk()
    bots = [pool.bot(name, desk=desk) for name in ("bot-1", "bot-2", "bot-3")]
    waiting = desk.answer(asked(*[bot.message(wait=10.0) for bot in bots]))
    pool.bot("bot-1")
    bots[1].sync()
    assert [plain(answer) for answer in desk.answer(waiting)[:2]] == ["session_superseded", "stale_seq"]
    assert plain(desk.answer(waiting)[2])["seq"] == 1


def test_a_call_repeated_while_it_is_held_goes_on_waiting_and_spoils_no_other(pool: Pool) -> None:
    desk = pool.desk()
    patient, other = pool.bot("patient", desk=desk), pool.bot("other", desk=desk)
    message = patient.message(wait=10.0)
    desk.answer(asked(message))
    assert together(desk, message, other.message()) == [
        "waits",
        {"seq": 1, "leases": [], "drain": False, "sync_in": 0.5},
    ]


def test_two_calls_of_one_bot_are_not_settled_together(pool: Pool) -> None:
    bots, works = crew(pool, 2)
    first, second = bots[0].message(active(works[0])), bots[0].message(completed(works[0]))
    before = tables(pool)
    with pytest.raises(ValueError, match="two calls of one bot"):
        bots[0].desk.answer(asked(first, bots[1].message(completed(works[1])), second))
    waiting = Waiting(first.bot, 1, first.epoch, first.seq, 0.0)
    with pytest.raises(ValueError, match="two calls of one bot"):
        bots[0].desk.answer([waiting, Asked(second, clock.monotonic())])
    assert tables(pool) == before


def test_what_a_leaving_bot_gives_back_may_go_to_one_that_finishes_in_the_same_batch(pool: Pool) -> None:
    bots, works = crew(pool, 3)
    answers = together(
        bots[0].desk,
        bots[0].message(active(works[0]), status="gone"),
        bots[1].message(completed(works[1])),
        bots[2].message(status="gone"),
    )
    assert [answer["leases"] for answer in (answers[0], answers[2])] == [[], []]
    assert offered(answers[1]) == [works[0]["job"]]
    gone = pool.rows("SELECT status, session, in_use FROM bots WHERE name <> 'bot-01'")
    assert [tuple(row) for row in gone] == [("gone", None, 0)] * 2
    assert pool.job(works[2]["job"]).state == "queued"
    assert (pool.job(works[2]["job"]).attempts, pool.job(works[2]["job"]).kills) == (0, 0)


def test_an_end_is_told_by_the_bot_that_came_to_it(pool: Pool) -> None:
    bots, works = crew(pool, 3)
    verdicts = [Verdict.SUCCEEDED, Verdict.FAILED, Verdict.ERROR]
    reports = [
        bot.message(completed(work, verdict.value, reason=bot.session.bot))
        for bot, work, verdict in zip(bots, works, verdicts, strict=True)
    ]
    together(bots[0].desk, *reversed(reports))
    told = pool.rows(
        "SELECT e.actor, e.details->>'reason' AS reason, e.details->>'verdict' AS verdict FROM job_events e"
        " WHERE e.move IN ('finish', 'retry') ORDER BY e.actor"
    )
    assert [tuple(row) for row in told] == [
        (f"bot:{bot.session.bot}", bot.session.bot, verdict.value) for bot, verdict in zip(bots, verdicts, strict=True)
    ]


def test_an_output_goes_to_the_attempt_of_its_own_bot_only(pool: Pool) -> None:
    bots, works = crew(pool, 3)
    stranger = written(active(works[1]), b"from a stranger")
    together(
        bots[0].desk,
        bots[0].message(written(active(works[0]), b"zero"), stranger),
        bots[1].message(written(completed(works[1]), b"one")),
        bots[2].message(written(active(works[2]), b"")),
    )
    rows = pool.rows("SELECT j.public_id, o.data FROM job_outputs o JOIN jobs j ON j.id = o.job_id ORDER BY j.id")
    assert [(str(row.public_id), bytes(row.data)) for row in rows] == [
        (works[0]["job"], b"zero"),
        (works[1]["job"], b"one"),
    ]
