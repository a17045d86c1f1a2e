"""What an agent does when its session is superseded, over, refused or about to expire."""

import hashlib
import os
import threading
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast

import pytest
from leasehold.errors import BadInput, LeaseholdError, NotReady

from bots.agent.gateway_calls import GatewayCaller, Heartbeat
from schema import clock
from tests.support.agents import NEEDS_PROC, Pool, processes, serving
from tests.support.http import Answer, ReceivedRequest, problem
from tests.support.patience import MINUTE

pytestmark = NEEDS_PROC


def test_an_agent_that_runs_jobs_soon_asks_a_gateway_that_holds_no_calls_and_then_more_and_more_rarely(
    tmp_path: Path,
) -> None:
    pool = Pool(sync_in=30.0, ttl=90.0)
    with serving(pool, tmp_path, capacity=2):
        first = pool.grant("sleep", "60", job="first")
        pool.until(lambda: "active" in pool.reported(first))
        second = pool.grant("sleep", "60", job="second")
        pool.until(lambda: "active" in pool.reported(second), within=10.0)
        # At 0.1, 0.3, 0.7, 1.5 and 3.1 seconds.
        calls = len(pool.syncs)
        with pytest.raises(AssertionError):
            pool.until(lambda: len(pool.syncs) > calls + 5, within=2.5)


@pytest.mark.parametrize("code", ["session_over", "stale_seq"])
def test_a_session_the_server_does_not_know_any_more_is_replaced(tmp_path: Path, code: str) -> None:
    pool = Pool(sync_in=0.1)
    with serving(pool, tmp_path):
        lost = pool.grant("sleep", "60")
        pool.until(lambda: processes(tmp_path))
        first = processes(tmp_path)
        alive_at_opening: list[set[int]] = []

        def instead(asked: ReceivedRequest) -> Answer | None:
            if asked.path == "/v1/sync" and asked.body["epoch"] == 1:
                pool.leases.pop(lost, None)
                return problem(409, "this session is over", code=code)
            if asked.path == "/v1/sessions":
                alive_at_opening.append(first & processes(tmp_path))
            return None

        pool.change(instead=instead)
        pool.until(lambda: len(pool.opened) == 2 and pool.syncs[-1].epoch == 2)
        assert alive_at_opening == [set()]
    assert pool.opened[1].dead_session == hashlib.sha256(b"s").hexdigest()
    assert not pool.opened[1].cut_off
    assert next(sync.seq for sync in pool.syncs if sync.epoch == 2) == 1
    assert lost not in pool.outcomes


@pytest.mark.parametrize(("status", "path"), [(401, "/v1/sessions"), (403, "/v1/sync")])
def test_an_agent_that_is_refused_stops_with_2(tmp_path: Path, status: int, path: str) -> None:
    pool = Pool()
    pool.instead = lambda asked: problem(status, "this token is not yours") if asked.path == path else None
    with serving(pool, tmp_path) as bot:
        assert bot.end() == 2


