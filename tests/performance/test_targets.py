"""The benchmark of the targets: turns, ratios of pairs, and what counts as met."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from ops.bench import targets
from ops.bench.targets import FLOOR, OURS, PEERS, Target, Trial, Turn


def trial(*promised: Target, ours: list[float], floor: list[float]) -> tuple[Trial, list[str]]:
    """Return a trial of two contenders with these rates, and the list in which they note their turns."""
    order: list[str] = []

    def turn(name: str, rates: list[float]) -> Turn:
        left = iter(rates)

        def work() -> Mapping[str, float]:
            order.append(name)
            return {"jobs/s": next(left)}

        return work

    def prepare(_: ExitStack) -> Mapping[str, Turn]:
        return {OURS: turn(OURS, ours), FLOOR: turn(FLOOR, floor)}

    return Trial("work", promised, prepare), order


def test_a_target_is_judged_by_the_median_of_the_ratios_of_pairs_that_take_turns() -> None:
    half = Target("half", "jobs/s", 0.5, FLOOR)
    tried, order = trial(half, ours=[5, 60, 7], floor=[10, 100, 10])
    (result,) = targets.run(tried, 3, report=lambda _: None)
    assert order == [OURS, FLOOR, FLOOR, OURS, OURS, FLOOR]
    assert (result.values, result.met, result.as_json()["median"]) == ([0.5, 0.6, 0.7], True, 0.6)
    tried, order = trial(half, ours=[5, 60, 7, 9], floor=[10, 100, 10, 10])
    (result,) = targets.run(replace(tried, often=2), 2, report=lambda _: None)
    assert (order.count(OURS), result.values) == (4, [0.5, 0.6, 0.7, 0.9]), "short runs take more pairs"


@pytest.mark.parametrize(
    ("bound", "at_most", "met"), [(5, True, True), (4, True, False), (5, False, True), (6, False, False)]
)
def test_a_target_without_a_contender_bounds_our_own_figure(bound: float, at_most: bool, met: bool) -> None:
    tried, order = trial(Target("own", "jobs/s", bound, at_most=at_most), ours=[5], floor=[])
    (result,) = targets.run(tried, 1, report=lambda _: None)
    assert order == [OURS]
    assert result.met is met


def test_targets_are_chosen_by_a_part_of_their_name_and_without_peers() -> None:
    every = list(targets.trials("postgresql://nowhere"))
    names = [target.name for each in every for target in each.targets]
    assert len(names) == len(set(names))
    some = targets.chosen(every, only=["wire 50 x 10"], peers=False)
    assert [[target.name for target in each.targets] for each in some] == [["wire 50 x 10, floor"]]
    alone = targets.chosen(every, only=[], peers=False)
    assert not {target.against for each in alone for target in each.targets} & set(PEERS)
