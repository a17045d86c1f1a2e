"""A whole pool of processes under load while random faults hit it, and while two versions of it run side by side."""

import random

import pytest

from ops.chaos import schedule
from ops.chaos.faults import FAULTS
from ops.chaos.pool import Shape, chaos_pool
from ops.chaos.report import Report
from ops.chaos.run import told
from ops.chaos.schedule import Plan
from ops.chaos.versions import NoVersionBefore
from schema import clock
from tests.support.patience import MINUTE, eventually

#: `python -m ops.chaos.run --seed …` repeats the order of the faults.
SEED = 20
#: Seconds of faults; `make chaos` takes longer looks.
SECONDS = 4.0
#: These hold for longer than a session lives, or start many processes: too long for a short run.
LONG = {
    *("stop-agent-past-session", "partition-bot-past-session", "step-clock", "step-server-clock"),
    *("upgrade", "kill-all-agents", "kill-bot", "restart-in-other-version"),
}
SMALL = Shape(gateways=1, assigners=1, bots=2, callers=1, backlog=10)

pytestmark = pytest.mark.usefixtures("forked_members")


def sound(report: Report) -> None:
    """Assert that nothing was violated; otherwise the directory with all logs stays."""
    assert not report.violations, "\n" + told(report)
    assert report.counts["jobs"] == report.counts["acknowledged"] > 0
    print(told(report))


@pytest.mark.long
def test_random_faults_lose_nothing_double_nothing_and_leave_nothing_running() -> None:
    kinds = [kind for name, kind in FAULTS.items() if name not in LONG]
    with chaos_pool(random.Random(SEED), shape=SMALL) as pool:
        report = schedule.run(pool, Plan(kinds, seconds=SECONDS), seed=SEED, say=print)
        sound(report)
        assert len(report.injections) >= 2


@pytest.mark.long
def test_processes_of_the_version_before_and_of_this_one_work_side_by_side() -> None:
    """All start in the version before; then some of each role run this one, then all of them."""
    try:
        with chaos_pool(random.Random(SEED), shape=SMALL, start_in_version_before=True) as pool:
            began = clock.monotonic()
            report = Report(seed=SEED, directory=str(pool.directory))
            for name in ("bot-1", "gateway-1", "assigner-1"):
                pool.put(name, older=False)
            eventually(lambda: pool.in_service("bot-1"), 2 * MINUTE, every=0.2)
            report.injections.append(schedule.inject(pool, FAULTS["upgrade"](pool, random.Random(SEED))))
            report.seconds = clock.monotonic() - began
            schedule.finish(pool, report)
            sound(report)
            assert report.injections[0].recovery is not None
    except NoVersionBefore as reason:
        pytest.skip(str(reason))