def test_work_is_killed_before_the_server_gives_it_away_also_while_a_call_hangs(tmp_path: Path) -> None:
    pool = Pool(ttl=9, sync_in=0.1)
    hanging, released = threading.Event(), threading.Event()
    with serving(pool, tmp_path, kill_grace=60, margin=5) as bot:
        key = pool.grant("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
        pool.until(lambda: "active" in pool.reported(key))

        def instead(asked: ReceivedRequest) -> Answer | None:
            if asked.path == "/v1/sync" and not released.is_set() and not hanging.is_set():
                hanging.set()
                pool.changed.wait_for(released.is_set, MINUTE)
                return Answer(cut=True)
            return None if released.is_set() else Answer(cut=True)

        pool.change(instead=instead)
        assert hanging.wait(MINUTE)
        began = clock.monotonic()
        pool.until(lambda: not processes(tmp_path))
        assert clock.monotonic() - began < pool.ttl
        with pool.changed:
            pool.leases = {}
            released.set()
            pool.changed.notify_all()
        pool.until(lambda: len(pool.opened) == 2)
        assert bot.code is None
    assert "completed" not in pool.reported(key)
    last_of_the_old = [sync for sync in pool.syncs if sync.epoch == 1][-1]
    assert (last_of_the_old.status, last_of_the_old.leases) == ("gone", [])
    assert [(each.cut_off, each.dead_session is None) for each in pool.opened] == [(False, True), (True, False)]


def test_an_agent_whose_session_expired_does_not_take_over_from_a_newer_one(tmp_path: Path) -> None:
    pool = Pool(ttl=3, sync_in=0.1)
    with serving(pool, tmp_path) as bot:
        pool.until(lambda: pool.syncs)

        def instead(asked: ReceivedRequest) -> Answer:
            if asked.path == "/v1/sync" and asked.body.get("status") == "gone":
                return problem(409, "a newer session is open", code="session_superseded")
            return problem(503, "away")

        pool.change(instead=instead, closing=True)
        assert bot.end() == 4
    assert len(pool.opened) == 1


def test_a_margin_as_long_as_the_session_is_refused(tmp_path: Path) -> None:
    with serving(Pool(ttl=1.0), tmp_path, margin=1.0) as bot:
        bot.end()
        assert isinstance(bot.failure, BadInput)
        assert str(bot.failure) == "margin: 1 s is not less than the 1 s of a session"


def test_no_session_opens_while_something_of_the_last_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(sync_in=0.1)
    monkeypatch.setattr("bots.agent.workspace._DYING", 0.2)
    with serving(pool, tmp_path) as bot:
        pool.until(lambda: pool.syncs)
        unkillable = {2**31 - 1}
        monkeypatch.setattr("bots.agent.workspace.marked_processes", lambda _root: unkillable)
        pool.change(instead=lambda _: problem(409, "this session is over", code="session_over"), closing=True)
        bot.end()
    assert isinstance(bot.failure, LeaseholdError)
    assert str(bot.failure) == "processes [2147483647] of an earlier agent or session cannot be killed"
    assert len(pool.opened) == 1


def test_an_agent_whose_held_call_came_to_nothing_asks_anew_without_waiting(tmp_path: Path) -> None:
    pool = Pool(ttl=2, sync_in=0.1)
    held, cut = threading.Event(), threading.Event()
    with serving(pool, tmp_path):

        def instead(asked: ReceivedRequest) -> Answer | None:
            if asked.path == "/v1/sync" and asked.body.get("wait") and not cut.is_set():
                held.set()
                pool.changed.wait_for(cut.is_set, MINUTE)
                return Answer(cut=True)
            return None

        pool.change(instead=instead)
        assert held.wait(MINUTE)
        began = clock.monotonic()
        pool.until(lambda: clock.monotonic() - began > 1.5 * pool.ttl)
        seen = len(pool.syncs)
        with pool.changed:
            cut.set()
            pool.changed.notify_all()
        pool.until(lambda: len(pool.syncs) >= seen + 2)
    assert [sync.wait > 0 for sync in pool.syncs[seen : seen + 2]] == [False, True]
    assert len(pool.opened) == 1
    seqs = [sync.seq for sync in pool.syncs]
    assert seqs == sorted(set(seqs)), "a call that was held is not repeated"


def test_a_session_that_took_longer_to_open_than_it_lives_is_whole(tmp_path: Path) -> None:
    pool = Pool(ttl=1.5, sync_in=0.1)
    began = clock.monotonic()

    def instead(asked: ReceivedRequest) -> Answer | None:
        busy = asked.path == "/v1/sessions" and clock.monotonic() < began + 2 * pool.ttl
        return problem(503, "the gateway has too much to do", code="busy") if busy else None

    pool.change(instead=instead)
    with serving(pool, tmp_path):
        key = pool.grant("true")
        assert pool.until(lambda: pool.outcomes.get(key))["verdict"] == "succeeded"
    assert len(pool.opened) == 1


def test_an_agent_waits_for_as_long_as_a_busy_gateway_asks() -> None:
    class Busy:
        calls: ClassVar[list[float]] = []

        def call(self, *_: object, **_named: object) -> dict[str, object]:
            self.calls.append(clock.monotonic())
            if len(self.calls) == 1:
                raise NotReady("busy", retry_after=0.5)
            return {}

    caller = GatewayCaller(cast(Any, Busy()), threading.Event(), Random(1))
    caller.call("/v1/sync", {}, check=lambda: None)
    first, second = Busy.calls
    assert second - first >= 0.5
    assert first < caller.sent_at <= second


# The agent's own count of the time its session has left.


def test_a_beat_after_the_deadline_does_not_revive_the_session() -> None:
    now = [100.0]
    lost = threading.Event()
    heart = Heartbeat(1.0, on_lost=lost.set, now=lambda: now[0])
    assert heart.beat(100.0, expires_in=10.0)
    now[0] = 108.9
    assert not heart.lost
    assert heart.beat(105.0, expires_in=10.0)
    now[0] = 114.0
    assert not heart.beat(113.0, expires_in=10.0)
    assert heart.lost
    heart.start()
    assert lost.wait(MINUTE)
    heart.stop()


def test_a_session_at_rest_has_no_deadline_until_the_next_beat_and_rest_revives_none() -> None:
    now = [100.0]
    heart = Heartbeat(1.0, on_lost=lambda: None, now=lambda: now[0])
    assert not heart.beat(80.0, expires_in=10.0), "an answer that took longer than the session lives is late"
    heart = Heartbeat(1.0, on_lost=lambda: None, now=lambda: now[0])
    assert heart.beat(100.0, expires_in=10.0)
    heart.rest()
    now[0] = 150.0
    assert not heart.lost
    assert heart.beat(101.0, expires_in=59.0)
    now[0] = 159.5
    heart.rest()
    assert heart.lost
    now[0] = 170.0
    assert heart.lost
    assert heart.late == 0.5, "it was noticed half a second after the deadline"


# A gateway of another version


class NewerPool(Pool):
    """A gateway that adds fields to all that it answers, as a newer version may."""

    def __init__(self) -> None:
        super().__init__(sync_in=0.1)
        #: Path -> fields of the last request to it.
        self.keys: dict[str, set[str]] = {}

    def __call__(self, asked: ReceivedRequest) -> Answer:
        self.keys[asked.path] = set(asked.body)
        answer = super().__call__(asked)
        if isinstance(answer.body, dict):
            leases = [{**lease, "colour": "red"} for lease in answer.body.get("leases", [])]
            more = {"leases": leases} if "leases" in answer.body else {}
            return replace(answer, body={**answer.body, **more, "mood": {"good": True}})
        return answer


def test_an_agent_ignores_what_a_newer_gateway_adds_and_leaves_out_what_equals_its_default(tmp_path: Path) -> None:
    pool = NewerPool()
    with serving(pool, tmp_path):
        done = pool.grant("true")
        pool.until(lambda: done in pool.outcomes)
        stopped = pool.grant("sleep", "60", job="job-2")
        pool.until(lambda: "active" in pool.reported(stopped))
        pool.cancel(stopped, reason="a reason of tomorrow")
        pool.until(lambda: stopped in pool.outcomes)
    assert (pool.outcomes[done]["verdict"], pool.outcomes[stopped]["verdict"]) == ("succeeded", "stopped")
    assert len(pool.opened) == 1
    # A bot without an app has no tasks to tell.
    assert pool.keys["/v1/sessions"] == {"bot", "secret", "host", "pid", "version", "kill_grace"}
    assert pool.opened[0].version == version("leasehold")
    assert [each.pid for each in pool.opened] == [os.getpid()]
    assert pool.keys["/v1/sync"] <= {"bot", "epoch", "secret", "seq", "status", "leases", "wait"}


def test_an_agent_leaves_out_its_version_for_a_gateway_that_does_not_know_it(tmp_path: Path) -> None:
    pool = NewerPool()
    pool.instead = lambda asked: (
        problem(400, "is not known", field="version", reason="is not known") if "version" in asked.body else None
    )
    with serving(pool, tmp_path):
        done = pool.grant("true")
        pool.until(lambda: done in pool.outcomes)
    assert [(each.version, each.pid) for each in pool.opened] == [(None, os.getpid())]


def test_what_a_command_tells_last_comes_with_its_end_and_is_left_out_for_an_older_gateway(tmp_path: Path) -> None:
    pool, ended, older = Pool(sync_in=0.1), list[dict[str, Any]](), threading.Event()

    def instead(asked: ReceivedRequest) -> Answer | None:
        reports = asked.body.get("leases", []) if asked.path == "/v1/sync" else []
        ended.extend(report for report in reports if report["state"] == "completed")
        if older.is_set() and any("progress" in report for report in reports):
            return problem(400, "is not known", field="leases.0.progress", reason="is not known")
        return None

    pool.instead = instead
    command = ("sh", "-c", 'printf %s \'{"share": 1, "text": "done"}\' > "$LEASEHOLD_CHECKPOINT.progress"')
    with serving(pool, tmp_path, output_interval=60):
        for job in ("job-1", "job-2", "job-3"):
            key = pool.grant(*command, job=job)
            assert pool.until(lambda key=key: pool.outcomes.get(key))["verdict"] == "succeeded"
            older.set()
    told = dict.fromkeys((report["job"], report.get("progress", {}).get("text")) for report in ended)
    assert list(told) == [("job-1", "done"), ("job-2", "done"), ("job-2", None), ("job-3", None)]
    assert len(pool.opened) == 1
