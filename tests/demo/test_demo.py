"""The demo: its input, its digests, its counting, and what it says of wrong and lost results."""

import base64
import io
import json
import random
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from leasehold.client import Client
from leasehold.errors import LeaseholdError
from rich.console import Console

from bots.demo import demo, tenants, workload
from bots.demo import report as report_demo
from bots.demo.workload import Module
from tests.support.http import Answer, ReceivedRequest, gateway

AT = "2026-01-01T00:00:"
RECEIPT = {
    "rule": "lower_priority_only",
    "bot": "b1",
    "preemptor": {"instance": "web", "priority": -10, "waited_seconds": 1.04, "usage": 0, "min_quota": 2},
    "victims": [{"instance": "scrub", "priority": 100}],
}


@pytest.fixture(autouse=True)
def hasty_scrubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrubs that read two files and do not pause."""
    monkeypatch.setattr(tenants, "PAUSE", 0.0)
    monkeypatch.setattr(tenants, "FILES", 2)
    monkeypatch.setattr(tenants, "SCRUBS", 3)
    monkeypatch.setattr(tenants, "WATCH_INTERVAL", 0.02)


def run_job(request: dict[str, Any], **environment: str) -> bytes:
    """What the command of a job writes, in a process of its own."""
    return subprocess.run(request["command"], env=environment, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return workload.find_modules()


class Pretend:
    """Says what a pool would, but runs each job at once, itself. The result of the job with the label `spoil` is wrong,
    the one with the label `lose` never ends; `tools` are the units that this instance uses."""

    def __init__(self, *, spoil: str = "", lose: str = "", bots: str = "ok", tools: int = 4) -> None:
        self._spoil, self._lose, self._bots = spoil, lose, bots
        self._usage = {"web": 2, "tools": tools, "scrub": 12}
        self.quotas: dict[str, Any] = {}
        self._jobs: dict[str, dict[str, Any]] = {}

    def __call__(self, asked: ReceivedRequest) -> Answer:
        match asked.path.split("/")[2:]:
            case ["bots"]:
                return Answer({"bots": [{"name": bot.name, "status": self._bots} for bot in demo.bots_wanted()]})
            case ["quotas"]:
                used = [{"cohort": "default", "instance": name, "usage": usage} for name, usage in self._usage.items()]
                return Answer({"quotas": used})
            case ["quotas", "default", instance]:
                if asked.method == "DELETE":
                    del self.quotas[instance]
                else:
                    self.quotas[instance] = asked.body
                return Answer({"name": instance})
            case ["jobs"]:
                return Answer({"jobs": [{"id": self._take(job), "created": True} for job in asked.body["jobs"]]})
            case ["jobs", "wait"]:
                jobs = [{"id": id, "state": self._state(id)} for id in asked.body["ids"]]
                return Answer({"jobs": jobs, "done": False})
            case ["jobs", id]:
                return Answer(self._show(id))
            case ["jobs", id, "output"]:
                data = b"" if int(asked.query["start"]) else self._written(id)
                piece = {"start": 0, "data": base64.b64encode(data).decode(), "next": len(data)}
                return Answer(piece | {"state": "succeeded", "attempt": 1, "final": True})
        raise AssertionError(asked.path)

    def _take(self, job: dict[str, Any]) -> str:
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, job["key"]))
        self._jobs[id] = job
        return id

    def _state(self, id: str) -> str:
        return "queued" if self._jobs[id].get("label") == self._lose else "succeeded"

    def _show(self, id: str) -> dict[str, Any]:
        first = self._jobs[id].get("label") == "json/decoder.py"
        if self._jobs[id]["instance"] == tenants.INSTANCE:
            return {"id": id, "state": "succeeded", "events": [{"move": "preempted", "details": RECEIPT}]}
        ended, granted = ("00.700000Z", "00.500000Z") if first else ("10Z", "09+00:00")
        moves: list[tuple[str, str, Any]] = [
            ("submit", "00+00:00", None),
            ("grant", "00.250000Z", {"bot": "b1", "strategy": "capacity"}),
            ("grant", granted, {"bot": "b2", "strategy": "proactive"}),
        ]
        events = [{"move": move, "at": AT + at, "details": details} for move, at, details in moves]
        times = {"created_at": AT + "00+00:00", "finished_at": AT + ended}
        return {"id": id, "state": self._state(id), "bot": "b2", "events": events, **times}

    def _written(self, id: str) -> bytes:
        written = run_job(self._jobs[id])
        return written[::-1] if self._jobs[id].get("label") == self._spoil else written


#: Some modules of every instance, few enough to run here.
SMALL = {"json/decoder.py", "json/scanner.py", "keyword.py", "encodings/ascii.py", "unittest/__main__.py"}


@pytest.fixture
def small(modules: list[Module], monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    chosen = [module for module in modules if module.name in SMALL]
    monkeypatch.setattr(workload, "find_modules", lambda limit=None: chosen[:limit])
    return chosen


def run(pretend: "Pretend", **options: Any) -> None:
    """Run the whole demo."""
    with gateway(pretend) as stands:
        pool = demo.Pool(stands.url, "token", Path("/nowhere"))
        demo.run(pool, demo.Options(**options), chance=random.Random(4))


def work(pretend: "Pretend", modules: list[Module], *, stalled: float = 30.0) -> report_demo.Report:
    console = Console(file=io.StringIO())
    with gateway(pretend) as stands, Client(stands.url, "token", chance=random.Random(3)) as client:
        return demo.work(client, modules, console=console, stalled=stalled)


def test_there_are_at_least_600_real_modules_always_in_the_same_order(modules: list[Module]) -> None:
    assert len(modules) >= 600
    assert len({module.path for module in modules}) == len(modules)
    assert modules == workload.find_modules()
    assert all(module.path.stat().st_size == module.size for module in modules)
    assert set(workload.shares(modules)) == {"web", "core", "tools"}
    # A limit takes an even selection.
    assert workload.find_modules(2) == [modules[0], modules[len(modules) // 2]]
    assert workload.find_modules(10**6) == modules


def test_a_python_with_few_modules_adds_files_until_there_are_enough() -> None:
    own = workload.find_modules(at_least=0)
    more = workload.find_modules(at_least=len(own) + 20)
    assert more[: len(own)] == own
    assert len(more) == len(own) + 20
    assert len({module.path for module in more}) == len(more)


@pytest.mark.parametrize("seed", ["0", "random"])
def test_the_digest_does_not_depend_on_the_process(modules: list[Module], seed: str) -> None:
    names = ("keyword.py", "ssl.py", "encodings/cp037.py")
    found = [module for module in modules if module.name in names]
    assert len(found) == len(names)
    for module in found:
        assert run_job(workload.request_for(module), PYTHONHASHSEED=seed) == workload.expected_output(module)


def test_both_ways_to_the_digest_agree_on_every_kind_of_constant(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(
        "# -*- coding: latin-1 -*-\n"
        "'\\d is not an escape'\n"
        "x = (None, ..., True, -7, 10**5000, 1.5, -0.0, 1e999, 2j, -3j, 'é\\ud800', b'\\x00', ('a', ('b',)))\n"
        "def f(a, /, b=1, *, c: int = 2) -> 'x':\n"
        "    y = lambda: (a, b)\n"
        "    return a in {1, 'two', (3, 4), None, b'five'} and x[1:2]\n",
        encoding="latin-1",
    )
    module = Module(path=path, name="odd.py", package="lib", size=path.stat().st_size)
    outputs = {run_job(workload.request_for(module), PYTHONHASHSEED=str(seed)) for seed in range(3)}
    assert outputs == {workload.expected_output(module)}


def test_another_program_has_another_digest(tmp_path: Path) -> None:
    digests = set()
    for source in ("x = 1", "x = 2", "x = 1.0", "x = True", "x = '1'", "x = b'1'", "y = 1", "\nx = 1", "x = {1}"):
        path = tmp_path / "one.py"
        path.write_text(source)
        digests.add(workload.digest_of(Module(path=path, name="one.py", package="lib", size=0)))
    assert len(digests) == 9


def test_jobs_ask_for_what_the_bots_offer_and_large_ones_for_large_bots(modules: list[Module]) -> None:
    bots = demo.bots_wanted()
    assert len(bots) >= 6
    assert len({tuple(sorted(bot.properties.items())) for bot in bots}) == 2
    for module in modules:
        needs = workload.request_for(module)["properties"]
        able = [bot for bot in bots if needs.items() <= bot.properties.items()]
        assert len(able) == (3 if module.size >= workload.LARGE else 6)
    command = workload.request_for(modules[0])["command"]
    assert command[:4] == [sys.executable, "-I", "-S", "-W"], "it needs nothing but the standard library"


def test_every_right_result_is_verified_and_counted(small: list[Module]) -> None:
    report = work(Pretend(), small)
    assert (report.jobs, report.succeeded, report.failed, report.lost, report.verified) == (5, 5, 0, 0, 5)
    assert report.good
    assert (report.wait_p50_ms, report.wait_p99_ms) == (250.0, 250.0)
    assert (report.locality_hits, report.retries, report.bots) == (1, 5, 1)
    assert report.by_strategy == {"proactive": 5}
    assert report.jobs_per_second == 0.5
    assert {name: share.jobs for name, share in report.by_instance.items()} == {"web": 2, "core": 2, "tools": 1}
    assert {name: share.jobs for name, share in report.by_bot.items()} == {"b2": 5}


def test_a_job_that_never_ends_is_lost_and_named(small: list[Module]) -> None:
    report = work(Pretend(lose="keyword.py"), small, stalled=0.3)
    assert (report.jobs, report.succeeded, report.lost, report.verified) == (5, 4, 1, 4)
    assert report.wrong == ["keyword.py (lost)"]


def test_json_is_one_object_with_all_keys(small: list[Module], capsys: pytest.CaptureFixture[str]) -> None:
    pretend = Pretend()
    run(pretend, jobs=2, json=True)
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    counts = {"jobs", "succeeded", "failed", "verified"}
    assert counts | {"seconds", "wait_p50_ms", "wait_p99_ms", "bots", "by_instance"} <= told.keys()
    assert told["verified"] == 2
    assert (told["preemptions"], told["quota_max_exceeded"]) == (3, 0)
    assert told["tenancy"]["receipt"] == RECEIPT
    assert (told["tenancy"]["scrubs"], told["tenancy"]["scrubs_verified"]) == (3, 3)
    assert pretend.quotas == {}, "it leaves no quotas behind"


def test_a_wrong_result_too_many_units_and_absent_bots_fail_the_demo(
    small: list[Module], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LeaseholdError, match=r"1 of 5 results are wrong or missing: keyword\.py"):
        run(Pretend(spoil="keyword.py"))
    told = capsys.readouterr().out
    assert "4 of 5 results verified" in told
    assert "had waited 1.0 s, its instance used 0 of its minimum of 2" in " ".join(told.split())
    with pytest.raises(LeaseholdError, match="above its maximum"):
        run(Pretend(tools=5))
    monkeypatch.setattr(demo, "BOTS_WITHIN", 0.1)
    with pytest.raises(LeaseholdError, match=r"opened no session within 0 s: demo-large-1, "):
        run(Pretend(bots="gone"))


def test_a_scrub_is_checked_against_a_computation_of_our_own(modules: list[Module]) -> None:
    first, second = tenants.scrubs(modules, 2)
    assert first.files != second.files
    assert run_job(first.request()) == first.expected_output() != second.expected_output()


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert report_demo.percentile(values, 0.5) == 50.0
    assert report_demo.percentile(values, 0.99) == 99.0
    assert report_demo.percentile([7.0], 0.99) == 7.0
    assert report_demo.percentile([], 0.5) is None
