"""Another priority for jobs that wait: one by one and in bulk, who may, and who wins a race."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from schema.moves.cancel import cancel
from schema.moves.waiting import hold
from schema.moves.waiting.hold import unpark
from schema.moves.waiting.priority import ManyPrioritised, Prioritised, set_priority, set_priority_where
from schema.moves.waiting.requeue import requeue
from schema.postgres.connection import Connection
from tests.support.http import JOB, OTHER, Answer, Gateway, call, in_turn, submitted
from tests.support.http import JOB_COMMANDING as ONE
from tests.support.plans import watching
from tests.support.pool import Pool
from tests.support.race import park, prioritise, prioritise_where
from tests.support.servers import Served


def priorities(pool: Pool, **where: str) -> list[int]:
    return [
        row.priority
        for row in pool.rows(
            "SELECT j.priority FROM jobs j JOIN instances i ON i.id = j.instance"
            " WHERE i.name = coalesce(:instance, i.name) AND j.label = coalesce(:label, j.label) ORDER BY j.id",
            **({"instance": None, "label": None} | where),
        )
    ]


def test_the_more_urgent_job_goes_first_and_the_history_tells_who_changed_it(pool: Pool) -> None:
    first, second = pool.submit(2)
    assert prioritise(pool, -1, second) == [Prioritised(second, "queued", -1, changed=True)]
    assert prioritise(pool, -1, second) == [Prioritised(second, "queued", -1, changed=False)]
    bot = pool.bot()
    pool.assigner().run_once()
    assert [work["job"] for work in bot.sync()["leases"]] == [second]
    event = pool.row(
        "SELECT from_state, to_state, actor, details FROM job_events WHERE job_id = :id AND move = 'prioritise'",
        id=pool.job(second).id,
    )
    assert (event.from_state, event.to_state, event.actor) == ("queued", "queued", "test")
    assert event.details == {"before": 0, "after": -1, "reason": "test"}
    assert pool.history(first) == ["submit"]


def test_held_aside_jobs_change_and_those_that_bots_have_or_that_are_over_do_not(pool: Pool) -> None:
    job, _, _ = pool.running()
    (held,) = pool.submit()
    park(pool, held)
    absent = "00000000-0000-4000-8000-000000000000"
    assert prioritise(pool, 7, job, held, absent) == [
        Prioritised(job, "running", 0, changed=False),
        Prioritised(held, "parked", 7, changed=True),
        Prioritised(absent, None, None, changed=False),
    ]


def test_a_bulk_change_is_bounded_and_says_if_there_are_more(pool: Pool) -> None:
    pool.submit(5, instance="ci", properties={"os": "linux"})
    pool.submit(4, instance="ci", priority=9)
    pool.submit(3, instance="web")
    park(pool, *pool.submit(2, instance="ci"))
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 h' WHERE id <= 2")
    done = [prioritise_where(pool, 3, instances=["ci"], limit=6) for _ in range(3)]
    assert done == [ManyPrioritised(6, more=True), ManyPrioritised(5, more=False), ManyPrioritised(0, more=False)]
    assert priorities(pool, instance="ci") == [3] * 11
    assert priorities(pool, instance="web") == [0] * 3


def test_a_bulk_change_goes_by_label_and_instance(pool: Pool) -> None:
    pool.submit(2, instance="ci", label="nightly")
    pool.submit(2, instance="web", label="nightly")
    pool.submit(2, instance="ci", label="daily")
    park(pool, *pool.submit(1, instance="ci", label="nightly"))
    assert prioritise_where(pool, 5, instances=["ci"], label="nightly") == ManyPrioritised(3, more=False)
    assert priorities(pool, instance="web") == [0, 0]
    assert prioritise_where(pool, 6, label="nightly", limit=4) == ManyPrioritised(4, more=True)
    assert prioritise_where(pool, 6, label="nightly", limit=4) == ManyPrioritised(1, more=False)
    assert priorities(pool, label="daily") == [0, 0]


FILL = """
WITH wanted AS (
    SELECT i.id AS instance, p.id AS platform, intern_queue(0, i.id, p.id, 1, NULL) AS queue
    FROM instances i, platforms p WHERE i.name IN ('ci', 'web')
)
INSERT INTO jobs (queue, instance, platform, label, priority, rank, state, queued_at)
SELECT w.queue, w.instance, w.platform, l.label, n % 5, n % 5, s.state, now() FROM wanted w, generate_series(1, 150) n,
    (VALUES ('queued'), ('parked')) s (state), (VALUES ('a'), ('b')) l (label)"""


@pytest.mark.breaks_invariants
@pytest.mark.parametrize("known", [True, False], ids=["statistics", "none"])
@pytest.mark.parametrize(("instances", "label"), [(["ci"], None), (["ci"], "a"), (None, "a")])
def test_a_bulk_change_reads_within_bounds(
    pool: Pool, instances: list[str] | None, label: str | None, known: bool
) -> None:
    pool.submit(instance="ci")
    pool.submit(instance="web", properties={"os": "linux"})
    pool.change("ALTER TABLE jobs SET (autovacuum_enabled = off)")
    pool.change(FILL)
    pool.change("UPDATE jobs SET priority = 2, rank = 2 WHERE id % 3 > 0")
    if known:
        pool.change("ANALYZE jobs")
    with pool.database.begin() as connection, watching(connection) as watch:
        done = set_priority_where(connection, 2, instances=instances, label=label, limit=10, reason=None, actor="test")
    assert done == ManyPrioritised(10, more=True)
    assert not watch.whole_scans(), watch
    assert watch.touched <= 300, watch


@pytest.mark.breaks_invariants
def test_acts_on_some_jobs_read_only_those(pool: Pool) -> None:
    jobs = pool.submit(3, instance="ci")
    pool.submit(instance="web", properties={"os": "linux"})
    pool.change("ALTER TABLE jobs SET (autovacuum_enabled = off)")
    pool.change(FILL)
    who: dict[str, Any] = {"instances": ["ci"], "reason": None, "actor": "test"}
    acts: list[Callable[[Connection], object]] = [
        lambda c: set_priority(c, jobs, 5, **who),
        lambda c: hold.park(c, jobs, **who),
        lambda c: unpark(c, jobs[:1], **who),
        lambda c: cancel(c, jobs[:1], instances=None, sync=1, actor="test"),
        lambda c: requeue(c, jobs, ceiling=None, key="k", **who),
    ]
    for act in acts:
        with pool.database.begin() as connection, watching(connection) as watch:
            act(connection)
        assert not watch.whole_scans(), watch
        assert watch.touched <= 200, watch
    assert pool.history(jobs[1]) == ["submit", "prioritise", "hold", "release"]


def test_priorities_over_the_wire_by_ids_and_by_filter(operator: httpx.Client) -> None:
    one, two = submitted(operator, JOB | {"instance": "ci", "label": "x"}, JOB | {"instance": "ci"})
    answer = operator.post("/v1/jobs/priority", json={"priority": 4, "ids": [one, "nonsense"], "reason": "r"}).json()
    assert answer == {
        "jobs": [
            {"id": one, "state": "queued", "changed": True, "why": None, "priority": 4},
            {"id": "nonsense", "state": None, "changed": False, "why": None, "priority": None},
        ],
        "changed": 1,
        "more": False,
        "next": None,
    }
    answer = operator.post("/v1/jobs/priority", json={"priority": 5, "instance": "ci"}).json()
    assert answer == {"jobs": [], "changed": 2, "more": False, "next": None}
    assert operator.get(f"/v1/jobs/{two}").json()["priority"] == 5
    for body in ({}, {"ids": [one], "label": "x"}, {"priority": 1001, "ids": [one]}, {"label": ""}, {"ids": []}):
        assert operator.post("/v1/jobs/priority", json={"priority": 1} | body).status_code in (400, 422), body
    assert operator.post("/v1/jobs/priority", json={"priority": 1, "ids": ["nonsense"]}).status_code == 404


def test_a_submitter_stays_in_its_instance_and_below_its_ceiling(operator: httpx.Client, served: Served) -> None:
    mine, foreign = (submitted(operator, JOB | {"instance": instance, "label": "x"})[0] for instance in ("ci", "web"))
    with served.client(served.token("submitter", instance="ci", priority_ceiling=0)) as http:
        urgent = http.post("/v1/jobs/priority", json={"priority": -1, "ids": [mine]})
        assert (urgent.status_code, "more urgent than 0" in urgent.json()["detail"]) == (403, True)
        assert http.post("/v1/jobs/priority", json={"priority": 1, "ids": [foreign]}).status_code == 404
        assert http.post("/v1/jobs/priority", json={"priority": 1, "instance": "web"}).status_code == 403
        assert http.post("/v1/jobs/priority", json={"priority": 1, "label": "x"}).json()["changed"] == 1
    assert operator.get(f"/v1/jobs/{foreign}").json()["priority"] == 0


def test_only_an_operator_changes_a_job_that_others_share(operator: httpx.Client, served: Served) -> None:
    shared = JOB | {"instance": "ci", "label": "x", "dedup_key": "same"}
    leader, follower, own = submitted(operator, shared, shared, JOB | {"instance": "ci", "label": "x"})
    with served.client(served.token("submitter", instance="ci")) as http:
        for one in (leader, follower):
            (told,) = http.post("/v1/jobs/priority", json={"priority": 5, "ids": [one]}).json()["jobs"]
            why = "others share it, and only operators change such jobs"
            assert told == {"id": one, "state": "queued", "changed": False, "why": why, "priority": 0}
        for filtered in ({"label": "x"}, {"instance": "ci"}):
            answer = http.post("/v1/jobs/priority", json={"priority": 5} | filtered).json()
            assert (answer["changed"], answer["more"]) == ("label" in filtered, False)
        assert http.get(f"/v1/jobs/{own}").json()["priority"] == 5
        assert http.post("/v1/jobs/cancel", json={"ids": [leader]}).status_code == 200
        assert http.post("/v1/jobs/priority", json={"priority": 6, "ids": [follower]}).json()["changed"] == 1
    submitted(operator, shared)
    assert operator.post("/v1/jobs/priority", json={"priority": 7, "ids": [follower]}).json()["changed"] == 1


def test_the_command_changes_some_jobs_or_all_of_a_filter(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        {"id": ONE, "state": "queued", "changed": True, "priority": -5},
        {"id": OTHER, "state": "running", "changed": False, "priority": 0},
    ]
    stands.script = in_turn(Answer({"jobs": jobs, "changed": 1, "more": False}))
    call("priority", "-5", ONE, OTHER)
    assert capsys.readouterr().out == (f"{ONE} queued with priority -5\n{OTHER} running with priority 0 (unchanged)\n")
    assert stands.asked[0].body == {"ids": [ONE, OTHER], "priority": -5}
    stands.script = in_turn(
        Answer({"jobs": [], "changed": 10_000, "more": True}), Answer({"jobs": [], "changed": 3, "more": False})
    )
    call("priority", "10", "--instance", "ci", "--label", "nightly", "--all", "--json")
    assert json.loads(capsys.readouterr().out) == {"changed": 10_003}
    assert [asked.body for asked in stands.asked[1:]] == [{"priority": 10, "instance": "ci", "label": "nightly"}] * 2


@pytest.mark.parametrize(
    "arguments",
    [[], ["--all"], [ONE, "--all"], ["--label", "x"], [ONE, "--label", "x", "--all"], [ONE, "--label", "x"]],
)
@pytest.mark.usefixtures("stands")
def test_the_command_wants_ids_or_a_filter_with_all(arguments: list[str]) -> None:
    with pytest.raises(Exception, match="give either ids, or --all with"):
        call("priority", "1", *arguments)
