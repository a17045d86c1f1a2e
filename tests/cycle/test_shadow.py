"""Shadows: what a version would decide on what cycles had in memory, at what price, and who is told."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from assigner.admission.ordering import OrderingSettings
from assigner.admission.rules import Rules
from assigner.cycle.settings import AssignerSettings
from assigner.cycle.shadow import Decider, Shadow, Tally
from assigner.operator_resources import versions as activation
from assigner.preemption.plan import QuotaSettings
from assigner.process import shadows as process_shadows
from schema.policy import versions
from tests.support.patience import eventually
from tests.support.pool import Pool, active, completed
from tests.support.servers import assigner_process
from tests.support.tenancy import Tenancy, share

OWN: dict[str, Any] = {"minimums_first": True, "priority_percentage": 50, "failure_backoff": 0.0,
                       "failure_backoff_cap": 0.0}  # fmt: skip
QUOTAS = QuotaSettings(preemption_delay=0, eviction_cooldown=0)
ORDERING = OrderingSettings(kind="score")


def shadow(tally: Tally, *, part: float = 1.0, processor: Callable[[], float] = lambda: 0.0, **other: Any) -> Shadow:
    """A shadow with the settings of the assigner, but for those that are given."""
    quotas, ordering = other.pop("quotas", QUOTAS), other.pop("ordering", ORDERING)
    decider = Decider(AssignerSettings(**{**OWN, **other}), quotas, ordering)
    return Shadow(decider, share=part, tally=tally, chance=random.Random(5), processor=processor)


def live(pool: Pool, tenancy: Tenancy, made: Shadow, *, cycles: int) -> None:
    """Cycles of a pool with all that decides: jobs with and without constraints, shares, quotas, evictions, samples."""
    share(pool, "b", weight=3)
    tenancy.quota("a", minimum=6)
    service = pool.sync_service(enabled=False)
    made_bots = [pool.bot(f"bot-{n}", capacity=3, priority=n % 2, sync_service=service) for n in range(4)]
    bots = [(bot, dict[str, Any]()) for bot in made_bots]
    assigner = pool.assigner(**OWN, quotas=QUOTAS, rules=Rules(ORDERING), strategy={"sampling": {"sample_size": 3}})
    assigner.shadow_by(made)
    chance = pool.chance
    for nth in range(cycles):
        for instance in "ab" if nth % 4 == 0 else "b":
            pool.submit(3, instance=instance, priority=chance.randrange(3) - (instance == "a") * 3)
            pool.submit(instance=instance, terms={"locks": [f"{chance.randrange(3)}"]}, priority=chance.randrange(3))
        assigner.run_once()
        for bot, running in bots:
            reports = []
            for work in running.values():
                if work["state"] == "cancelling":
                    reports.append(completed(work, "stopped"))
                else:
                    reports.append(completed(work) if nth % 4 < 2 and chance.random() < 0.3 else active(work))
            running.clear()
            running.update({work["job"]: work for work in bot.sync(*reports)["leases"]})


def test_the_same_policy_never_decides_otherwise(pool: Pool, tenancy: Tenancy) -> None:
    tally = Tally()
    live(pool, tenancy, shadow(tally), cycles=24)
    compared = {name for _, name in tally.jobs}
    assert compared == {"bots", "orders", "victims"}
    assert (tally.cycles["failed"], tally.reasons) == (0, {})
    assert tally.cycles["compared"] > 5


def test_other_weights_orders_and_rules_show_as_what_they_change(pool: Pool, tenancy: Tenancy) -> None:
    """Of a bot with a better priority and one with more room, the default weights take the first."""
    bots = pool.bot("near", capacity=2), pool.bot("roomy", capacity=3, priority=1)
    pool.submit(2, instance="a", priority=1)
    pool.submit(3, instance="a")
    tally = Tally()
    assigner = pool.assigner(**{**OWN, "priority_percentage": 100}, quotas=QUOTAS)
    assigner.shadow_by(shadow(tally, strategy={"weights": {"priority": 10}}, priority_percentage=0))
    assigner.run_once()
    # The cycle filled `near` first and the shadow `roomy`, so that only the third job is on the same bot; and the two
    # oldest jobs came last.
    assert tally.take().jobs == {(1, "bots"): 5, (1, "other_bots"): 4, (1, "orders"): 5, (1, "other_orders"): 5}
    assert [len(bot.take()) for bot in bots] == [2, 3]
    pool.submit(instance="b", priority=-1)
    tenancy.quota("b", minimum=1)
    assigner.shadow_by(shadow(tally, quotas=QUOTAS.model_copy(update={"max_evictions": 0})))
    assigner.run_once()
    assert tally.take().jobs == {(2, "victims"): 1, (2, "other_victims"): 1}


def test_what_was_not_read_is_not_compared_and_a_fault_harms_nothing(pool: Pool) -> None:
    pool.bot(capacity=9)
    tally, assigner = Tally(), pool.assigner(**OWN)
    wanted: Sequence[dict[str, Any]] = ({"kind": "success"}, {"kind": "round-robin"}, {"sampling": {"enabled": False}})
    for strategy in wanted:
        pool.submit()
        assigner.shadow_by(shadow(tally, strategy=strategy))
        assigner.run_once()
    assert [name for _, name in tally.jobs] == ["orders"]
    assert len(tally.reasons) == 3
    broken = shadow(tally)
    broken.candidate = None  # type: ignore[assignment]
    assigner.shadow_by(broken)
    pool.submit()
    assigner.run_once()
    assert len(pool.granted()) == 4
    assert tally.cycles == {"compared": 3, "failed": 1}


def test_a_shadow_takes_at_most_a_twentieth_of_the_processor_time() -> None:
    """A cycle takes 1 s of it, and a look of the shadow 0.5 s."""
    processor = [0.0]
    made, looks = shadow(tally := Tally(), processor=lambda: processor[0]), 0
    for _ in range(400):
        processor[0] += 1.0
        if (trace := made.begin(made.candidate)) is not None:
            with trace.shadow.budget.spending():
                processor[0] += 0.5
            looks += 1
    assert 0.03 < looks * 0.5 / processor[0] <= 0.05
    assert tally.cycles == {"skipped": 400 - looks}
    seldom = shadow(Tally(), part=0.02)
    assert 10 <= sum(seldom.begin(seldom.candidate) is not None for _ in range(1000)) <= 32


FILE = """
[[assigners]]
threads = 1
interval = 0.05
jitter = 0.0
"""
#: What is no shadow, and what the one line says.
REFUSED = [
    ("two", "VERSION: must be the number of a version, not 'two'"),
    ("9", "policy: version 9 is not kept"),
    ("1", "policy: version 1 is in force"),
    ("2 --share 1", "--share: must be a percentage above 0% and up to 100%, such as 1%, not '1'"),
    ("2 --share 101%", "--share: must be a percentage"),
    ("2 --for 8d", "seconds: must be from 1 to 604800"),
    ("2 --stop", "VERSION: goes not with --stop"),
    ("--share 1%", "VERSION: is missing"),
    ("--stop", "policy: there was no shadow"),
]


def test_operators_start_read_and_stop_a_shadow_of_all_processes_and_it_ends_by_itself(
    good: Callable[[str], str],
    operate: Callable[..., tuple[int, str]],
    operator: httpx.Client,
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_shadows, "WRITE_EVERY", 0.1)

    def drafted(**terms: Any) -> int:
        def changed(content: versions.Content) -> versions.Content:
            (entry,) = content["settings"]["assigners"].values()
            entries = {"priority-age": {**entry, "strategy": {**entry["strategy"], **terms}}}
            return {**content, "settings": {**content["settings"], "assigners": entries}}

        return activation.draft_by(pool.database, changed, actor="tune", reason="").id

    def counted(process: str) -> bool:
        found = operator.get("/v1/policies/shadow").json()["shadow"]
        return any(each["process"] == process and (each["compared"] or each["reason"]) for each in found["processes"])

    (file := tmp_path / "leasehold.toml").write_text(FILE)
    assert good("policy shadow") == "no version is the shadow, and none was\n"
    with assigner_process(pool, file), assigner_process(pool, file, "host-2"):
        other = drafted(weights={"priority": 0.0}, sampling={"enabled": True, "sample_size": 5, "max_attempts": 1})
        unusable = drafted(kind="nosuch")
        for line, why in REFUSED:
            code, said = operate("policy", "shadow", *line.split())
            assert (code, why in said, said.count("\n")) == (2, True, 1), said
        for _ in range(2):  # asked again, nothing changes
            assert f"version {other} is the shadow in 100 % of the cycles" in good(
                f"policy shadow {other} --share 100%"
            )
        refused = operator.post(f"/v1/policies/{unusable}/shadow", json={})
        assert (refused.status_code, refused.json()["code"]) == (409, "shadow_running")
        pool.bot("near", capacity=400)
        pool.bot("roomy", capacity=900, priority=99)
        for name in ("host", "host-2"):
            eventually(lambda: pool.submit() and counted(name))  # noqa: B023
        told = operator.get(f"/v1/policies/{other}").json()["shadow"]
        assert 0 < told["total"]["bots"] == told["total"]["other_bots"] <= told["starts"]
        assert told["instances"] == [{**told["total"], "instance": "default"}]
        assert (told["fetched"], told["not_compared"]) == (0, ["assigner priority-age: strategy.sampling.sample_size"])
        said = good("policy shadow")
        assert "\nother bot: " in said
        assert "\ndefault " in said
        assert f"version {other} was the shadow" in good("policy shadow --stop")
        assert operator.post("/v1/policies/shadow/stop", json={}).json()["ended"] == "it was stopped"
        good(f"policy shadow {unusable}")
        eventually(lambda: counted("host") and counted("host-2"))
        assert f"policy {unusable} cannot be used here: strategy" in good("policy shadow")
        good("policy shadow --stop")
        good(f"policy shadow {drafted()} --share 100%")  # says the same as the version in force
        eventually(lambda: pool.submit() and counted("host") and counted("host-2"))
        total = operator.get("/v1/policies/shadow").json()["shadow"]["total"]
        assert total["bots"] > 0
        assert (total["other_bots"], total["other_orders"]) == (0, 0)
        good("policy shadow --stop")
        good(f"policy shadow {other} --for 1h")
        good(f"policy activate {other}")
        assert "when its version came into force" in good(f"policy show {other}")
        assert pool.row("SELECT count(*) AS n FROM audit WHERE action LIKE 'policy.%shadow'").n == 7
