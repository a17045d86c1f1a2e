"""Moments of a run that other threads may wait for."""

import threading

from bots.agent.run import Milestone
from tests.support.patience import MINUTE


def test_a_moment_that_has_come_is_waited_for_by_nobody() -> None:
    moment = Milestone()
    assert not moment.is_set()
    assert not moment.wait(0.0)
    moment.set()
    assert moment.is_set()
    assert moment.wait()


def test_all_threads_that_wait_for_a_moment_see_it_come_however_close_they_began() -> None:
    for _ in range(200):
        moment, seen, start = Milestone(), list[bool](), threading.Barrier(4)

        def wait(moment: Milestone = moment, seen: list[bool] = seen, start: threading.Barrier = start) -> None:
            start.wait()
            seen.append(moment.wait(MINUTE))

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        moment.set()
        for thread in threads:
            thread.join(MINUTE)
        assert seen == [True] * 3
