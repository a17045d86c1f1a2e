"""A version tried on some cohorts first: its steps, its guards, where its settings decide, and its return."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.client import Client

from assigner.operator_resources import canaries as watching
from assigner.operator_resources.guards import (
    Arms,
    Figures,
    guard,
    high_count,
    high_quantile,
    independent,
    judge,
    low_count,
    low_quantile,
    quantile_of_longest,
)
from schema.policy import canaries, trials, versions
from schema.postgres.connection import Connection
from schema.timing import Timing
from tests.support.patience import eventually
from tests.support.pool import Pool, completed
from tests.support.servers import Processes, assigner_process
from tests.support.tenancy import Tenancy, put_cohort

GUARDS = ["p95_wait <= 60", "evictions<=1.5x"]


def maximums(pool: Pool) -> dict[str, int | None]:
    """The maximum of instance `ci` in each cohort."""
    found = pool.database.run(lambda c: versions.read(c, {}))["limits"]["quota"]
    return {name.partition("/")[0]: terms["max"] for name, terms in found.items()}


def mark(pool: Pool) -> Any:
    """What the version in force says of the trial."""
    return trials.of(pool.database.run(versions.in_force).content)  # type: ignore[union-attr, arg-type]


def begun(pool: Pool, tenancy: Tenancy, operator: httpx.Client, on: str = "cohort:a cohort:b cohort:c") -> int:
    """Begin the trial of a version with other maximums in all cohorts; returns the number of the version."""
    for name in "abcd":
        put_cohort(pool, name, name)
        tenancy.quota("ci", cohort=name, maximum=9)
    operator.put("/v1/rates/cli", json={"per_second": 1})
    limits = {"quota": {f"{name}/ci": {"max": 2} for name in "abcd"}, "rate": {"cli": {"per_second": 3}}}
    draft = operator.post("/v1/policies", json={"settings": {}, "limits": limits, "reason": "fewer"}).json()
    assert (draft["drafted"], draft["in_force"], draft["changed"]) == (True, False, 5)
    asked = {"on": on.split(), "steps": [30, 60], "every": 10, "guards": GUARDS, "least": 2}
    answer = operator.post(f"/v1/policies/{draft['id']}/canary", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["untried"] == ["quota d/ci max", "rate cli per_second"]
    return int(draft["id"])


def judged(pool: Pool, *, after: float = 0.0) -> tuple[str | None, dict[str, bool | None]]:
    """Look at the trial as if its step had begun `after` seconds earlier: what was done, and which guards hold."""
    pool.change("UPDATE policy_canaries SET step_at = step_at - make_interval(secs => :after)", after=after)
    done = watching.watch(pool.database, pause=0.0)
    measured = pool.row("SELECT measured FROM policy_canaries ORDER BY id DESC LIMIT 1").measured
    return done, {each["guard"]: each["holds"] for each in (measured or {"guards": ()})["guards"]}


def test_a_trial_that_cannot_be_read_is_told_and_ended_by_another_version(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    tried = begun(pool, tenancy, operator)
    pool.change("UPDATE policy_canaries SET measured = '[]', undo = '7'")
    for answer in (operator.get("/v1/policies/canary"), operator.post("/v1/policies/canary/stop", json={})):
        assert (answer.status_code, answer.json()["code"]) == (409, "canary_unreadable")
    base = answer.json()["detail"].partition("`policy activate ")[2].partition("`")[0]
    assert operator.post(f"/v1/policies/{base}/activate", json={}).status_code == 200
    assert operator.post("/v1/policies/canary/stop", json={}).json()["code"] == watching.NONE
    assert maximums(pool)["a"] == 9
    assert int(base) < tried


def test_a_trial_rises_by_steps_and_returns_when_a_guard_breaks(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    tried = begun(pool, tenancy, operator)
    assert maximums(pool) == {"a": 2, "b": 9, "c": 9, "d": 9}
    base = operator.get("/v1/policies/canary").json()["base"]
    assert mark(pool) == {"id": 1, "policy": tried, "base": base, "cohorts": ["a"]}
    for path, asked in (
        (f"{tried}/canary", {"on": ["cohort:a"], "guards": GUARDS}),
        ("rollback", {}),
    ):
        assert operator.post(f"/v1/policies/{path}", json=asked).json()["code"] == "canary_running"

    # Too little is known, so it neither rises nor falls, however long it lasts.
    assert judged(pool, after=60) == ("looked", {"p95_wait<=60": None, "evictions<=1.5x": None})
    pool.submit(3, instance="ci", label="a")
    bot = pool.bot(labels=["a"], capacity=3)
    pool.assigner().run_once()
    bot.sync(*[completed(work) for work in bot.take()])
    # Nothing was there before, so that no factor of it can be judged; the operator takes another guard.
    assert judged(pool, after=60)[1] == {"p95_wait<=60": True, "evictions<=1.5x": None}
    pool.change("UPDATE policy_canaries SET guards = '[\"p95_wait<=60\"]'")
    # What an operator changes meanwhile stays, also at the next step.
    assert operator.patch("/v1/quotas/a/ci", json={"max": 4}).status_code == 200
    assert judged(pool, after=-5) == ("acted", {})
    assert maximums(pool) == {"a": 4, "b": 2, "c": 9, "d": 9}
    assert mark(pool)["cohorts"] == ["a", "b"]
    # At the last step it stays, and is still guarded.
    pool.submit(6, instance="ci", label="b")
    assert judged(pool, after=60) == ("looked", {"p95_wait<=60": True})

    assert operator.patch("/v1/quotas/b/ci", json={"max": 5}).status_code == 200
    assert mark(pool)["cohorts"] == ["a", "b"]
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '2 minutes' WHERE state = 'queued'")
    pool.change("UPDATE policy_canaries SET every = 600")
    assert judged(pool, after=120)[0] == "acted"
    assert maximums(pool) == {"a": 4, "b": 5, "c": 9, "d": 9}
    assert mark(pool) is None
    state = operator.get("/v1/policies/canary").json()
    assert (state["outcome"], state["reached"], state["guards"][0]["holds"]) == ("returned", ["a", "b"], False)
    assert state["why"].startswith("p95_wait<=60: 12")
    assert judged(pool)[0] is None
    assert operator.post("/v1/policies/canary/stop", json={}).json()["code"] == "no_canary"
    # A rollback goes to what was in force before the trial, not to one of its steps.
    assert operator.post("/v1/policies/rollback", json={}).json()["id"] == base
    acts = [row.action for row in pool.rows("SELECT action FROM audit WHERE action LIKE 'policy.canary%' ORDER BY id")]
    assert acts == ["policy.canary", "policy.canary.returned"]


def test_a_trial_ends_when_its_version_or_another_one_is_activated(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    tried = begun(pool, tenancy, operator)
    base = operator.get("/v1/policies/canary").json()["base"]
    assert operator.post(f"/v1/policies/{tried}/activate", json={}).json()["id"] == tried
    assert (maximums(pool)["d"], mark(pool)) == (2, None)
    assert operator.get("/v1/policies/canary").json()["outcome"] == "activated"
    assert operator.post("/v1/policies/rollback", json={}).json()["id"] == base
    asked = {"on": ["instance:ci"], "guards": ["others:p50_wait<=2x"], "steps": [100]}
    assert operator.post(f"/v1/policies/{tried}/canary", json=asked).json()["reached"] == ["ci"]
    assert set(maximums(pool).values()) == {2}
    # A process of the release before puts another version into force and knows nothing of trials.
    pool.database.run(lambda c: versions.note_change(c, actor="old", reason="", settings={}))
    assert judged(pool)[0] == "replaced"
    assert operator.get("/v1/policies/canary").json()["outcome"] == "replaced"


def test_drafts_have_nothing_of_a_trial_and_take_back_no_changes_that_were_made_since(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    tried = begun(pool, tenancy, operator)
    draft = operator.post("/v1/policies", json={"settings": {}, "limits": {"rate": {"cli": {"per_second": 7}}}}).json()
    assert [each["what"] for each in draft["changes"]] == ["rate cli"]
    # What an operator changes during a trial makes the tried version stale, and its step does not.
    operator.put("/v1/rates/cli", json={"per_second": 2})
    assert operator.post(f"/v1/policies/{tried}/activate", json={}).json()["code"] == "stale_draft"
    operator.put("/v1/rates/cli", json={"per_second": 1})
    # What no version has, of a process of the release before, stays too.
    pool.change("UPDATE quotas SET max_quota = 7 WHERE cohort = (SELECT id FROM cohorts WHERE name = 'd')")
    assert operator.post("/v1/policies/canary/stop", json={}).json()["outcome"] == "stopped"
    assert maximums(pool) == {"a": 9, "b": 9, "c": 9, "d": 7}
    operator.patch("/v1/quotas/d/ci", json={"max": 9})
    assert operator.post(f"/v1/policies/{draft['id']}/activate", json={}).json()["id"] == draft["id"]
    assert maximums(pool) == {"a": 9, "b": 9, "c": 9, "d": 9}


def test_a_guard_compares_with_what_would_be_so_without_the_trial() -> None:
    def waits(p95: float | None, sample: int = 50, low: float | None = None) -> Figures:
        return Figures(sample, sample, 0, None, p95, p95_wait_low=p95 if low is None else low)

    cases: list[tuple[str, Figures, Figures, Figures, Figures, float | None, bool | None]] = [
        # guard, tried now and before, others now and before, limit, holds
        ("p95_wait<=1.2x", waits(12), waits(10), waits(5), waits(5), 12, True),
        ("p95_wait<=1.2x", waits(12.1), waits(10), waits(5), waits(5), 12, False),
        ("p95_wait<=1.2x", waits(20), waits(10), waits(10), waits(5), 24, True),  # work has come to all
        (
            "p95_wait<=1.2x",
            waits(13),
            waits(10),
            waits(2),
            waits(5),
            12,
            False,
        ),  # others are better off
        ("p95_wait<=2x", waits(1.9), waits(0.1), waits(1), waits(1), 2, True),  # below a second counts as that
        ("p95_wait<=1.2x", waits(99, 50, 11), waits(10), waits(5), waits(5), 12, None),  # it may be chance
        ("p95_wait<=1.2x", waits(99, 4), waits(10), waits(5), waits(5), 12, None),
        ("p95_wait<=1.2x", waits(99), waits(10, 4), waits(5), waits(5), None, None),
        ("p95_wait<=1.2x", waits(13), waits(10), waits(10, 4), waits(5), 12, False),
        ("others:p95_wait<=2x", waits(1), waits(1), waits(11), waits(5), 10, False),
        ("p95_wait<=30", waits(31), waits(None, 0), waits(5), waits(5), 30, False),
    ]
    for text, now, before, others, others_before, limit, holds in cases:
        found = judge(guard(text), Arms(now, others), Arms(before, others_before), least=5)
        assert (found.limit, found.holds) == (limit, holds), text


def test_a_guard_is_broken_only_by_what_few_jobs_now_and_before_would_hardly_show_by_chance() -> None:
    # Of 20 jobs 5 in the slowest 5 % may be chance, once in 400 looks; 6 are not, once in 3,000.
    assert [round(low_quantile(sample, 0.95) * sample) for sample in (1, 2, 20, 1000)] == [0, 0, 14, 929]
    # Of 100 jobs all may be among the fastest 95 %, once in 170 looks; of 200 jobs 199 are, once in 2,500.
    assert [round(high_quantile(sample, 0.95) * sample) for sample in (1, 100, 200, 1000)] == [1, 100, 199, 971]
    assert [round(high_quantile(sample, 0.5) * sample) for sample in (1, 20, 1000)] == [1, 18, 549]
    assert [round(low_count(count), 1) for count in (0, 1, 9, 100)] == [0, 0, 2.3, 71.8]
    assert [round(high_count(count), 1) for count in (0, 1, 9, 100)] == [6.5, 8.8, 22.2, 134.4]
    # As many jobs as before: the longest is as often now as it was before, and the ten longest once in 1,024.
    sizes = ((1000, 1000), (10, 90), (9, 0))
    assert [round((1 - quantile_of_longest(of, before)) * of) for of, before in sizes] == [9, 2, 8]
    # First 50 jobs wait for longer than the median, then 50 for less: together they tell no more than one or two.
    assert [independent(100, 0.5, each) for each in (None, 50, 25, 1)] == [100, 100, 34, 2]

    few = Figures(60, 60, 0, evictions=2.0, evictions_high=9.0, max_wait=30.0, p95_wait=20.0, p95_wait_high=40.0)
    now = Figures(60, 60, 0, evictions=12.0, evictions_low=5.0, p95_wait=50.0, p95_wait_low=41.0)
    now, nothing = replace(now, max_wait=90.0, max_wait_low=25.0), Figures()
    held = {"evictions<=2x": None, "max_wait<=2x": None, "max_wait<=80": False, "p95_wait<=1x": False,
            "p95_wait<=1.2x": None}  # fmt: skip
    for text, holds in held.items():
        assert judge(guard(text), Arms(now, nothing), Arms(few, nothing), least=50).holds is holds, text


def test_it_is_counted_how_often_successive_waits_cross_a_quantile(pool: Pool) -> None:
    bot = pool.bot(capacity=40)
    pool.submit(40, instance="ci")
    pool.assigner().run_once()
    bot.sync(*[completed(work) for work in bot.take()])
    ci = pool.row("SELECT id FROM instances WHERE name = 'ci'").id

    def crossed(slow: str) -> tuple[int, ...] | None:
        pool.change("UPDATE jobs SET queued_at = now() - interval '1000 s' + make_interval(secs => id)")
        pool.change(f"""
            UPDATE leases l SET granted_at = j.queued_at + make_interval(
                secs => CASE WHEN {slow} THEN 500 ELSE 100 END + 0.1 * j.id)
            FROM jobs j WHERE l.job_id = j.id""")
        found, _ = pool.database.run(lambda c: canaries.count(c, "instance", [ci], seconds=3600.0))
        assert found.sample == 40
        return found.crossed

    assert crossed("j.id <= 20") == (1, 2), "the last two of the slow ones are the slowest twentieth"
    assert crossed("j.id % 2 = 0") == (39, 3)


def test_a_trial_is_looked_at_although_the_clock_was_set_back(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    begun(pool, tenancy, operator)
    assert judged(pool)[0] == "looked"
    pool.change("UPDATE policy_canaries SET looked_at = now() + interval '1 h', step_at = now() + interval '1 h'")
    looked = pool.database.run(lambda c: canaries.claim(c, pause=5.0))
    assert looked is not None
    assert 0.0 <= looked.lasted < 1.0
    assert pool.database.run(lambda c: canaries.claim(c, pause=5.0)) is None


def test_jobs_that_have_long_waited_count_only_when_nothing_starts_any_more(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    put_cohort(pool, "a", "a")
    pool.submit(20, instance="ci", label="a", properties={"gpu": "none has it"})
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '1 day'")
    bot = pool.bot(labels=["a"], capacity=60)

    def start(count: int) -> None:
        pool.submit(count, instance="ci", label="a")
        pool.assigner().run_once()
        bot.sync(*[completed(work) for work in bot.take()])

    start(40)
    begun(pool, tenancy, operator)
    pool.change("UPDATE policy_canaries SET guards = '[\"p50_wait<=2x\"]', every = 3600")
    start(2)
    pool.change("UPDATE leases SET granted_at = granted_at - interval '1 hour' WHERE fence > 0 AND job_id <= 60")
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '1 hour' WHERE id BETWEEN 21 AND 60")
    assert judged(pool, after=60) == ("looked", {"p50_wait<=2x": True})
    pool.change("UPDATE leases SET granted_at = granted_at - interval '1 hour'")
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '1 hour' WHERE state <> 'queued'")
    assert judged(pool, after=60)[1] == {"p50_wait<=2x": None}, "in two minutes one or two starts are usual"
    assert judged(pool, after=600)[0] == "acted"
    state = operator.get("/v1/policies/canary").json()
    assert (state["why"].startswith("p50_wait<=2x: 8"), state["now"]["sample"]) == (True, 20)


# Between two cycles only a wake-up counts.
CONFIG = '[[assigners]]\nkind = "{kind}"\ninterval = 600\n[assigners.strategy]\nkind = "{strategy}"\n'


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
def test_the_settings_of_the_version_decide_in_the_named_cohorts_alone(
    pool: Pool, tmp_path: Path, operate: Callable[..., tuple[int, str]], operator: httpx.Client, kind: str
) -> None:
    file, other = tmp_path / "leasehold.toml", tmp_path / "other.toml"
    file.write_text(CONFIG.format(kind=kind, strategy="capacity"))
    other.write_text(CONFIG.format(kind=kind, strategy="pack"))
    for name in "ab":
        put_cohort(pool, name, name)
        pool.bot(name, labels=[name], capacity=9)

    def strategies() -> dict[str, str]:
        jobs = {}
        for name in "ab":
            jobs[name] = job = pool.submit(label=name)[0]
            eventually(lambda job=job: pool.job(job).state == "leased")
        asked = "SELECT strategy FROM leases l JOIN jobs j ON j.id = l.job_id WHERE j.public_id = CAST(:id AS uuid)"
        return {name: pool.row(asked, id=job).strategy for name, job in jobs.items()}

    with assigner_process(pool, file):
        code, said = operate("policy", "draft", str(other))
        assert (code, said.split()[:5]) == (0, ["version", "2", "is", "a", "draft"])
        assert strategies() == {"a": "capacity", "b": "capacity"}
        code, said = operate("policy", "canary", "2", "--on", "cohort:a", "--guard", "p95_wait<=2x")
        assert code == 0
        assert said.startswith("version 2 on 1 of 1 cohort: a\nstep 1 of 1 since ")
        eventually(lambda: pool.row("SELECT policy FROM assigners").policy == 3)
        assert strategies() == {"a": "pack", "b": "capacity"}
        # A cohort that is made meanwhile is served, and not by the trial.
        assert operator.put("/v1/cohorts/c", json={"labels": ["c"]}).status_code == 200
        pool.bot("c", labels=["c"])
        job = pool.submit(label="c")[0]
        eventually(lambda: pool.job(job).state == "leased")
        code, said = operate("policy", "canary", "--stop", "--reason", "enough")
        assert (code, "\nstopped " in said, ": enough\n" in said) == (0, True, True)
        eventually(lambda: pool.row("SELECT policy FROM assigners").policy == 5)
        assert strategies() == {"a": "capacity", "b": "capacity"}


#: What the host's file says where a version changes an entry that the host does not have.
OTHER_ENTRY = '[[assigners]]\nkind = "cohort"\ncohorts = ["a", "b"]\ninterval = 600\n'


@pytest.mark.parametrize("config", [CONFIG.format(kind="priority-age", strategy="capacity"), OTHER_ENTRY])
def test_a_trial_rises_only_where_an_assigner_at_work_decides_by_its_version(
    pool: Pool, tmp_path: Path, operate: Callable[..., tuple[int, str]], operator: httpx.Client, config: str
) -> None:
    file, other = tmp_path / "leasehold.toml", tmp_path / "other.toml"
    file.write_text(config)
    other.write_text(CONFIG.format(kind="priority-age", strategy="pack"))
    for name in "ab":
        put_cohort(pool, name, name)
    bot = pool.bot("a", labels=["a"], capacity=1)
    (first,) = pool.submit(label="a")
    with assigner_process(pool, file):
        eventually(lambda: pool.job(first).state == "leased")
        assert operate("policy", "draft", str(other))[0] == 0
        asked = {"on": ["cohort:a", "cohort:b"], "steps": [50, 100], "every": 10, "guards": GUARDS[:1], "least": 2}
        assert operator.post("/v1/policies/2/canary", json=asked).status_code == 200
        eventually(lambda: pool.row("SELECT policy FROM assigners").policy == 3)
        if config != OTHER_ENTRY:
            assert operate("assigners", "drain", "host", "--wait")[0] == 0
        # What the bot fetches starts all the same, and a guard holds for it.
        pool.submit(3, label="a")
        works = bot.take()
        for _ in range(3):
            works = bot.sync(completed(works[0]))["leases"]
        eventually(lambda: judged(pool, after=60.0)[1] == {"p95_wait<=60": True})
        state = operator.get("/v1/policies/canary").json()
        assert (state["step"], state["undecided"]) == (0, ["a"])
        assert "no assigner at work decides by it in a, so that it does not rise" in operate("policy", "canary")[1]
        if config != OTHER_ENTRY:
            assert operate("assigners", "undrain", "host")[0] == 0
            eventually(lambda: judged(pool, after=60.0) and operator.get("/v1/policies/canary").json()["step"] == 1)
            eventually(lambda: judged(pool, after=60.0) and not operator.get("/v1/policies/canary").json()["undecided"])


def test_a_version_with_settings_and_one_without_any_are_unlike(
    pool: Pool, operator: httpx.Client, operate: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        put_cohort(pool, name, name)
    operator.put("/v1/rates/cli", json={"per_second": 1})
    wanted = {"settings": {"quotas": {"preemption_delay": 7}}, "limits": {}, "reason": "later"}
    tried = operator.post("/v1/policies", json=wanted).json()["id"]
    asked = {"on": ["cohort:a", "cohort:b"], "steps": [50, 100], "every": 10, "guards": GUARDS[:1], "least": 2}
    assert operator.post(f"/v1/policies/{tried}/canary", json=asked).status_code == 200
    bot = pool.bot(labels=["a"], capacity=3)
    pool.submit(3, label="a")
    pool.assigner().run_once()
    bot.sync(*[completed(work) for work in bot.take()])
    assert judged(pool, after=60) == ("looked", {"p95_wait<=60": True})
    state = operator.get("/v1/policies/canary").json()
    assert (state["step"], state["undecided"]) == (0, ["a"])

    def undecided(**versions: Any) -> list[str]:
        def work(connection: Connection) -> list[str]:
            canary = canaries.last(connection)
            assert canary is not None
            return canaries.undecided(connection, replace(canary, **versions), ["a"], sections=watching.BY_COHORT)

        return pool.database.run(work)

    assert undecided(policy=state["base"], base=tried) == undecided(base=99) == ["a"], "also the other way round"
    assert undecided(policy=state["base"]) == undecided(base=tried) == []

    assert "decides by it in a, so" in operate("policy", "canary")[1]
    whole = Client.call

    def of_an_earlier_release(*asked: Any, **how: Any) -> dict[str, Any]:
        return {name: value for name, value in whole(*asked, **how).items() if name != "undecided"}

    monkeypatch.setattr(Client, "call", of_an_earlier_release)
    code, said = operate("policy", "canary")
    assert (code, "decides by it" in said) == (0, False)


def test_wrong_trials_are_refused(
    operate: Callable[..., tuple[int, str]], operator: httpx.Client, pool: Pool, tenancy: Tenancy
) -> None:
    operator.post("/v1/policies/canary/stop", json={})
    begun(pool, tenancy, operator)
    operator.post("/v1/policies/canary/stop", json={})
    version, on, guarded = ["6"], ["--on", "cohort:a"], ["--guard", "p95_wait<=2x"]
    version = [str(operator.get("/v1/policies/canary").json()["policy"])]
    for arguments, said in (
        ([*version, *guarded], "error: --on: says where it is tried, such as cohort:gpu or instance:web"),
        ([*version, *on], "error: --guard: is missing"),
        ([*version, *on, "--guard", "jain>=0.9"], "error: guard: 'jain>=0.9' is no guard such as p95_wait<=2x"),
        ([*version, *on, *guarded, "--on", "instance:ci"], "error: on: cohorts and instances cannot be mixed"),
        ([*version, "--on", "cohort:z", *guarded], "error: on: there is no cohort 'z'"),
        ([*version, *on, *guarded, "--steps", "50,25"], "error: steps: must rise, such as 25,50,100"),
        ([*version, *on, *guarded, "--steps", "half"], "error: --steps: 'half' is no list of percentages"),
        ([*version, *on, *guarded, "--every", "1"], "error: every: "),
        ([*version, "--on", "instance:team-b", *guarded], "error: on: there is no instance 'team-b'"),
        (["x", *on, *guarded], "error: VERSION: must be the number of a version, not 'x'"),
        (["999", *on, *guarded], "error: policy: version 999 is not kept"),
        ([*version, "--stop"], "error: --stop: goes alone"),
        (on, "error: VERSION: is missing: the number of the version to try"),
    ):
        code, told = operate("policy", "canary", *arguments)
        assert code != 0, arguments
        assert told.startswith(said), arguments
    operator.put("/v1/rates/cli", json={"per_second": 2})
    code, told = operate("policy", "canary", *version, *on, *guarded)
    assert (code, told.startswith("error: policy: something was changed since draft")) == (2, True), told
    assert mark(pool) is None
    for body, field in (
        ({"settings": {}, "limits": {"nothing": {}}}, "limits"),
        ({"settings": {"bot": {}}}, "settings"),
        ({"settings": {}, "limits": {"quota": {"a/ci": {"max": "many"}}}}, "limits.quota.a/ci.max"),
        ({"settings": {}, "limits": {"quota": {"a": {"max": 1}}}}, "limits.quota"),
        ({"settings": {}, "limits": {"lock": {"ci/a/b": {"slots": 1}}}}, "limits.lock"),
        ({"settings": {}, "limits": {"pool-limit": {"x": {"budget": 1}}}}, "limits.pool-limit"),
    ):
        answer = operator.post("/v1/policies", json=body)
        assert (answer.status_code, field in answer.text) == (400, True), answer.text


@pytest.mark.conflicts
def test_a_trial_returns_although_the_process_that_watched_it_was_killed(
    pool: Pool, tenancy: Tenancy, scratch: Path, database_url: str, timing: Timing
) -> None:
    with Processes(scratch, database_url, timing, config="") as running:
        watchers = [running.assigner(f"assigner-{number}") for number in (1, 2)]
        running.gateway()
        headers = {"Authorization": f"Bearer {running.operator_token}"}
        with httpx.Client(base_url=running.url, headers=headers, trust_env=False) as operator:
            begun(pool, tenancy, operator)
            eventually(lambda: pool.row("SELECT measured FROM policy_canaries").measured is not None)
            watchers[0].signal(signal.SIGKILL)
            pool.submit(3, instance="ci", label="a")
            pool.change("UPDATE jobs SET queued_at = queued_at - interval '2 minutes'")
            eventually(lambda: maximums(pool)["a"] == 9, within=60.0)
            assert operator.get("/v1/policies/canary").json()["outcome"] == "returned"
