"""Strategies by name, with real packages in a directory of their own, and what is said about wrong ones."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from leasehold.errors import BadInput, LeaseholdError

from assigner.config import loading
from assigner.config.loading import Reloader
from assigner.placement.capacity import Capacity
from assigner.placement.first import First
from assigner.placement.locality import Locality
from assigner.placement.rate_only import RateOnly
from assigner.placement.registry import StrategySettings
from assigner.placement.round_robin import RoundRobin
from assigner.placement.strategy import Policy, Snapshot, Strategy, group_jobs
from assigner.placement.success import Success
from assigner.settings import PoolSettings
from schema.fleet.candidates import FreeBot
from schema.picking.pick import ReadyJob
from tests.support.pool import Pool

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
JOB = ReadyJob(1, "1", 1, cohort=0, instance=1, platform=1, priority=0, units=1, locality_hint=None, tried=False)
BOTS = [FreeBot(number, f"bot-{number}", priority=0, free_units=1, capacity=1) for number in (7, 9, 8)]
SEEN = Snapshot([JOB], group_jobs([JOB]), [BOTS], hits=frozenset())


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


def test_a_strategy_needs_no_database_to_be_tested(package: Package) -> None:
    (placement,) = StrategySettings().strategy.choose(SEEN, Policy(), how={})
    assert placement.bot_id == 7


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            "kind = 'localty'",
            "3: assigners[0].strategy.kind: 'localty' is not a strategy: there are 'capacity', 'fragmentation',"
            " 'locality', 'pack', 'rate-only', 'round-robin', 'success'; did you mean 'locality'?",
        ),
        (
            "kind = ''",
            "3: assigners[0].strategy.kind: '' is not a strategy: there are 'capacity', 'fragmentation', 'locality',"
            " 'pack', 'rate-only', 'round-robin', 'success'",
        ),
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
        "there are 'capacity', 'fragmentation', 'last-name', 'locality', 'pack', 'rate-only', 'round-robin', 'success';"
        " did you mean 'last-name'?"
    )


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


def test_a_name_that_two_packages_offer_is_refused(tmp_path: Path, package: Package) -> None:
    package("twice = MODULE:LastName", LAST_NAME)
    package("twice = MODULE:LastName", LAST_NAME)
    assert refused(tmp_path, "kind = 'twice'").endswith("strategy.kind: 'twice' is offered by 2 packages")


def test_a_package_cannot_take_the_name_of_a_built_in_strategy(package: Package) -> None:
    package("capacity = MODULE:LastName", LAST_NAME)
    (placement,) = StrategySettings().strategy.choose(SEEN, Policy(), how={})
    assert placement.bot_id == 7


def test_a_wrong_strategy_in_a_changed_file_leaves_the_old_one(tmp_path: Path) -> None:
    before = loaded(tmp_path, "kind = 'locality'")
    path = tmp_path / "leasehold.toml"
    reloader = Reloader(path, PoolSettings, {}, current=before)
    path.write_text("[[assigners]]\n[assigners.strategy]\nkind = 'nothing'\n")
    reloader.request()
    reloader.run_once()
    reloader.run_once()
    assert reloader.current is before


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
    [Capacity(), Success(), RateOnly(), RoundRobin(), Locality(Capacity(), "capacity"), First()],
    ids=lambda each: type(each).__name__,
)
def test_a_job_that_its_quota_refuses_takes_no_room_of_a_bot(strategy: Strategy) -> None:
    jobs = [
        JOB._replace(id=1, public_id="1", units=2),
        JOB._replace(id=2, public_id="2", units=2),
        JOB._replace(id=3, public_id="3", units=1),
        JOB._replace(id=4, public_id="4", instance=2, units=2),
    ]
    groups = group_jobs(jobs)
    bots = [FreeBot(1, "bot-1", priority=0, free_units=5, capacity=5)]
    snapshot = Snapshot(jobs, groups, [bots for _ in groups], frozenset(), headrooms={(0, 1): 3})
    placed = strategy.choose(snapshot, Policy(), how={})
    assert [each.job_id for each in placed] == [1, 3, 4], "the quota leaves 3 units, and the bot has 5"
