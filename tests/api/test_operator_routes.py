"""The routes of operators: drains, health, effects of a change, preemptions, settings in force and decisions."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput, LeaseholdError, NotFound

from assigner.config.loading import Reloader
from assigner.placement.decision_sample import DecisionSample, Seen, stored
from assigner.placement.registry import StrategySettings
from assigner.process.assign import AssignerProcess
from assigner.queries import alerts
from assigner.settings import PoolSettings
from schema import audit
from schema.diagnostics import invariants
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.readable import short_ids
from schema.tenancy import drains, processes
from schema.tenancy.processes import KEPT_DECISIONS, Configuration, Kind
from tests.support.http import JOB, JOB_COMMANDING, Answer, Gateway, audited, call, in_turn, problem, submitted
from tests.support.patience import eventually, wait_instead
from tests.support.pool import Pool, completed
from tests.support.race import Race
from tests.support.servers import Bot, Served, assigner_process
from tests.support.tenancy import Tenancy, assign, contested


def test_bots_and_instances_are_drained_by_a_time_and_back(served: Served, operator: httpx.Client, pool: Pool) -> None:
    Bot(served, "b1")
    submitted(operator, JOB | {"instance": "ci"})
    for kind, name in (("bots", "b1"), ("instances", "ci")):
        drained = operator.post(f"/v1/{kind}/{name}/drain", json={"deadline": 60, "reason": "disk"})
        assert drained.json() == {"name": name, "draining": True}
        state = f"SELECT draining, extract(epoch FROM drain_deadline - now()) AS left FROM {kind} WHERE name = '{name}'"
        assert pool.row(state).draining
        assert 0 < pool.row(state).left <= 60
        if kind == "bots":
            shown = operator.get("/v1/bots/b1").json()
            assert (shown["name"], shown["draining"], shown["leases"]) == ("b1", True, 0)
        assert operator.post(f"/v1/{kind}/{name}/drain", json={"draining": False}).status_code == 200
        assert pool.row(state)[:] == (False, None)
    assert operator.get("/v1/bots/absent").status_code == 404
    assert audited(pool.database)[-2:] == ["instance.drain", "instance.undrain"]


def test_assigner_processes_are_listed_and_drained(served: Served, operator: httpx.Client, database: Database) -> None:
    database.run(lambda c: drains.record_assigner_alive(c, "host", starts=True))
    (listed,) = operator.get("/v1/assigners").json()["assigners"]
    assert (listed["name"], listed["state"], listed["draining"]) == ("host", "running", False)
    assert operator.post("/v1/assigners/host/drain", json={}).json() == {"name": "host", "draining": True}
    assert operator.get("/v1/assigners").json()["assigners"][0]["state"] == "draining"
    assert audited(database)[-1] == "assigner.drain"


def test_wrong_drains_are_refused_and_leave_nothing(served: Served, operator: httpx.Client, database: Database) -> None:
    Bot(served, "b1")
    before = audited(database)
    for path, body, status in (
        ("bots/b1", {"deadline": -1}, 422),
        ("bots/b1", {"deadline": "soon"}, 422),
        ("bots/b1", {"draining": False, "deadline": 1}, 400),
        ("bots/absent", {}, 404),
        ("bots/Bad%20Name", {}, 400),
        ("instances/default", {"deadline": 1e12}, 422),
        ("instances/default", {"reason": "x" * 501}, 400),
        ("instances/Bad%20Name", {}, 400),
        ("instances/absent", {}, 404),
        ("assigners/absent", {}, 404),
        ("assigners/absent", {"deadline": 1}, 422),
    ):
        assert operator.post(f"/v1/{path}/drain", json=body).status_code == status, (path, body)
    assert audited(database) == before


def bot_holding(leases: int, *, draining: bool = True) -> Answer:
    return Answer({"name": "b1", "draining": draining, "leases": leases})


def test_waiting_for_a_bot_ends_once_it_holds_nothing_or_is_gone_or_its_drain_is_taken_back(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    wait_instead(monkeypatch, "sleep", waits.append)
    drained = Answer({"name": "b1", "draining": True})
    stands.script = in_turn(drained, bot_holding(2), bot_holding(1), bot_holding(0))
    call("bots", "drain", "b1", "--deadline", "90", "--wait")
    assert capsys.readouterr().out == "b1 holds nothing\n"
    assert stands.paths() == ["POST /v1/bots/b1/drain", *["GET /v1/bots/b1"] * 3]
    assert stands.asked[0].body == {"draining": True, "deadline": 90.0}
    assert len(waits) == 2
    stands.script = in_turn(drained, bot_holding(2, draining=False))
    with pytest.raises(LeaseholdError, match="ended the drain"):
        call("bots", "drain", "b1", "--wait")
    stands.script = in_turn(drained, problem(404, "bot: no bot 'b1'"))
    with pytest.raises(NotFound):
        call("bots", "drain", "b1", "--wait")


def test_an_undo_has_nothing_to_wait_for(stands: Gateway) -> None:
    for option in ("--wait", "--deadline=5"):
        with pytest.raises(BadInput, match="--undo"):
            call("bots", "drain", "b1", "--undo", option)
    assert stands.asked == []


# Health


def test_the_most_severe_alert_comes_first_and_names_the_remedy(pool: Pool, operator: httpx.Client) -> None:
    pool.submit()
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 hours'")
    found = operator.get("/v1/alerts").json()["alerts"]
    assert [(each["name"], each["severity"]) for each in found] == [
        ("LeaseholdUpkeepStands", "critical"),
        ("LeaseholdJobsWaitLong", "warning"),
        ("LeaseholdJobsThatNobodyCanRun", "warning"),
    ]
    assert found[1]["summary"] == "A job has been queued for 2 h."
    assert "leasehold explain JOB" in found[1]["action"]


def test_alerts_are_read_once_for_all_who_ask_within_seconds(pool: Pool, operator: httpx.Client) -> None:
    pool.upkeep().run_once()
    assert operator.get("/v1/alerts").json()["alerts"] == []
    pool.submit()
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 hours'")
    assert operator.get("/v1/alerts").json()["alerts"] == []


def test_the_doctor_says_over_http_what_the_command_says(operator: httpx.Client) -> None:
    checks = operator.get("/v1/doctor").json()["checks"]
    assert {"schema", "wake-ups", "indexes", "autovacuum", "durability"} <= {each["name"] for each in checks}
    assert next(each["verdict"] for each in checks if each["name"] == "schema") == "ok"


@pytest.mark.breaks_invariants
def test_invariants_are_checked_and_what_breaks_one_is_named(pool: Pool, operator: httpx.Client) -> None:
    def broken() -> list[tuple[str, int]]:
        answer = operator.get("/v1/invariants?seconds=60").json()
        assert answer["finished"]
        assert len(answer["invariants"]) == len(invariants.INVARIANTS)
        return [(each["id"], each["rows"]) for each in answer["invariants"] if each["rows"]]

    pool.bot("bot-1")
    assert broken() == []
    pool.change("UPDATE bots SET in_use = 1")
    assert broken() == [("S3", 1)]


def test_a_check_of_invariants_that_takes_too_long_says_it_knows_nothing(pool: Pool, operator: httpx.Client) -> None:
    with pool.database.connect() as other:
        other.execute(Statement("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"))
        answers = [operator.get(f"/v1/invariants?seconds={seconds}").json() for seconds in (0.2, 0.0001)]
        other.rollback()
    assert [(each["finished"], each["invariants"]) for each in answers] == [(False, [])] * 2
    assert operator.get("/v1/invariants?seconds=61").status_code == 422


def test_gateways_come_in_pages_and_a_silent_one_is_dead(pool: Pool, operator: httpx.Client) -> None:
    for name in ("g1", "g2", "g3"):
        pool.database.run(
            lambda c, n=name: processes.record_gateway_alive(c, n, url=f"http://{n}", figures={"queue": 1.0})
        )
    pool.change("UPDATE gateways SET seen_at = now() - interval '2 minutes' WHERE name = 'g2'")
    pool.database.run(lambda c: processes.record_gateway_stopped(c, "g3"))
    page = operator.get("/v1/gateways?limit=2").json()["gateways"]
    assert [(each["name"], each["state"], each["figures"]) for each in page] == [
        ("g1", "running", {"queue": 1.0}), ("g2", "dead", {"queue": 1.0})
    ]  # fmt: skip
    (last,) = operator.get("/v1/gateways?after=g2").json()["gateways"]
    assert (last["name"], last["state"]) == ("g3", "stopped")
    pool.change("UPDATE gateways SET seen_at = now() - interval '25 hours' WHERE name = 'g2'")
    pool.upkeep().run_once()
    assert [each["name"] for each in operator.get("/v1/gateways").json()["gateways"]] == ["g1", "g3"]


@pytest.mark.conflicts
def test_a_locked_table_hides_only_the_alerts_that_need_it(pool: Pool, operator: httpx.Client, race: Race) -> None:
    pool.submit()
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 h'")
    with race.first() as stranger:
        stranger.connection.execute_sql("LOCK TABLE schedules IN ACCESS EXCLUSIVE MODE")
        found = {each["name"]: each["summary"] for each in operator.get("/v1/alerts").json()["alerts"]}
    race.forget_errors()
    assert found["LeaseholdJobsWaitLong"] == "A job has been queued for 2 h."
    unknown = {name for name, summary in found.items() if summary == alerts.UNREAD}
    assert unknown == {"LeaseholdSchedulesFail", "LeaseholdSchedulesAreHeldUp"}


def test_a_wrong_stored_value_hides_only_the_alerts_that_need_it(pool: Pool, operator: httpx.Client) -> None:
    pool.submit()
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 h'")
    pool.change("INSERT INTO gateways (name, url, figures) VALUES ('g', '', '7')")
    found = {each["name"]: each["summary"] for each in operator.get("/v1/alerts").json()["alerts"]}
    assert found["LeaseholdJobsWaitLong"] == "A job has been queued for 2 h."
    assert found["LeaseholdGatewayIsBehind"] == alerts.UNREAD


@pytest.mark.conflicts
def test_a_figure_that_takes_too_long_hides_only_the_alerts_that_need_it(pool: Pool, race: Race) -> None:
    def hurried(connection: Connection) -> set[str]:
        connection.execute(Statement("SELECT set_config('statement_timeout', '80', true)"))
        return {each.name for each in alerts.alerts(connection) if each.summary == alerts.UNREAD}

    with race.first() as stranger:
        stranger.connection.execute_sql("LOCK TABLE schedules IN ACCESS EXCLUSIVE MODE")
        assert pool.database.run(hurried) >= {"LeaseholdSchedulesFail", "LeaseholdSchedulesAreHeldUp"}
    race.forget_errors()


def test_the_audit_comes_in_pages_newest_first(pool: Pool, operator: httpx.Client) -> None:
    for number in range(5):
        pool.database.run(
            lambda c, n=number: audit.write(c, "limit.set", actor="op", subject=f"s{n}", details={"n": n})
        )
    page = operator.get("/v1/audit?limit=3").json()["audit"]
    assert [each["subject"] for each in page] == ["s4", "s3", "s2"]
    assert (page[0]["actor"], page[0]["action"], page[0]["details"]) == ("op", "limit.set", {"n": 4})
    rest = operator.get(f"/v1/audit?limit=3&before={page[-1]['id']}").json()["audit"]
    assert [each["subject"] for each in rest][:2] == ["s1", "s0"]
    pool.change("UPDATE audit SET details = '[7]' WHERE id = (SELECT max(id) FROM audit)")
    assert operator.get("/v1/audit?limit=1").json()["audit"][0]["details"] == {"wrong JSON is stored": [7]}
    assert operator.get("/v1/audit?before=x").headers["content-type"] == "application/problem+json"
    assert operator.get("/v1/audit?limit=1001").status_code == 422


# The effect of a change: what it would do to whom, told by the code that makes it, and nothing done


Figures = dict[tuple[str, str], tuple[float | None, float | None]]


def affected(http: httpx.Client, path: str, change: dict[str, Any], **query: str) -> Figures:
    """Instance and figure → what it is and what it would be."""
    answer = http.post(f"/v1/{path}/effect", json=change, params=query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["left_out"] == 0
    return {(each["instance"], each["field"]): (each["before"], each["after"]) for each in answer.json()["affected"]}


def test_a_quota_tells_who_could_be_evicted_and_what_it_could_not_have(pool: Pool, operator: httpx.Client) -> None:
    bot = pool.bot(capacity=3)
    operator.patch("/v1/quotas/default/small?create=true", json={"max": 5})
    pool.submit(2, instance="small")
    pool.assigner().run_once()
    bot.take()

    assert affected(operator, "quotas/default/large", {"min": 4, "max": 9}, create="true") == {
        ("large", "min"): (0, 4),
        ("large", "max"): (None, 9),
        ("large", "effective_max"): (None, 9),
        ("large", "room"): (None, 9),
        # One unit is free and two are above the minimum of the other.
        ("large", "capacity_gap"): (0, 1),
    }
    assert [each["instance"] for each in operator.get("/v1/quotas").json()["quotas"]] == ["small"]
    assert pool.rows("SELECT FROM instances WHERE name = 'large'") == []

    operator.patch("/v1/quotas/default/large?create=true", json={"min": 4, "max": 9})
    assert affected(operator, "quotas/default/small", {"min": 1, "max": 1}) == {
        ("small", "min"): (0, 1),
        ("small", "max"): (5, 1),
        ("small", "effective_max"): (5, 1),
        ("small", "room"): (3, 0),
        ("small", "over"): (0, 1),
        ("small", "opportunistic"): (2, 1),
        ("large", "reclaimable"): (2, 1),
        ("large", "capacity_gap"): (1, 2),
    }
    assert affected(operator, "quotas/default/small", {"max": 5}) == {}


def test_a_weight_tells_how_the_shares_of_all_change(pool: Pool, operator: httpx.Client) -> None:
    for name, weight in (("one", 1.0), ("three", 3.0)):
        operator.patch(f"/v1/instances/{name}", json={"weight": weight})
    before = pool.rows("SELECT * FROM audit ORDER BY id")
    assert affected(operator, "instances/new", {"weight": 4.0, "budget": 7.0}) == {
        ("new", "weight"): (None, 4),
        ("new", "share"): (None, 0.5),
        ("new", "budget"): (None, 7),
        ("one", "share"): (0.25, 0.125),
        ("three", "share"): (0.75, 0.375),
    }
    assert affected(operator, "instances/three", {"share": False}) == {
        ("three", "weight"): (3, None),
        ("three", "share"): (0.75, None),
        ("one", "share"): (0.25, 1),
    }
    assert pool.rows("SELECT * FROM audit ORDER BY id") == before
    assert [each["name"] for each in operator.get("/v1/accounts").json()["accounts"]] == ["one", "three"]


def test_what_the_change_would_be_refused_for_is_told_instead_of_an_effect(operator: httpx.Client) -> None:
    answer = operator.post("/v1/quotas/default/ci/effect?create=true", json={"min": 5, "max": 4})
    assert (answer.status_code, answer.json()["detail"]) == (400, "min: must not be more than the maximum of 4")
    assert operator.post("/v1/quotas/absent/ci/effect?create=true", json={"min": 5}).status_code == 404
    assert operator.post("/v1/quotas/default/ci/effect?create=true", json={"most": 5}).status_code == 422


def test_an_earlier_name_of_a_field_is_refused_with_the_new_one(operator: httpx.Client) -> None:
    answer = operator.patch("/v1/instances/ci", json={"credit_weight": 2})
    assert (answer.status_code, answer.json()["detail"]) == (422, "credit_weight: is now `weight`")


# Preemptions


def test_a_preemption_is_listed_with_its_receipt(
    pool: Pool, tenancy: Tenancy, operator: httpx.Client, good: Callable[[str], str]
) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    assert operator.get("/v1/preemptions").json() == {"preemptions": []}, "it is only asked to stop"
    bot.sync(completed(work, "stopped"))

    (one,) = operator.get("/v1/preemptions").json()["preemptions"]

    told = {"instance": "team-b", "job": victim, "bot": "bot-1", "preemptor_instance": "team-a", "cohort": "default"}
    assert told.items() <= one.items()
    assert one["rule"] == one["receipt"]["rule"]
    assert one["receipt"]["preemptor"]["job"] == wanting
    assert [each["job"] for each in one["receipt"]["victims"]] == [victim]
    row = good("preemptions list").splitlines()[1].split()
    assert (row[0], row[2:6]) == (str(one["id"]), [*short_ids([victim]), "team-b", "team-a", "0"])


def test_preemptions_come_in_pages_and_outlive_their_jobs(pool: Pool, tenancy: Tenancy, operator: httpx.Client) -> None:
    tenancy.quota("team-a", minimum=1)
    for age in range(5):
        tenancy.evicted("team-a", age=100 - age)

    first = operator.get("/v1/preemptions", params={"limit": 3}).json()["preemptions"]
    rest = operator.get("/v1/preemptions", params={"limit": 3, "before": first[-1]["id"]}).json()["preemptions"]

    ids = [one["id"] for one in first + rest]
    assert (len(first), len(rest)) == (3, 2)
    assert ids == sorted(ids, reverse=True)
    assert {(one["job"], one["bot"], one["instance"]) for one in first + rest} == {(None, None, "team-a")}
    assert operator.get("/v1/preemptions", params={"before": 0}).status_code in (400, 422)


# Settings in force and sampled decisions


CANDIDATES = [
    {"bot": "warm", "priority": 0, "free_units": 1, "capacity": 8, "hit": True, "rate": None},
    {"bot": "roomy", "priority": 0, "free_units": 4, "capacity": 8, "hit": False, "rate": None},
]


def decided(pool: Pool, assigner: str = "host", *, number: int = 1, **policy: Any) -> None:
    """Let a process have sampled a decision for the bot `warm`."""
    seen = Seen.model_validate({"units": 1, "label": "", "locality_hint": "a", "of": 2, "candidates": CANDIDATES})
    sample = stored(DecisionSample(JOB_COMMANDING, "warm", StrategySettings(), seen)) | policy
    for _ in range(number):
        pool.database.run(lambda c: processes.record_decision(c, assigner, **sample))


def test_an_assigner_tells_its_settings_and_their_changes(pool: Pool, operator: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "leasehold.toml"
    file.write_text('[[assigners]]\nstrategy = { weights = { locality = 7.5 } }\n[[webhooks]]\nname = "w"\n'
                    'url = "https://example.org/"\nsecret = "0123456789abcdef0123456789abcdef"\n')  # fmt: skip
    with assigner_process(pool, file):

        def told() -> Any:
            (found,) = operator.get("/v1/settings").json()["settings"]
            return found

        first = eventually(told)
        assert (first["kind"], first["processes"], first["file"]) == ("assigner", ["host"], str(file))
        assert first["settings"]["assigners"][0]["strategy"]["weights"]["locality"] == 7.5
        assert "0123456789abcdef" not in operator.get("/v1/settings").text
        file.write_text("[[assigners]]\nstrategy = { weights = { locality = 8.5 } }\n")
        second = eventually(lambda: (now := told())["changed_at"] > first["changed_at"] and now)
        assert second["settings"]["assigners"][0]["strategy"]["weights"]["locality"] == 8.5
        file.write_text("[[assigners]]\nthreads = 'many'\n")
        refused = eventually(lambda: (now := told())["error"] and now)
        assert "assigners[0].threads" in refused["error"]
        assert {**refused, "error": None} == second
        alerts = operator.get("/v1/alerts").json()["alerts"]
        assert [each["subject"] for each in alerts if each["name"] == "LeaseholdConfigurationIsRefused"] == ["host"]
    assert operator.get("/v1/settings").json() == {"settings": []}


def test_processes_that_agree_are_one_row_and_a_restart_changes_nothing(pool: Pool, operator: httpx.Client) -> None:
    def tell(name: str, weight: float) -> None:
        configuration = Configuration("/etc/leasehold.toml", {"weight": weight})
        pool.database.run(lambda c: drains.record_assigner_alive(c, name, starts=True))
        pool.database.run(lambda c: processes.record_configuration(c, Kind.ASSIGNER, name, configuration))

    for name, weight in (("a1", 1.0), ("a2", 1.0), ("a3", 2.0)):
        tell(name, weight)
    found = operator.get("/v1/settings").json()["settings"]
    assert sorted((each["processes"], each["settings"]) for each in found) == [
        (["a1", "a2"], {"weight": 1.0}), (["a3"], {"weight": 2.0})
    ]  # fmt: skip
    tell("a3", 2.0)
    assert operator.get("/v1/settings").json()["settings"] == found


def test_a_process_writes_its_sampled_decisions_and_keeps_the_newest(pool: Pool, operator: httpx.Client) -> None:
    decided(pool, "other")
    decided(pool, number=KEPT_DECISIONS + 3)
    shown = operator.get("/v1/decisions?limit=200").json()["decisions"]
    assert [each["assigner"] for each in shown] == ["host"] * KEPT_DECISIONS + ["other"]
    page = operator.get("/v1/decisions?limit=5").json()["decisions"]
    following = operator.get(f"/v1/decisions?limit=200&before={page[-1]['id']}").json()["decisions"]
    assert page + following == shown
    pool.change("UPDATE decision_samples SET at = now() - interval '25 hours'")
    pool.upkeep().run_once()
    assert operator.get("/v1/decisions").json() == {"decisions": []}


def test_a_running_process_samples_what_it_decides(pool: Pool, operator: httpx.Client) -> None:
    settings = PoolSettings.model_validate({"assigners": [{"threads": 1, "interval": 0.1}], "timing": pool.timing})
    reloader = Reloader(None, PoolSettings, {}, current=settings)
    process = AssignerProcess(pool.database, reloader, name="host", chance=random.Random(1))
    pool.bot("bot-1")
    (public_id,) = pool.submit()
    process.start()
    try:
        (shown,) = eventually(lambda: operator.get("/v1/decisions").json()["decisions"])
    finally:
        process.stop()
    assert (shown["job"], shown["bot"], shown["strategy"], shown["candidates"]) == (public_id, "bot-1", "capacity", 1)
    scores = operator.post("/v1/scores", json={}).json()
    assert (scores["chosen"], scores["by_weights"]) == ("bot-1", True)
    details = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert {**details["score"], "success": 0.0} == scores["candidates"][0]["in_force"]


def test_scores_are_computed_again_with_the_weights_that_are_tried(pool: Pool, operator: httpx.Client) -> None:
    decided(pool)
    before = pool.rows("SELECT * FROM decision_samples")
    found = operator.post("/v1/scores", json={"weights": {"locality": 1.0}}).json()
    assert (found["decision"]["bot"], found["chosen"]) == ("warm", "roomy")
    assert (found["in_force"]["locality"], found["tried"]["locality"]) == (5.0, 1.0)
    assert [(each["bot"], each["in_force"]["total"], each["tried"]["total"]) for each in found["candidates"]] == [
        ("roomy", 4.0, 4.0), ("warm", 6.0, 2.0)
    ]  # fmt: skip
    normalised = operator.post("/v1/scores", json={"capacity_term": "normalised"}).json()
    assert normalised["candidates"][0]["tried"] == {
        "total": 5.125, "priority": 0.0, "capacity": 0.125, "locality": 5.0, "success": 0.0
    }  # fmt: skip
    assert pool.rows("SELECT * FROM decision_samples") == before


def test_what_cannot_be_tried_is_refused(pool: Pool, operator: httpx.Client) -> None:
    assert "none has been sampled yet" in operator.post("/v1/scores", json={}).json()["detail"]
    decided(pool)
    for body, status, told in (
        ({"decision": 999}, 404, "decision: none with the id 999 is kept"),
        ({"weights": {"locality": 1e7}}, 422, "locality"),
        ({"weights": {"localty": 1}}, 422, "localty"),
        ({"load_power": -1}, 422, "load_power"),
        ({"decision": 0}, 422, "decision"),
    ):
        answer = operator.post("/v1/scores", json=body)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert told in answer.text
    decided(pool, policy={**StrategySettings().model_dump(mode="json"), "kind": "of-a-package"})
    answer = operator.post("/v1/scores", json={})
    assert (answer.status_code, "this gateway cannot make it again" in answer.json()["detail"]) == (400, True)
