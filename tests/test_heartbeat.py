"""The agent's own count of the time its session has left."""

import threading

from bots.heartbeat import Heartbeat
from tests.patience import MINUTE


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


def test_an_answer_that_took_longer_than_the_session_lives_is_late() -> None:
    heart = Heartbeat(1.0, on_lost=lambda: None, now=lambda: 100.0)
    assert not heart.beat(80.0, expires_in=10.0)


def test_a_session_at_rest_has_no_deadline_until_the_next_beat() -> None:
    now = [100.0]
    heart = Heartbeat(1.0, on_lost=lambda: None, now=lambda: now[0])
    assert heart.beat(100.0, expires_in=10.0)
    heart.rest()
    now[0] = 150.0
    assert not heart.lost
    assert heart.beat(101.0, expires_in=59.0)
    now[0] = 159.5
    assert heart.lost


def test_rest_does_not_revive_a_session() -> None:
    now = [100.0]
    heart = Heartbeat(1.0, on_lost=lambda: None, now=lambda: now[0])
    assert heart.beat(100.0, expires_in=10.0)
    now[0] = 109.5
    heart.rest()
    assert heart.lost
