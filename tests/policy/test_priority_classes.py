"""Classes, points and service levels: what a job is worth, and what of it is stored."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from leasehold.errors import BadInput, Forbidden

from assigner.admission import judging
from assigner.api import submission
from assigner.operator_resources.priorities import reprice
from assigner.queries import jobs as job_queries
from schema.accounting import counters
from schema.moves.graphs import submit_graph
from schema.moves.submit import submit
from schema.moves.waiting.priority import set_priority
from schema.policy import priority_classes
from schema.postgres.connection import Connection
from schema.requests import GraphRequest, JobRequest
from schema.tenancy import tokens
from tests.support.plans import statements
from tests.support.pool import Pool, admission_state, completed, head, queue, taken
from tests.support.race import cancel
from tests.support.servers import Console, Served

OPERATOR = tokens.Principal(tokens.Kind.OPERATOR, "x")


def submitted(pool: Pool, *, caller: tokens.Principal = OPERATOR, **fields: Any) -> Any:
    request = JobRequest(command=["true"], **fields)
    (taken,) = submission.submit(pool.database, submission.normalised_requests([request], caller=caller), caller=caller)
    return pool.job(taken.public_id)


#: What a job says → its priority and its timeout.
WORTH: list[tuple[dict[str, Any], int, float | None]] = [
    ({"job_class": "critical"}, 0, None),
    ({"job_class": "serious_project"}, 20, None),
    ({"job_class": "serious"}, 40, None),
    ({"job_class": "random"}, 60, None),
    ({"job_class": "auto_generated"}, 80, None),
    ({"job_class": "background"}, 90, None),
    ({"job_class": "serious", "project": "site"}, 30, None),
    ({"job_class": "serious", "user_priority": 2}, 30, None),
    ({"job_class": "serious", "project": "site", "user_priority": 2}, 20, None),
    ({"service_level": "premium"}, 0, 7200),
    ({"service_level": "standard"}, 50, 3600),
    ({"service_level": "economy"}, 80, 1800),
    ({"service_level": "economy", "job_class": "critical"}, 80, 1800),
    ({"service_level": "economy", "job_class": "critical", "priority": 7}, 7, 1800),
    ({"service_level": "economy", "timeout_seconds": 5.0}, 80, 5),
    ({}, 0, None),
]


def test_class_project_user_and_service_level_give_a_priority_and_a_timeout(pool: Pool) -> None:
    for fields, priority, timeout in WORTH:
        job = submitted(pool, **fields)
        assert (job.priority, job.rank, job.timeout_seconds) == (priority, priority, timeout), fields
    assert not job.constrained


def test_a_job_says_its_service_level_also_when_it_has_ended(pool: Pool) -> None:
    job, bot, work = pool.running(**JobRequest(command=["true"], service_level="premium").normal())

    def level() -> str | None:
        found = pool.database.run(lambda c: job_queries.job(c, job, instances=None))
        assert found is not None
        return found["service_level"]

    assert level() == "premium"
    bot.sync(completed(work))
    assert level() == "premium"


def test_a_job_without_level_and_class_gets_the_default_level_and_keeps_what_it_says_itself(
    served: Served, pool: Pool
) -> None:
    served.app.state.default_level = "standard"

    def defaulted(http: httpx.Client, **fields: Any) -> Any:
        answer = http.post("/v1/jobs", json={"jobs": [{"command": ["true"], **fields}]})
        assert answer.status_code == 200, answer.text
        return pool.job(answer.json()["jobs"][0]["id"])

    with served.client(served.token("submitter")) as http:
        for fields, priority, timeout in (
            ({}, 50, 3600),
            ({"timeout_seconds": 5.0}, 50, 5),
            ({"priority": 0}, 0, 3600),
            ({"service_level": "economy"}, 80, 1800),
            ({"job_class": "random"}, 60, None),
            ({"dedup_key": "nightly"}, 0, None),
        ):
            job = defaulted(http, **fields)
            assert (job.priority, job.rank, job.timeout_seconds) == (priority, priority, timeout)
        assert defaulted(http, key="k").id == defaulted(http, key="k").id
    served.app.state.default_level = "premium"
    with served.client(served.token("submitter", priority_ceiling=30)) as http:
        answer = http.post("/v1/jobs", json={"jobs": [{"command": ["true"]}]})
        assert (answer.status_code, "more urgent than 30" in answer.json()["detail"]) == (403, True)


def test_a_batch_and_a_graph_get_the_default_level_and_the_priority_of_a_graph_stands(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    served.app.state.default_level = "standard"
    operator.post("/v1/jobs", json={"jobs": [{"command": ["a"], "label": f"l{n}"} for n in range(2)]})
    nodes = [{"node": 1, "command": ["a"], "label": "n1"}, {"node": 2, "command": ["a"], "label": "n2", "priority": 3}]
    for name, more in {"plain": {}, "urgent": {"priority": 7}}.items():
        answer = operator.post("/v1/graphs", json={"name": name, "nodes": nodes, **more})
        assert answer.status_code == 200, answer.text
    rows = pool.rows("SELECT label, priority, rank, timeout_seconds FROM jobs ORDER BY id")
    assert [tuple(row) for row in rows] == [
        *[(label, 50, 50, 3600) for label in ("l0", "l1", "n1")],
        ("n2", 3, 3, 3600),
        ("n1", 7, 7, 3600),
        ("n2", 3, 3, 3600),
    ]


def test_a_gateway_does_not_start_with_a_default_level_that_nobody_has_made(
    database_url: str, tmp_path: Path, leasehold: Path
) -> None:
    environ = {"LEASEHOLD_DATABASE_URL": database_url, "LEASEHOLD_SERVICE_LEVELS_DEFAULT": "golden"}
    console = Console(tmp_path, leasehold, **environ)
    assert console.refused("gateway") == (
        "service_levels.default: there is no service level 'golden': there are premium, standard, economy"
    )


def test_an_unknown_class_or_level_is_refused_at_the_place_that_names_it(
    operate: Callable[..., tuple[int, str]], operator: httpx.Client, pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.jsonl"
    lines = [{"job_class": "critical"}, None, {"job_class": "urgent"}, {"service_level": "urgent"}]
    path.write_text("".join("\n" if each is None else json.dumps({"command": ["a"], **each}) + "\n" for each in lines))
    told = operate("submit", "--file", str(path))
    assert told == (2, f"error: {path}:3: job_class: there is no job class 'urgent'\n")
    told = operate("submit", "--service-level", "golden", "--", "true")
    assert told == (2, "error: --service-level: there is no service level 'golden'\n")
    nodes = [{"node": 7, "command": ["a"]}, {"node": 8, "command": ["a"], "job_class": "urgent"}]
    answer = operator.post("/v1/graphs", json={"name": "g", "nodes": nodes})
    assert (answer.status_code, answer.json()["field"]) == (400, "nodes.1.job_class")
    assert pool.rows("SELECT id FROM jobs") == []
    caller = tokens.Principal(tokens.Kind.SUBMITTER, "c", priority_ceiling=30)
    with pytest.raises(BadInput, match=r"^jobs\.0\.service_level: there is no service level 'golden'"):
        submitted(pool, caller=caller, service_level="golden")


def test_who_may_not_be_urgent_may_not_be_so_by_points(pool: Pool) -> None:
    caller = tokens.Principal(tokens.Kind.SUBMITTER, "c", priority_ceiling=30)
    assert submitted(pool, caller=caller, job_class="serious").priority == 40
    for points in ({"job_class": "critical"}, {"priority": 10}, {"service_level": "premium"}):
        with pytest.raises(Forbidden, match="more urgent than 30"):
            submitted(pool, caller=caller, **points)
    with pytest.raises(BadInput, match="there is no job class 'urgent'"):
        submitted(pool, caller=caller, job_class="urgent")


def test_classes_come_many_in_one_batch_and_join_no_deduplication(pool: Pool) -> None:
    requests = [JobRequest(command=["true"], job_class=name).normal() for name in ("critical", "background")]
    requests.append(JobRequest(command=["true"]).normal())
    taken = pool.database.run(lambda c: submit(c, requests, actor="test"))
    assert [pool.job(one.public_id).priority for one in taken] == [0, 90, 0]
    with pytest.raises(BadInput, match="dedup_key"):
        JobRequest(command=["true"], job_class="critical", dedup_key="k").normal()


def test_levels_are_a_view_over_the_effective_priority(pool: Pool) -> None:
    policy = pool.database.run(priority_classes.policy)
    expected = {0: "critical", 20: "high", 40: "high", 60: "normal", 80: "low", 90: "low", -60: "critical"}
    assert {effective: policy.level(effective) for effective in expected} == expected
    asked = "SELECT level_of(CAST(:effective AS float8)) AS level"
    assert {each: pool.row(asked, effective=each).level for each in expected} == expected
    moved = priority_classes.Policy(critical=-1, high=0, normal=100)
    pool.database.run(lambda c: priority_classes.put_policy(c, moved, actor="test"))
    assert pool.row(asked, effective=90).level == "normal"


def test_the_most_urgent_job_that_may_start_is_the_one_that_starts_also_if_it_comes_later(pool: Pool) -> None:
    wanted = [("background", []), ("critical", ["held"]), ("serious", []), ("critical", ["held"])]
    jobs = [str(submitted(pool, job_class=name, locks=locks).public_id) for name, locks in wanted]
    assert [lease["job"] for lease in pool.given(pool.bot(capacity=1))] == [jobs[1]]
    later = str(submitted(pool, job_class="critical").public_id)
    for name, job in (("bot-2", later), ("bot-3", jobs[2])):
        assert [lease["job"] for lease in pool.given(pool.bot(name, capacity=1))] == [job]
    assert pool.job(jobs[3]).state == "queued", "what needs the lock waits for it alone"


def test_a_node_of_a_graph_is_worth_its_class_and_others_what_the_graph_is(pool: Pool, served: Served) -> None:
    nodes: list[dict[str, Any]] = [
        {"node": 1, "job_class": "serious"},
        {"node": 2, "job_class": "serious", "priority": 7},
        {"node": 3, "priority": 5},
        {"node": 4},
        {"node": 5, "service_level": "economy", "after": [1]},
    ]
    asked = [{"command": ["true"], **node} for node in nodes]
    graph = taken(pool, GraphRequest.model_validate({"name": "g", "priority": 9, "nodes": asked}).normal())
    found = {node: pool.job(job) for node, job in graph.jobs.items()}
    assert {node: job.priority for node, job in found.items()} == {1: 40, 2: 7, 3: 5, 4: 9, 5: 80}
    assert {node: job.rank for node, job in found.items()} == {1: 40, 2: 7, 3: 5, 4: 9, 5: 80}
    mine = served.client(served.token("submitter", priority_ceiling=50))
    node = {"node": 1, "command": ["true"], "job_class": "critical"}
    answer = mine.post("/v1/graphs", json={"name": "h", "nodes": [node]})
    assert (answer.status_code, "not be more urgent than 50" in answer.text) == (403, True)


@pytest.mark.parametrize("way", ["alone", "in a list", "by its deduplication key", "in place of another", "as a node"])
def test_a_job_is_written_once_with_what_its_points_give_it_whichever_way_it_comes(pool: Pool, way: str) -> None:
    job = JobRequest(command=["true"], service_level="economy").normal()
    keyed = job | {"dedup_key": "k", "on_conflict": "replace"}
    if way == "in place of another":
        pool.database.run(lambda c: submit(c, [keyed | {"own": {"level": "premium"}}], actor="test"))

    def come(connection: Connection) -> int:
        written = "SELECT pg_stat_get_xact_tuples_updated('jobs'::regclass)"
        before = connection.execute_sql(written).scalar_one()
        match way:
            case "alone":
                submit(connection, [job], actor="test")
            case "in a list":
                submit(connection, [job | {"own": {"class": "critical"}, "priority": 3}, job], actor="test")
            case "as a node":
                nodes: list[dict[str, Any]] = [{"node": 1}, {"node": 2, "after": [1], "service_level": "economy"}]
                graph = {"name": "g", "nodes": [node | {"command": ["true"]} for node in nodes]}
                request = GraphRequest.model_validate(graph).normal()
                submit_graph(connection, request, sync=pool.timing.sync, actor="test")
            case _:
                submit(connection, [keyed], actor="test")
        return int(connection.execute_sql(written).scalar_one()) - int(before)

    assert pool.database.run(come) == (1 if way == "in place of another" else 0)
    found = pool.rows(
        "SELECT j.priority, j.rank, j.timeout_seconds, t.price, extract(epoch FROM t.watch_at - j.created_at)::integer"
        " FROM jobs j LEFT JOIN job_constraints t ON t.job_id = j.id ORDER BY j.id"
    )
    others: dict[str, list[tuple[Any, ...]]] = {
        "in a list": [(0, 0, None, 0, 3600)],
        "as a node": [(0, 0, None, None, None)],
    }
    assert [tuple(row) for row in found] == [*others.get(way, []), (80, 80, 1800, 80, 3600)]


@pytest.mark.parametrize("jobs", [1, 2], ids=["alone", "in a list"])
def test_a_repeat_gets_its_job_also_when_its_class_is_gone(pool: Pool, jobs: int) -> None:
    pool.database.run(lambda c: priority_classes.put_classes(c, {"nightly": 5}, actor="test"))
    requests = [JobRequest(command=["true"], job_class="nightly", key=str(n)).normal() for n in range(jobs)]
    made = pool.database.run(lambda c: submit(c, requests, actor="test"))
    cancel(pool, *(one.public_id for one in made))
    pool.database.run(lambda c: priority_classes.remove_classes(c, ["nightly"], actor="test"))
    again = pool.database.run(lambda c: submit(c, requests, actor="test"))
    assert again == [one._replace(created=False) for one in made]
    requests[-1]["key"] = "new"
    with pytest.raises(BadInput, match=r"^jobs\.\d\.job_class: there is no job class 'nightly'"):
        pool.database.run(lambda c: submit(c, requests, actor="test"))


# Points that change while jobs wait, and quotas of owners and projects.


def of_class(pool: Pool, count: int = 1, **fields: object) -> list[str]:
    return pool.submit(count, **JobRequest(command=["true"], **fields).normal())  # type: ignore[arg-type]


def test_other_points_move_waiting_jobs_in_batches_while_the_pool_goes_on(pool: Pool) -> None:
    jobs = of_class(pool, 1200, job_class="random", project="site")
    others = of_class(pool, 3, job_class="serious")
    (explicit,) = of_class(pool, job_class="random", priority=60)
    (changed,) = of_class(pool, job_class="random")
    pool.database.run(lambda c: set_priority(c, [changed], -5, instances=None, reason=None, actor="test"))
    pool.database.run(lambda c: priority_classes.put_classes(c, {"random": 95}, actor="test"))
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
        "SELECT DISTINCT j.priority, j.rank FROM jobs j JOIN queues q ON q.id = j.queue"
        " JOIN constraint_sets g ON g.id = q.constraint_set"
        ' WHERE j.state = \'queued\' AND g.terms = \'{"job_class": "random", "project": "site"}\''
    )
    assert {(row.priority, row.rank) for row in waiting} <= {(-5, -5)}
    assert {pool.job(job).priority for job in others} == {40}
    assert (pool.job(explicit).priority, pool.job(changed).priority) == (60, -5)
    assert len(bot.take()) + len(pool.rows("SELECT FROM jobs WHERE state = 'queued'")) == len(jobs) + 5
    pool.database.run(lambda c: priority_classes.put_classes(c, {"random": 95}, actor="test"))
    assert reprice(pool.database, actor="test") == 0, "what is repeated changes nothing"


def test_the_report_of_classes_counts_jobs_of_which_nothing_but_the_class_was_said(pool: Pool) -> None:
    of_class(pool, job_class="random", priority=5)
    of_class(pool, job_class="random", priority=5, estimated_seconds=60)
    assert pool.row("SELECT count(*) AS rows FROM job_constraints").rows == 1
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    bot.sync(*map(completed, bot.take()))
    (found,) = pool.database.run(priority_classes.accuracy)
    assert (found.name, found.jobs, found.estimated) == ("random", 2, 1)


def test_many_classes_and_levels_take_as_many_statements_as_few_and_levels_keep_what_is_not_given(
    pool: Pool,
) -> None:
    told = []
    for count in (2, 60):
        names = [f"n{nth}" for nth in range(count)]
        levels: dict[str, tuple[int | None, float | None]] = {name: (nth, 60.0) for nth, name in enumerate(names)}
        with statements() as sent:
            pool.database.run(lambda c, p=names: priority_classes.put_classes(c, dict.fromkeys(p, 7), actor="test"))
            pool.database.run(lambda c, p=levels: priority_classes.put_service_levels(c, p, actor="test"))
            assert pool.row("SELECT count(*) AS n FROM job_classes WHERE points = 7").n == count
            pool.database.run(lambda c, p=names: priority_classes.remove_classes(c, p, actor="test"))
            pool.database.run(lambda c, p=names[1:]: priority_classes.remove_service_levels(c, p, actor="test"))
        told.append(len(sent))
    assert told[0] == told[1]
    assert pool.row("SELECT count(*) AS n FROM job_classes WHERE points = 7").n == 0
    pool.database.run(lambda c: priority_classes.put_service_levels(c, levels, actor="test"))
    some: dict[str, tuple[int | None, float | None]] = {"n5": (None, 9.0), "n6": (66, None)}
    found = pool.database.run(lambda c: priority_classes.put_service_levels(c, some, actor="test"))
    assert [(each.name, each.points, each.timeout_seconds) for each in found] == [("n5", 5, 9.0), ("n6", 66, 60.0)]
    with pytest.raises(BadInput, match="there is no service level 'new' yet"):
        pool.database.run(lambda c: priority_classes.put_service_levels(c, {**some, "new": (1, None)}, actor="test"))
    noted = pool.rows("SELECT action, count(*) AS n FROM audit GROUP BY 1 ORDER BY 1")
    assert {row.action: row.n for row in noted if "." in row.action} == {
        "class.set": 62, "class.rm": 62, "service_level.set": 124, "service_level.rm": 60,
    }  # fmt: skip


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "1e12", "0"])
def test_a_starvation_that_is_no_time_cannot_be_stored(pool: Pool, seconds: str) -> None:
    """By one each submit with a class would fail, because the time at which the job starves is not one."""
    with pytest.raises(psycopg.errors.CheckViolation, match="scheduling_starvation_range"):
        pool.change(f"UPDATE scheduling SET starvation_seconds = '{seconds}'")


def test_what_was_promoted_keeps_its_place_when_points_change(pool: Pool) -> None:
    (job,) = of_class(pool, job_class="background")
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 hours'")
    pool.change("UPDATE job_constraints SET watch_at = now() - interval '1 hour'")
    pool.upkeep().run_once()
    assert pool.job(job).rank == 40.5
    pool.database.run(lambda c: priority_classes.put_classes(c, {"background": 15}, actor="test"))
    assert reprice(pool.database, actor="test") == 1
    assert (pool.job(job).priority, pool.job(job).rank) == (85, 40.5)


def test_a_job_of_an_owner_that_has_used_its_quota_waits_and_the_others_go_on(pool: Pool) -> None:
    pool.database.run(lambda c: counters.limit_all(c, {"owner:default:ann:cost": 5}))
    anns = of_class(pool, 4, owner="ann", estimated_cost=2)
    (bobs,) = of_class(pool, owner="bob", estimated_cost=2)
    bot = pool.bot(capacity=10)
    given = pool.given(bot)
    assert {lease["job"] for lease in given} == {*anns[:2], bobs}, "a third one could overshoot"
    bot.sync(*(completed(lease) for lease in given))
    pool.assigner().run_once()
    assert not bot.take(), "what was used counts until it is older than the window"
    pool.database.run(lambda c: counters.roll(c, window=-60, limit=100))
    pool.assigner().run_once()
    assert {lease["job"] for lease in bot.take()} == set(anns[2:])


def test_the_quota_of_a_project_says_so_in_its_words(pool: Pool) -> None:
    limited = queue(project="site", owner="ann")
    full = admission_state(counters={"project:default:site:cost": counters.Counter(10.0, 10.0)})
    near = admission_state(counters={"owner:default:ann:cost": counters.Counter(9.0, 10.0)})
    closed = judging.queue_admission(limited, full).closed(head(1, 0, of=limited), full)
    assert closed is not None
    assert closed[1] == "Project quota exceeded: 10 of 10 used, and this job is estimated at 1"
    assert judging.closing_gate(limited, full) is not None
    assert judging.queue_admission(limited, near).closed(head(1, 0, of=limited), near) is None
    small = head(1, 0, of=limited)
    judging.queue_admission(limited, near).take(small)
    again = judging.queue_admission(limited, near).closed(small, near)
    assert again is not None
    assert again[1].startswith("User quota exceeded: 10 of 10 used")
