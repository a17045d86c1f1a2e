"""The formula of forecasts and what is promised after its past errors."""

import random
from dataclasses import replace

import pytest

from assigner import forecasting
from assigner.forecasting import Ahead, Forecast, Guesses, Prediction, Standing, guess, predict, promise, score, weigh

#: Ten units, all busy; ten jobs of its own instance ahead; each takes one unit for a minute.
FULL = Standing(units=10, free=0, own=Ahead(10, 60.0), others=(), work=60.0, seconds=60.0)


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({}, 63),
        ({"units": 20}, 31.6),
        ({"free": 11}, 0),
        ({"free": 5}, 33.3),
        ({"own": Ahead(0, 60.0), "earliest": 90.0}, 90),
        ({"others": (Ahead(10, 120.0),)}, 182),
        # A thousand jobs of an instance that may use five units take those five meanwhile, not all ten.
        ({"others": (Ahead(1000, 60.0, 5),)}, 116),
        # Its own instance may use two units, which are in use.
        ({"own": Ahead(10, 60.0, 2), "used": 2}, 316),
        # Jobs that come later and go first take six of the ten units; two, if their instance may use no more; and nine
        # for ever, if more come than run. With nothing else ahead, mostly none of them comes before the next start.
        ({"own": Ahead(10, 60.0, later=0.1)}, 140),
        ({"others": (Ahead(0, 60.0, 2, 0.1),)}, 77.3),
        ({"others": (Ahead(0, 60.0, None, 9.0),)}, 363),
        ({"own": Ahead(0, 60.0, later=0.1)}, 5.24),
        # All that is ahead may use more than there is, and none of it gets it.
        ({"free": 5, "own": Ahead(0, 60.0), "others": (Ahead(3, 60.0, 6), Ahead(3, 60.0, 6))}, 0),
    ],
)  # fmt: skip
def test_half_of_them_start_when_what_is_ahead_has_got_its_units(changed: dict[str, object], seconds: float) -> None:
    assert predict(replace(FULL, **changed)).seconds == pytest.approx(seconds, rel=0.01)


def test_the_guess_that_was_near_counts_and_one_without_a_past_does_not() -> None:
    made = guess(replace(FULL, others=(Ahead(9, 60.0),)), 100.0, per_second=0.5, waited=70.0, age=30.0)
    assert made == Guesses(100.0, 40.0, 40.0)
    assert guess(replace(FULL, earliest=50.0), 100.0, per_second=0.0, waited=70.0, age=90.0) == Guesses(
        100.0, None, 50.0
    )
    assert guess(FULL, 0.0, per_second=0.5, waited=70.0, age=0.0) == Guesses(0.0, 0.0, 0.0)
    of_rate = [(Guesses(100.0, 48.0, None), 40.0)] * 30
    # Errors of 60 and of 8 s: the weights are as 2 and 56.
    assert weigh(made, of_rate) == pytest.approx(42.06, abs=0.01)
    assert weigh(made, [(Guesses(90.0, None, None), 40.0)] * 30) == weigh(made, []) == 100.0


def test_nine_of_ten_jobs_start_within_the_promised_time_and_nothing_is_promised_after_too_few(
    chance: random.Random,
) -> None:
    predictions = [Prediction(seconds, seconds + 5.0) for seconds in (chance.uniform(0, 600) for _ in range(3000))]
    waits = [each.seconds + chance.expovariate(1 / each.scale) for each in predictions]
    scores = [*map(score, predictions, waits)]
    told = [promise(each, scores[:400]) for each in predictions[400:]]
    kept = sum(waited <= (each.upper or 0) for each, waited in zip(told, waits[400:], strict=True))
    assert 0.85 < kept / len(told) < 0.95
    few = promise(predictions[0], scores[: forecasting.ENOUGH - 1])
    assert few == Forecast(reason=forecasting.TOO_LITTLE_PAST)
    assert few.sentence == "not known, because too few jobs like it have started lately"
    late = promise(Prediction(240.0, 300.0), [0.0] * 15 + [1.4] * 15, deadline=100.0)
    assert late.sentence == ("starts in about 4 min, within 11 min in 9 of 10 cases; it would miss its deadline")
