"""Strategies by name, with real packages in a directory of their own, and samples of what strategies decide."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from leasehold.errors import BadInput, LeaseholdError

from assigner.config import loading
from assigner.placement import strategy
from assigner.placement.decision_sample import (
    MAX_CANDIDATES,
    SAMPLE_SECONDS,
    DecisionRecorder,
    DecisionSample,
    Seen,
    rescore,
    sample_decision,
)
from assigner.placement.registry import StrategySettings, load
from assigner.placement.strategies.capacity import Capacity
from assigner.placement.strategies.first import First
from assigner.placement.strategies.locality import Locality
from assigner.placement.strategy import Input, Policy, Snapshot, Strategy, group_jobs
from assigner.settings import PoolSettings
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob
from tests.support.pool import Pool, bot, job, placed, snapshot

Package = Callable[[str, str], None]

#: A whole strategy as somebody else would write it: the bot whose name comes last.
LAST_NAME = """
from schema.moves.grant import Placement

class LastName:
    def choose(self, snapshot, policy, *, how):
        found = []
        for group, bots in zip(snapshot.groups, snapshot.candidates):
            bot = max(bots, key=lambda bot: bot.name)
            found += [Placement(job.id, bot.id, {**how, "bot": bot.name}) for job in group.jobs[: bot.free_units]]
        return found
"""
SEEN = snapshot([job(1)], [bot(number) for number in (7, 9, 8)])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Installs a package of one module that offers strategies; both get a name of their own for every call."""
    installed: list[Path] = []

    def install(offers: str, source: str) -> None:
        place = tmp_path / f"site-{len(installed)}"
        module = f"strategies_{uuid4().hex}"
        found = place / f"{module}-1.0.dist-info"
        found.mkdir(parents=True)
        (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (found / "entry_points.txt").write_text("[leasehold.strategies]\n" + offers.replace("MODULE", module) + "\n")
        (place / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(place)
        installed.append(place)

    return install


def loaded(tmp_path: Path, strategy: str) -> PoolSettings:
    path = tmp_path / "leasehold.toml"
    path.write_text(f"[[assigners]]\n[assigners.strategy]\n{strategy}\n")
    return loading.load(path, PoolSettings, {})


def refused(tmp_path: Path, strategy: str) -> str:
    with pytest.raises(BadInput) as caught:
        loaded(tmp_path, strategy)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path}/leasehold.toml:")


def test_the_example_of_the_docstring_runs() -> None:
    lines = str(strategy.__doc__).split("It can\nbe tested with plain values, without a database:")[1].splitlines()
    known = {"ReadyJob": ReadyJob, "FreeBot": FreeBot, "Roomiest": Capacity, **vars(strategy)}
    exec("\n".join(line.strip() for line in lines), known)
    assert (known["placement"].job_id, known["placement"].bot_id) == (1, 7)


def test_a_strategy_of_somebody_else_is_used_by_its_name(pool: Pool, package: Package) -> None:
    package("last-name = MODULE:LastName", LAST_NAME)
    for name in ("a", "z", "m"):
        pool.bot(name, capacity=5)
    pool.submit(2)
    pool.assigner(strategy={"kind": "last-name"}).run_once()
    rows = pool.rows("SELECT b.name, l.strategy FROM live l JOIN bots b ON b.id = l.bot_id")
    assert [tuple(row) for row in rows] == [("z", "last-name"), ("z", "last-name")]
    decision = pool.rows("SELECT details FROM job_events WHERE move = 'grant'")[0].details
    assert decision == {"strategy": "last-name", "round": 1, "bot": "z"}


def test_a_strategy_of_somebody_else_may_be_the_fallback_of_locality(package: Package) -> None:
    package("last-name = MODULE:LastName", LAST_NAME)
    settings = StrategySettings(kind="locality", fallback="last-name")
    (placement,) = settings.strategy.choose(SEEN, settings, how={})
    assert placement.decision == {"bot": "bot-9", "fallback": "last-name"}


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            "kind = 'localty'",
            "3: assigners[0].strategy.kind: 'localty' is not a strategy: there are 'capacity', 'fragmentation',"
            " 'locality', 'pack', 'rate-only', 'round-robin', 'success'; did you mean 'locality'?",
        ),
        ("kind = ''", "3: assigners[0].strategy.kind: '' is not a strategy: there are 'capacity', 'fragmentation',"),
        ("\nfallback = 'x\\ny'".replace("'", '"'), "4: assigners[0].strategy.fallback: 'x\\ny' is not a strategy: "),
        (
            "kind = 'locality'\nfallback = 'locality'",
            "4: assigners[0].strategy.fallback: 'locality' cannot be the fallback of itself",
        ),
        ("kind = 3", "3: assigners[0].strategy.kind: must be a valid string, not 3"),
        ("capacity_term = 'log'", "3: assigners[0].strategy.capacity_term: must be 'raw' or 'normalised', not \"log\""),
    ],
)
def test_an_unknown_strategy_is_refused_and_the_known_ones_are_named(tmp_path: Path, strategy: str, said: str) -> None:
    assert refused(tmp_path, strategy).startswith(said)


