"""How an agent stops: it is asked to drain, it runs out of time, or it is told a second time."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.agents import Bot, Pool, processes, serving, settings
from tests.proc import NEEDS_PROC
from tests.scripted import gateway, problem

pytestmark = NEEDS_PROC


def test_a_bot_that_is_asked_to_drain_takes_no_new_work_until_it_is_asked_to_go_on(tmp_path: Path) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path, capacity=2):
        running = pool.grant("sleep", "60", job="running")
        pool.until(lambda: processes(tmp_path))
        with pool.changed:
            pool.drain = True
            refused = pool.grant("true", job="refused")
        assert pool.until(lambda: pool.outcomes.get(refused))["verdict"] == "released"
        pool.until(lambda: pool.syncs[-1].status == "draining")
        assert running not in pool.outcomes
        pool.change(drain=False)
        pool.until(lambda: pool.syncs[-1].status == "ok")
        taken = pool.grant("true", job="taken")
        assert pool.until(lambda: pool.outcomes.get(taken))["verdict"] == "succeeded"


def test_a_drained_agent_ends_its_work_closes_its_session_and_exits_with_0(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path) as bot:
        flag = tmp_path / "flag"
        key = pool.grant("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        pool.until(lambda: pool.syncs[-1].status == "draining")
        flag.touch()
        assert bot.end() == 0
    assert pool.outcomes[key]["verdict"] == "succeeded"
    assert [sync.status for sync in pool.syncs][-2:] == ["draining", "gone"]
    assert pool.syncs[-1].leases == []


def test_work_that_outlasts_the_drain_is_killed_and_given_back(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, drain_seconds=0.3) as bot:
        key = pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        assert bot.end() == 0
    assert pool.outcomes[key]["verdict"] == "released"
    assert pool.syncs[-1].status == "gone"


def test_an_idle_agent_leaves_without_waiting_for_its_long_poll(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path) as bot:
        pool.until(lambda: pool.held)
        bot.agent.drain()
        assert bot.end() == 0
        assert pool.held == 1
        pool.change(closing=True)
    assert pool.syncs[-1].status == "gone"


def test_a_drain_while_the_gateway_is_away_ends_too(tmp_path: Path) -> None:
    with gateway(lambda _: problem(503, "starting")) as stands:
        bot = Bot(stands.url, settings(tmp_path))
        bot.agent.drain()
        assert bot.end() == 0


def test_a_drain_that_cannot_deliver_its_results_says_how_many_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bots.shift.STUCK_AFTER", 0.2)
    monkeypatch.setattr("bots.shift.FAREWELL", 0.2)
    pool = Pool(sync_in=0.1)
    limits = {"capacity": 3, "drain_seconds": 0.3, "kill_grace": 0.1}
    with capture_logs() as logs, serving(pool, tmp_path, **limits) as bot:
        flag = tmp_path / "flag"
        script = f"while ! test -e {flag}; do sleep 0.02; done"
        ended = [pool.grant("sh", "-c", script, job=f"job-{number}") for number in range(2)]
        endless = pool.grant("sleep", "60", job="endless")
        pool.until(lambda: all("active" in pool.reported(key) for key in [*ended, endless]))
        pool.change(instead=lambda _: problem(503, "away"))
        flag.touch()
        bot.agent.drain()
        assert bot.end() == 1
        assert not processes(tmp_path)
    assert pool.outcomes == {}
    assert [line["results"] for line in logs if "could not be delivered" in line["event"]] == [2]


def test_results_that_the_session_outlived_while_the_gateway_was_away_are_missed_when_the_agent_leaves(
    tmp_path: Path,
) -> None:
    pool = Pool(ttl=3, sync_in=0.1)
    with serving(pool, tmp_path) as bot:
        flag = tmp_path / "flag"
        key = pool.grant("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done")
        pool.until(lambda: "active" in pool.reported(key))
        pool.change(instead=lambda _: problem(503, "away"))
        flag.touch()
        bot.agent.drain()
        assert bot.end() == 1


def test_an_agent_that_leaves_at_once_reports_what_had_ended_and_gives_the_rest_back(tmp_path: Path) -> None:
    pool = Pool(sync_in=10)
    with serving(pool, tmp_path, capacity=2) as bot:
        flag = tmp_path / "flag"
        ended = pool.grant("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done", job="ended")
        endless = pool.grant("sleep", "60", job="endless")
        pool.until(lambda: all("active" in pool.reported(key) for key in (ended, endless)))
        pool.instead = lambda asked: None if asked.body.get("status") == "gone" else problem(503, "busy")
        running = len(processes(tmp_path))
        flag.touch()
        pool.until(lambda: len(processes(tmp_path)) < running)
        pool.until(lambda: len(list((tmp_path / "work" / "bot-1").iterdir())) == 1)
        bot.agent.leave()
        assert bot.end() == 130
    assert (pool.outcomes[ended]["verdict"], pool.outcomes[endless]["verdict"]) == ("succeeded", "released")
    assert pool.syncs[-1].status == "gone"


def test_a_second_wish_to_leave_kills_all_work_at_once(tmp_path: Path) -> None:
    pool = Pool()
    with serving(pool, tmp_path, kill_grace=60) as bot:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: processes(tmp_path))
        bot.agent.drain()
        bot.agent.leave()
        assert bot.end() == 130
    assert pool.outcomes[key]["verdict"] == "released"
    assert pool.syncs[-1].status == "gone"
