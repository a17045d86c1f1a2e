"""Submit rules: unknown keys, programs that are not listed, owners that have used much; and who may make instances."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from leasehold.errors import BadInput, Forbidden, NotFound
from leasehold.transaction import submit_in
from structlog.testing import capture_logs

from assigner.config.loading import load
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema.moves.graphs import submit_graph
from schema.moves.submit import Submitted, submit, submit_alone, submit_at_once
from schema.moves.waiting.priority import set_priority
from schema.moves.waiting.requeue import requeue
from schema.policy import priority_classes
from schema.policy.ceilings import CeilingTerms, set_ceilings
from schema.policy.schedule_changes import Author, put_schedule
from schema.policy.schedules import ScheduleTerms
from schema.policy.submit_rules import SubmitRuleTerms, remove_submit_rules, set_submit_rules
from schema.postgres.engine import Database, libpq_url
from schema.requests import GraphRequest, JobRequest
from schema.tenancy import instances
from tests.support.http import audited
from tests.support.pool import Pool, completed
from tests.support.race import cancel
from tests.support.requests import PLAIN
from tests.support.servers import Served, counts


def rule(pool: Pool, instance: str | None = None, **terms: Any) -> None:
    pool.change("INSERT INTO instances (name) VALUES ('ci'), ('default') ON CONFLICT DO NOTHING")
    pool.database.run(lambda c: set_submit_rules(c, {instance: SubmitRuleTerms(**terms)}, actor="test"))


def together(pool: Pool, *jobs: dict[str, Any]) -> list[Submitted]:
    requests = [JobRequest(**{"command": ["true"], **job}).normal() for job in jobs]
    return pool.database.run(lambda c: submit(c, requests, actor="test"))


def has_used(pool: Pool, owner: str, cost: float, instance: str = "default") -> None:
    name = f"owner:{instance}:{owner}:cost"
    pool.change(f"""DELETE FROM usage WHERE name = '{name}';
        INSERT INTO usage (name, bucket, amount) VALUES ('{name}', date_trunc('minute', now()), {cost});
        INSERT INTO counters (name, used) VALUES ('{name}', {cost}) ON CONFLICT (name) DO UPDATE SET used = {cost}""")


def placed(pool: Pool, job: Submitted) -> tuple[int, float]:
    row = pool.job(job.public_id)
    return row.priority, row.rank


#: A job, the field by which it is refused, and why.
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"properties": {"os": "linux", "colour": "red"}}, "properties.colour",
     "is not among the property keys that jobs may name"),
    ({"command": ["rm", "true"]}, "command", "'rm' is not among the programs that jobs may run"),
    ({"command": ["/bin/true"]}, "command", "'/bin/true' is not among the programs that jobs may run"),
    ({"command": ["tru"]}, "command", "'tru' is not among the programs that jobs may run"),
    ({"owner": "ann", "locks": ["a"]}, "owner",
     "has used 10.5 within the rolling window, and above 10 its jobs are refused"),
]  # fmt: skip


def test_what_breaks_a_rule_is_refused_by_its_field_and_nothing_is_stored(pool: Pool) -> None:
    rule(pool, property_keys=["os", "gpu"], commands=["make", "true"], owner_cost=10.0)
    has_used(pool, "ann", 10.5)
    has_used(pool, "bob", 10)
    has_used(pool, "ann", 9, instance="ci")
    together(pool, {"properties": {"os": "linux"}}, {"command": ["make", "rm"]}, {"owner": "bob"}, {})
    together(pool, {"owner": "ann", "instance": "ci"})
    before = counts(pool.database)
    for job, field, reason in WRONG:
        for others in (0, 1):
            with pytest.raises(BadInput) as refused:
                together(pool, *[{}] * others, job)
            assert (refused.value.field, refused.value.reason) == (f"jobs.{others}.{field}", reason)
        nodes = [{"node": 0, "command": ["true"]}, {"node": 1, "command": ["true"], "after": [0], **job}]
        request = GraphRequest.model_validate({"name": "g", "nodes": nodes}).normal()
        with pytest.raises(BadInput) as refused:
            pool.database.run(partial(submit_graph, request=request, actor="test", sync=1.0))
        assert (refused.value.field, refused.value.reason) == (f"nodes.1.{field}", reason)
    assert counts(pool.database) == before


def test_the_rules_of_the_pool_and_of_the_instance_must_both_be_kept(pool: Pool) -> None:
    rule(pool, commands=["make", "true"])
    rule(pool, "ci", commands=["true", "sh"])
    cases = (("make", "default", True), ("make", "ci", False), ("sh", "ci", False), ("true", "ci", True))
    for program, instance, taken in cases:
        job = {"command": [program], "instance": instance}
        if taken:
            together(pool, job)
        else:
            with pytest.raises(BadInput, match=f"'{program}' is not among"):
                together(pool, job)
    rule(pool, commands=[])
    with pytest.raises(BadInput, match="'true' is not among"):
        together(pool, {})
    rule(pool, commands=None)
    together(pool, {"command": ["anything"]})
    pool.database.run(lambda c: remove_submit_rules(c, ["ci"], actor="test"))
    together(pool, {"command": ["make"], "instance": "ci"})


def test_a_request_that_was_taken_before_or_joins_a_job_is_answered_whatever_the_rules_are_now(pool: Pool) -> None:
    asked = {"command": ["make"], "key": "k", "dedup_key": "d"}
    (first,) = together(pool, asked)
    rule(pool, commands=["true"])
    assert together(pool, asked)[0].public_id == first.public_id
    assert together(pool, asked | {"key": "other"}, {})[0].job_id == first.job_id
    with pytest.raises(BadInput, match="'make' is not among"):
        together(pool, asked | {"key": "new", "dedup_key": "e"})


def test_an_owner_is_heavy_by_what_its_jobs_have_used(pool: Pool) -> None:
    rule(pool, owner_cost=10.0, owner_penalty=30)
    bot = pool.bot()
    for cost, priority in ((10, 0), (0.5, 0), (0, 30)):
        (job,) = together(pool, {"owner": "ann", "estimated_cost": 0})
        assert pool.job(job.public_id).priority == priority
        (work,) = pool.given(bot)
        bot.sync(completed(work, usage={"cost": cost}))


def test_jobs_of_a_heavy_owner_are_less_urgent_by_the_penalty(pool: Pool) -> None:
    rule(pool, owner_cost=10.0, owner_penalty=30)
    has_used(pool, "ann", 11)
    has_used(pool, "bob", 10)
    jobs = together(
        pool,
        {"owner": "ann"},
        {"owner": "ann", "priority": -5},
        {"owner": "ann", "priority": 990},
        {"owner": "ann", "job_class": "serious"},
        {"owner": "ann", "service_level": "economy", "priority": 7},
        {"owner": "ann", "priority": 1, "dedup_key": "a"},
        {"owner": "bob", "priority": 3},
        {},
    )
    assert [placed(pool, job) for job in jobs] == [
        (30, 30), (25, 25), (1000, 1000), (70, 70), (37, 37), (31, 31), (3, 3), (0, 0),
    ]  # fmt: skip
    lowered = pool.rows("SELECT details->'lowered' AS steps FROM job_events WHERE move = 'submit' ORDER BY job_id")
    assert sorted(row.steps for row in lowered if row.steps is not None) == [30] * 6
    (alone,) = together(pool, {"owner": "ann", "priority": 1, "key": "k"})
    assert placed(pool, alone) == (31, 31)
    assert pool.row("SELECT details FROM job_events ORDER BY job_id DESC, id LIMIT 1").details == {"lowered": 30}


def test_a_penalty_stays_when_operators_change_the_points_of_a_class(pool: Pool) -> None:
    rule(pool, owner_cost=10.0, owner_penalty=30)
    has_used(pool, "ann", 11)
    (job,) = together(pool, {"owner": "ann", "job_class": "serious"})
    price = f"SELECT (points_of(priority_inputs)).price FROM job_constraints WHERE job_id = {job.job_id}"
    assert pool.row(price).price == placed(pool, job)[0] == 70
    pool.database.run(lambda c: priority_classes.put_classes(c, {"serious": 50}, actor="test"))
    assert pool.row(price).price == 80


def test_a_node_is_less_urgent_than_its_graph_by_the_penalty(pool: Pool) -> None:
    rule(pool, "ci", owner_cost=0.0, owner_penalty=30)
    has_used(pool, "ann", 1, instance="ci")
    nodes = [
        {"node": 0, "command": ["true"], "owner": "ann"},
        {"node": 1, "command": ["true"], "owner": "ann", "priority": 2},
        {"node": 2, "command": ["true"], "owner": "ann", "job_class": "serious"},
        {"node": 3, "command": ["true"]},
    ]
    request = GraphRequest.model_validate({"name": "g", "instance": "ci", "priority": 7, "nodes": nodes}).normal()
    pool.database.run(lambda c: submit_graph(c, request, actor="test", sync=1.0))
    rows = pool.rows("SELECT priority FROM jobs j JOIN graph_nodes n ON n.job_id = j.id ORDER BY node_no")
    assert [row.priority for row in rows] == [37, 32, 70, 7]


def test_of_several_rules_the_hardest_holds(pool: Pool) -> None:
    rule(pool, owner_cost=10.0, owner_penalty=30)
    rule(pool, "ci", owner_cost=20.0, owner_penalty=50)
    has_used(pool, "ann", 15, instance="ci")
    job = {"owner": "ann", "instance": "ci"}
    assert placed(pool, together(pool, job)[0]) == (30, 30)
    has_used(pool, "ann", 25, instance="ci")
    assert placed(pool, together(pool, job)[0]) == (50, 50)
    rule(pool, owner_penalty=None)
    with pytest.raises(BadInput, match=r"jobs\.0\.owner: has used 25 within the rolling window, and above 10 its jobs"):
        together(pool, job)


def test_a_requeued_job_has_the_priority_of_the_old_one_and_keeps_the_rules_of_now(pool: Pool) -> None:
    rule(pool, owner_cost=10.0, owner_penalty=30)
    has_used(pool, "ann", 11)
    (job,) = together(pool, {"owner": "ann", "priority": 1})
    pool.change("UPDATE jobs SET queue_deadline = now() - interval '1 s'")
    pool.upkeep().run_once()
    assert pool.job(job.public_id).state == "dead"

    def again(key: str) -> str:
        (made,) = pool.database.run(
            lambda c: requeue(c, [job.public_id], instances=None, ceiling=None, key=key, reason=None, actor="test")
        )
        assert made.successor is not None
        return made.successor

    assert pool.job(again("a")).priority == 31
    rule(pool, commands=["make"])
    with pytest.raises(BadInput, match="'true' is not among the programs"):
        again("b")


@pytest.mark.parametrize("of_class", [{"job_class": "serious"}, {"service_level": "premium"}, {"priority": 61}])
def test_whoever_submits_work_again_does_not_get_rid_of_its_penalty(pool: Pool, of_class: dict[str, Any]) -> None:
    rule(pool, owner_cost=10.0, owner_penalty=30)
    has_used(pool, "ann", 11)
    (job,) = together(pool, {"owner": "ann", **of_class})
    before = pool.job(job.public_id).priority
    cancel(pool, job.public_id)
    assert pool.job(again(pool, job)).priority == before


def test_a_new_job_has_the_priority_that_an_operator_gave_the_old_one(pool: Pool) -> None:
    (job,) = together(pool, {"job_class": "serious"})
    pool.database.run(lambda c: set_priority(c, [job.public_id], 77, instances=None, reason=None, actor="test"))
    cancel(pool, job.public_id)
    assert pool.job(again(pool, job)).priority == 77


def test_a_new_job_that_points_have_made_more_urgent_keeps_to_the_ceiling(pool: Pool) -> None:
    (job,) = together(pool, {"job_class": "random"})
    cancel(pool, job.public_id)
    ceiling = pool.job(job.public_id).priority
    assert pool.job(again(pool, job, ceiling=ceiling)).priority == ceiling
    pool.database.run(lambda c: priority_classes.put_classes(c, {"random": 95}, actor="test"))
    with pytest.raises(Forbidden, match="would have the priority 5, this token may not exceed"):
        again(pool, job, ceiling=ceiling)
    assert len(pool.rows("SELECT FROM jobs")) == 2


def again(pool: Pool, job: Submitted, *, ceiling: int | None = None) -> str:
    (made,) = pool.database.run(
        lambda c: requeue(c, [job.public_id], instances=None, ceiling=ceiling, key=None, reason=None, actor="test")
    )
    assert made.successor is not None
    return made.successor


def test_callers_over_http_and_in_sql_are_told_the_field(pool: Pool, served: Served) -> None:
    rule(pool, commands=["make"])
    terms = CeilingTerms(max_timeout=60.0)
    pool.database.run(lambda c: set_ceilings(c, {(None, None): terms}, actor="test"))
    for job, field, said in (
        ({"command": ["rm"]}, "command", "'rm' is not among the programs that jobs may run"),
        ({"command": ["make"], "timeout_seconds": 61}, "timeout_seconds", "must be at most 60, a ceiling of the pool"),
    ):
        with served.client(served.token("submitter")) as http:
            answer = http.post("/v1/jobs", json={"jobs": [{"command": ["make"]}, job]})
        assert (answer.status_code, answer.json()["field"]) == (400, f"jobs.1.{field}")
        assert said in answer.json()["detail"]
        with pytest.raises(Exception, match=rf"jobs\.0\.{field}: {said}"):
            pool.rows("SELECT submit(CAST(:jobs AS jsonb))", jobs=json.dumps([job]))
    assert pool.rows("SELECT FROM jobs") == []


def test_parts_that_are_not_given_stay_and_nonsense_is_refused(pool: Pool, operator: httpx.Client) -> None:
    rule(pool, commands=["true", "make", "true"])
    rule(pool, property_keys=["os"])
    stored = pool.row("SELECT commands, property_keys FROM submit_rules")
    assert (stored.commands, stored.property_keys) == (["make", "true"], ["os"])
    for instance, terms, error in (
        (None, {"owner_penalty": 5}, "owner_penalty: means nothing without owner_cost"),
        ("nosuch", {"commands": ["x"]}, "there is no instance 'nosuch'"),
    ):
        with pytest.raises((BadInput, NotFound), match=error):
            rule(pool, instance, **terms)  # type: ignore[arg-type]
    assert operator.put("/v1/submit-rules/*", json={"commands": ["a\x00b"]}).status_code == 400
    rule(pool, commands=None, property_keys=None)
    assert pool.rows("SELECT FROM submit_rules") == []


def test_the_command_says_in_one_line_what_breaks_a_rule_or_a_ceiling(
    pool: Pool, operate: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    rule(pool, property_keys=["os"], commands=["true"], owner_cost=10.0)
    pool.database.run(lambda c: set_ceilings(c, {(None, None): CeilingTerms(max_timeout=60.0)}, actor="test"))
    has_used(pool, "ann", 11)
    for arguments, said in (
        (("--timeout", "61", "--", "true"), "--timeout: must be at most 60, a ceiling of the pool"),
        (("--property", "colour=red", "--", "true"), "properties.colour: is not among the property keys"),
        (("--", "rm", "true"), "command: 'rm' is not among the programs"),
        (("--owner", "ann", "--", "true"), "--owner: has used 11 within the rolling window"),
    ):
        code, told = operate("submit", *arguments)
        assert (code, told.count("\n"), told.startswith(f"error: {said}")) == (2, 1, True), told
    lines = tmp_path / "jobs.jsonl"
    lines.write_text('{"command": ["true"]}\n\n{"command": ["rm"]}\n')
    code, told = operate("submit", "--file", str(lines))
    assert (code, told) == (2, f"error: {lines}:3: command: 'rm' is not among the programs that jobs may run\n")
    graph = tmp_path / "graph.json"
    graph.write_text('{"name": "g", "nodes": [{"node": 1, "command": ["true"], "timeout_seconds": 61}]}')
    code, told = operate("graph", "submit", str(graph))
    assert (code, told.count("\n"), "nodes.0.timeout_seconds: must be at most 60" in told) == (2, 1, True), told
    assert pool.rows("SELECT FROM jobs") == []


# Whoever names an instance makes it, unless only operators may.


NEVER = '[tenancy]\ncreate_instances = "never"\n'
CII = PLAIN | {"instance": "cii"}
GRAPH = {"instance": "cii", "name": "g", "nodes": [{"node": 1, "after": [], "payload": {"command": ["true"]}}]}
TERMS = ScheduleTerms("* * * * *", "UTC", "skip", 10, 86400.0, "allow", True, {"command": ["true"]})
#: What names an instance without being an operator's command.
CREATORS: dict[str, Callable[[Database], object]] = {
    "one submit": lambda database: database.run(lambda c: submit(c, [CII], actor="test")),
    "one submit alone": lambda database: database.run_alone(lambda d: submit_alone(d, CII, actor="test")),
    "many submits": lambda database: database.run(lambda c: submit(c, [PLAIN, CII], actor="test")),
    "many submits at once": lambda database: database.run_alone(lambda d: submit_at_once(d, [PLAIN, CII], actor="t")),
    "many alike": lambda database: database.run_alone(lambda d: submit_at_once(d, [CII, CII], actor="test")),
    "deduplicated": lambda database: database.run(lambda c: submit(c, [PLAIN, CII | {"dedup_key": "a"}], actor="test")),
    "graph": lambda database: database.run(lambda c: submit_graph(c, GRAPH, sync=1.0, actor="test")),
    "schedule": lambda database: database.run(lambda c: put_schedule(c, "cii", "s", TERMS, author=Author("test"))),
}


def configured(pool: Pool, tmp_path: Path, written: str) -> None:
    """An assigner process starts with this file."""
    path = tmp_path / "leasehold.toml"
    path.write_text(written)
    declare(pool.database, load(path, PoolSettings, {}))


def names(pool: Pool) -> list[str]:
    return [row.name for row in pool.rows("SELECT name FROM instances ORDER BY name")]


def test_whoever_names_an_instance_makes_it_unless_only_operators_may(pool: Pool, tmp_path: Path) -> None:
    configured(pool, tmp_path, NEVER)
    for create in CREATORS.values():
        with pytest.raises(BadInput, match=r"instance: there is no instance 'cii', and only operators ma") as refused:
            create(pool.database)
        assert refused.value.field.endswith("instance")
    assert names(pool) == []
    assert pool.rows("SELECT FROM jobs") == []
    configured(pool, tmp_path, "")
    for create in CREATORS.values():
        create(pool.database)
    assert "cii" in names(pool)


def test_the_default_instance_and_those_that_are_there_may_always_be_used(pool: Pool, tmp_path: Path) -> None:
    configured(pool, tmp_path, NEVER + '[[instances]]\nname = "ci"\n')
    pool.database.run(lambda c: instances.put_instance(c, "qa", pool=None, actor="test"))
    for name in ("default", "ci", "qa"):
        pool.submit(instance=name)
    assert names(pool) == ["ci", "default", "qa"]


def test_a_bot_of_an_instance_that_is_not_there_is_refused_and_no_other(pool: Pool, tmp_path: Path) -> None:
    requests = [OpenSession(bot="bot-1"), OpenSession(bot="bot-2", instance="cii"), OpenSession(bot="bot-3")]
    configured(pool, tmp_path, NEVER)
    first, bad, last = sessions.open_sessions(pool.database, requests, timing=pool.timing)
    assert isinstance(bad, BadInput)
    assert (bad.field, [type(first), type(last)]) == ("instance", [Session, Session])
    configured(pool, tmp_path, "")
    again = sessions.open_sessions(pool.database, requests, timing=pool.timing)
    assert [type(each) for each in again] == [Session] * 3
    assert names(pool) == ["cii"]


def test_callers_in_sql_in_a_transaction_and_over_http_are_told_and_an_operator_makes_the_instance(
    operator: httpx.Client, pool: Pool, tmp_path: Path
) -> None:
    configured(pool, tmp_path, NEVER)
    job: dict[str, Any] = {"command": ["true"], "instance": "cii"}
    with pytest.raises(psycopg.Error, match="there is no instance 'cii'") as refused:
        pool.rows("SELECT * FROM submit(CAST(:jobs AS jsonb))", jobs=json.dumps([job]))
    assert refused.value.sqlstate == "LH007", "a code of its own"  # type: ignore[union-attr]
    with psycopg.connect(libpq_url(pool.database.url)) as connection:
        with pytest.raises(BadInput, match="instance: there is no instance 'cii'"):
            submit_in(connection, [job], lambda made: made)
    answer = operator.post("/v1/jobs", json={"jobs": [{"command": ["true"]}, job]})
    assert (answer.status_code, answer.json()["field"]) == (400, "jobs.1.instance")
    assert operator.patch("/v1/instances/cii", json={}).status_code == 200
    assert operator.post("/v1/jobs", json={"jobs": [job]}).status_code in (200, 201)


def test_a_schedule_of_the_configuration_that_is_refused_is_logged_and_the_process_goes_on(
    pool: Pool, tmp_path: Path
) -> None:
    schedule = '[[schedules]]\nname = "s"\ninstance = "cii"\ncron = "* * * * *"\njob = { command = ["true"] }\n'
    with capture_logs() as told:
        configured(pool, tmp_path, NEVER + schedule)
    assert "only operators make one" in str([each for each in told if each["log_level"] == "error"])
    assert names(pool) == []


def test_a_change_of_who_may_is_audited_once(pool: Pool, tmp_path: Path) -> None:
    for written, changes in (("", 0), (NEVER, 1), (NEVER, 1), ("", 2), ("", 2)):
        configured(pool, tmp_path, written)
        assert audited(pool.database).count("tenancy.set") == changes