def test_the_known_strategies_are_those_of_packages_too(tmp_path: Path, package: Package) -> None:
    package("last-name = MODULE:LastName", LAST_NAME)
    assert refused(tmp_path, "kind = 'lastname'").endswith(
        "'fragmentation', 'last-name', 'locality', 'pack', 'rate-only', 'round-robin', 'success'; did you mean"
        " 'last-name'?"
    )
    package("twice = MODULE:LastName", LAST_NAME)
    package("twice = MODULE:LastName", LAST_NAME)
    assert refused(tmp_path, "kind = 'twice'").endswith("strategy.kind: 'twice' is offered by 2 packages")


@pytest.mark.parametrize(
    ("offer", "source", "said"),
    [
        ("it = MODULE:Gone", "", "cannot be loaded: AttributeError: module "),
        ("it = nowhere_at_all:It", "", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("it = MODULE:It", "1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("it = MODULE:It", "class It:\n def __init__(self, x): pass", "cannot be loaded: TypeError: "),
        ("it = MODULE:It", "raise ValueError('a\\nb')", "cannot be loaded: ValueError: a\\nb"),
        ("it = MODULE:It", "It = 3", "is not a strategy: it has no choose(snapshot, policy, *, how)"),
        (
            "it = MODULE:It",
            "class It:\n inputs = {'turns', 'turn'}",
            "is not a strategy: its inputs are no set of 'warm', 'success', 'turns', 'resources', 'waiting'",
        ),
        (
            "it = MODULE:It",
            "class It:\n def choose(self, snapshot): return []",
            "is not a strategy: it has no choose(snapshot, policy, *, how)",
        ),
    ],
)
def test_a_strategy_that_cannot_be_used_is_refused(
    tmp_path: Path, package: Package, offer: str, source: str, said: str
) -> None:
    package(offer, source)
    found = refused(tmp_path, "kind = 'it'")
    assert found.startswith("3: assigners[0].strategy.kind: 'it' (")
    assert said in found


def test_a_package_cannot_take_the_name_of_a_built_in_strategy(package: Package) -> None:
    package("capacity = MODULE:LastName", LAST_NAME)
    (placement,) = StrategySettings().strategy.choose(SEEN, Policy(), how={})
    assert placement.bot_id == 7


@pytest.mark.parametrize("placed", ["(1, 99)", "(2, 7)", "(1, 7), (1, 8)"])
def test_what_a_strategy_answers_is_checked(package: Package, placed: str) -> None:
    package(
        "wild = MODULE:Wild",
        "from schema.moves.grant import Placement\nclass Wild:\n"
        f" def choose(self, snapshot, policy, *, how): return [Placement(j, b, {{}}) for j, b in [{placed}]]",
    )
    settings = StrategySettings(kind="wild")
    with pytest.raises(LeaseholdError, match=r"strategy 'wild' put job \d on bot \d+, but it may place each"):
        settings.strategy.choose(SEEN, settings, how={})


@pytest.mark.parametrize(
    "strategy",
    [
        *map(load, ("capacity", "success", "rate-only", "round-robin", "pack")),
        Locality(Capacity(), "capacity"),
        First(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_job_that_its_quota_refuses_takes_no_room_of_a_bot(strategy: Strategy) -> None:
    jobs = [job(1, units=2), job(2, units=2), job(3), job(4, units=2)._replace(instance=2)]
    found = placed(strategy, snapshot(jobs, [bot(1, 5)], headrooms={(0, 1): 3}))
    assert [*found] == [1, 3, 4], "the quota leaves 3 units, and the bot has 5"


# Sampled decisions hold what the strategy saw, and are made again by the strategy's own code.


def sampled(seen: Snapshot, policy: StrategySettings) -> DecisionSample | None:
    return sample_decision(seen, policy.chooser[0].choose(seen, policy, how={}), policy)


@pytest.mark.parametrize(
    ("kind", "success"),
    [("capacity", 0.0), ("capacity", 20.0), ("locality", 20.0), ("success", 0.0), ("rate-only", 0.0)],
)
def test_a_sampled_decision_made_again_has_the_same_bot_and_the_same_score(
    kind: str, success: float, chance: Any
) -> None:
    policy = StrategySettings(kind=kind, weights={"success": success})
    for _ in range(30):
        bots = [bot(n, chance.randint(1, 8), capacity=8, priority=chance.randint(-2, 2)) for n in range(6)]
        jobs = [job(n, units=chance.randint(1, 2), hint=chance.choice([None, "a"])) for n in range(4)]
        seen = snapshot(
            jobs,
            *([each for each in bots if each.free_units >= group.units] for group in group_jobs(jobs)),
            hits={(chance.randrange(6), "a") for _ in range(2)},
            rates={(n, ""): chance.random() for n in range(6)} if Input.SUCCESS in policy.inputs else {},
        )
        placements = policy.chooser[0].choose(seen, policy, how={})
        sample = sample_decision(seen, placements, policy)
        first = next((each for each in placements if each.job_id == 0), None)
        if first is None:
            assert sample is None
            continue
        assert sample is not None
        assert sample.bot == f"bot-{first.bot_id}"
        again = rescore(Seen.model_validate_json(sample.seen.model_dump_json()), policy)
        assert again.chosen == sample.bot
        if kind in ("capacity", "locality"):
            place = [each.bot for each in sample.seen.candidates].index(sample.bot)
            assert again.scores[place].as_decision() == first.decision["score"]


def test_other_weights_choose_another_bot_and_take_the_score_apart() -> None:
    seen = snapshot([job(1, hint="repo")], [bot(0, 1), bot(1, 6)], hits={(0, "repo")})
    sample = sampled(seen, StrategySettings())
    assert sample is not None
    assert sample.bot == "bot-0"  # a hit, worth 5 units, and 1 free unit beside 6: the first of two equals
    tried = rescore(sample.seen, StrategySettings(weights={"locality": 4.0}))
    assert tried.chosen == "bot-1"
    assert [score.as_decision() for score in tried.scores] == [
        {"total": 5.0, "priority": 0.0, "capacity": 1.0, "locality": 4.0},
        {"total": 6.0, "priority": 0.0, "capacity": 6.0, "locality": 0.0},
    ]


def test_only_the_first_job_is_sampled_because_later_ones_see_less_room() -> None:
    sample = sampled(snapshot([job(1), job(2)], [bot(0, 2), bot(1, 2)]), StrategySettings())
    assert sample is not None
    assert (sample.job, sample.bot) == ("1", "bot-0")
    assert sampled(snapshot([job(1, units=3)], [bot(0, 2), bot(1, 2)]), StrategySettings()) is None


def test_of_many_candidates_the_one_that_was_chosen_is_kept() -> None:
    bots = [bot(number, 1, capacity=8) for number in range(2 * MAX_CANDIDATES)]
    sample = sampled(snapshot([job(1)], [*bots, bot(2 * MAX_CANDIDATES, 8)]), StrategySettings())
    assert sample is not None
    assert (len(sample.seen.candidates), sample.seen.of) == (MAX_CANDIDATES, 2 * MAX_CANDIDATES + 1)
    assert sample.bot in {each.bot for each in sample.seen.candidates}
    assert rescore(sample.seen, StrategySettings()).chosen == sample.bot


def test_a_strategy_that_goes_by_turns_has_scores_but_no_second_choice() -> None:
    sample = sampled(snapshot([job(1)], [bot(0, 1), bot(1, 2)]), StrategySettings(kind="round-robin"))
    assert sample is not None
    again = rescore(sample.seen, StrategySettings(kind="round-robin"))
    assert (len(again.scores), again.chosen) == (2, None)


def test_a_process_samples_one_decision_in_ten_seconds(pool: Pool) -> None:
    now = [100.0]
    recorder = DecisionRecorder(lambda: now[0])
    assigner = pool.assigner(recorder=recorder)
    for name in ("bot-1", "bot-2"):
        pool.bot(name, capacity=2)
    taken = []
    for _ in range(3):
        (public_id,) = pool.submit()
        assigner.run_once()
        sample = recorder.take()
        taken.append(None if sample is None else (sample.job == public_id, len(sample.seen.candidates)))
        now[0] += SAMPLE_SECONDS * 0.6
    assert taken == [(True, 2), None, (True, 2)]
    assert recorder.take() is None
