"""The search for better values: what it changes, what it keeps, and when it proposes nothing."""

import random
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from leasehold.errors import BadInput

from assigner.process.policies import deciding, merged
from assigner.settings import PoolSettings
from assigner.simulation.past import Attempt, Past, PastBot, PastJob
from assigner.simulation.records import Records
from assigner.simulation.replay import Replayed
from assigner.simulation.report import Measured, Waits, measure
from assigner.simulation.runs import Outcome, Trial
from assigner.simulation.tuning import Term, Tuned, Values, Wish, changed, parameters_of, term, tune

SETTINGS = PoolSettings()
CONTENT = {
    "settings": deciding(SETTINGS),
    "limits": {"account": {"red": {"weight": 2.0}}, "quota": {"/red": {"min": 4, "max": None}}},
    "declared": {},
}
NOTHING = Records(0.0, 100.0, [], [], {}, 0, 1, 100.0, 0.0)


def did(p95: float, evictions: int = 0) -> Measured:
    waits = Waits(10, 0, p95 / 2, p95, p95 * 2)
    return replace(measure(NOTHING), overall=waits, waits={"red": waits}, evictions=evictions)


def test_parameters_are_what_a_version_has_and_give_valid_policies() -> None:
    found = parameters_of(CONTENT, wanted=("sample_size", "weight", "min"), with_quotas=True)
    assert [each.name for each in found][-2:] == ["account red weight", "quota /red min"]
    chance = random.Random(1)
    for _ in range(50):
        values = tuple(each.draw(chance) for each in found)
        assert all(each.low <= value <= each.high for each, value in zip(found, values, strict=True))
        wanted = changed(CONTENT, found, values)
        entry = merged(SETTINGS, 1, wanted["settings"]).settings.assigners[0]
        sizes = [value for each, value in zip(found, values, strict=True) if "sample_size" in each.name]
        assert entry.strategy.sampling.sample_size == sizes[0]
        assert wanted["limits"]["quota"]["/red"] == {"min": values[-1], "max": None}
    assert changed(CONTENT, found, tuple(each.now for each in found)) == CONTENT
    assert not any("quota /" in each.name for each in parameters_of(CONTENT, wanted=(), with_quotas=False))
    with pytest.raises(BadInput, match="--parameter: no parameter is called 'x'"):
        parameters_of(CONTENT, wanted=("x",), with_quotas=False)
    many = {**CONTENT, "limits": {"account": {f"i{n}": {"weight": 1.0} for n in range(13)}}}
    with pytest.raises(BadInput, match="choose at most 12 of"):
        parameters_of(many, wanted=("account",), with_quotas=False)


def test_figures_and_bounds_are_read_and_judged() -> None:
    assert term("--objective", "p95_wait:instance=red", bounded=False).of(did(30.0)) == 30.0
    cases = {"p95_wait<=1.2x": (0.0, 0.25), "evictions <= now": (0.0, 1.0), "p95_wait>=20": (0.0, 0.0)}
    for text, (good, bad) in cases.items():
        bound = term("--keep", text, bounded=True)
        now = did(30.0, evictions=2)
        assert bound.excess(did(30.0, evictions=2), now) == good
        assert bound.excess(did(45.0, evictions=4), now) == pytest.approx(bad)
    for text, bounded, reason in (
        ("p96", False, "is no figure: there are evictions"), ("jain", True, "needs a bound"),
        ("jain>=0.9", False, "has a bound"), ("jain:class=a>=1", True, "of the whole pool"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=reason):
            term("--x", text, bounded=bounded)


class Tried:
    """Replays that answer as a rule says, and the spans that were asked for. unseen: the rule of the unseen part."""

    def __init__(self, rule: Callable[[Values], Measured], unseen: Callable[[Values], Measured] | None = None) -> None:
        self.rule, self.unseen = rule, unseen or rule
        self.spans = list[tuple[float, float | None, int]]()

    def trial(self, values: Values) -> Trial:
        return Trial(repr(values), SETTINGS, None, [], None)  # type: ignore[arg-type]

    def run(self, past: Past, trials: Sequence[Trial], shakes: int) -> list[Outcome]:
        self.spans.append((past.until, past.judged_from, len(trials)))
        rule = self.rule if past.judged_from is None else self.unseen
        found = [rule(literal_eval(trial.name)) for trial in trials]
        return [Outcome(Replayed(NOTHING, each), [each] * shakes) for each in found]


PAST = Past(0.0, 100.0, [PastJob("1", 1.0, None, False, True, {}, [Attempt(1.0, "succeeded")])], [PastBot("b", 1)])


def test_the_best_candidate_is_judged_on_what_it_has_not_seen_and_changes_only_what_helps() -> None:
    parameters = parameters_of(CONTENT, wanted=("sample_size", "preemption_delay"), with_quotas=False)
    tried = Tried(lambda values: did(100.0 - min(values[0], 90.0), evictions=int(values[1] > 300)))
    wish = Wish(Term("p95_wait", "p95_wait", None, None, None, None), [term("--keep", "evictions<=now", bounded=True)])
    found = tune(
        PAST, parameters, wish, trial=tried.trial, run=tried.run, candidates=12, shakes=3, chance=random.Random(3)
    )
    assert [*found.without] == [0], "the delay does nothing, so it stays"
    assert found.values[1] == parameters[1].now
    assert found.after.overall is not None
    assert found.after.overall.p95 < found.seen[0] == 90.0
    assert found.without[0] == 90.0
    assert found.interval()[1] > 0
    assert found.refusal(wish, None) is found.refusal(wish, 0.05) is None
    assert "is less than the error" in str(found.refusal(wish, 99.0))
    assert "tell nothing of p95_wait" in str(replace(found, gains=[0.5, None]).refusal(wish, None))
    assert "only -10.0%" in str(replace(found, gains=[0.5, -0.1]).refusal(wish, None))
    assert [round(until) for until, _, _ in tried.spans] == [20, 40, 80, 80, 100]
    assert [judged for _, judged, _ in tried.spans] == [None] * 4 + [80.0]
    assert [count for _, _, count in tried.spans][:3] == [13, 5, 2]
    assert len(found.gains) == 4


def test_of_two_changes_of_which_either_is_enough_one_stays() -> None:
    parameters = parameters_of(CONTENT, wanted=("weights.priority", "weights.success"), with_quotas=False)
    now = tuple(each.now for each in parameters)
    tried = Tried(lambda values: did(100.0 if values == now else 10.0))
    wish = Wish(Term("p95_wait", "p95_wait", None, None, None, None), [])
    for seed in range(5):
        found = tune(
            PAST, parameters, wish, trial=tried.trial, run=tried.run, candidates=6, shakes=1, chance=random.Random(seed)
        )
        assert len(found.without) == 1
        assert (found.seen, [*found.without.values()]) == ((100.0, 10.0), [100.0])


def test_gains_have_a_sign_and_a_floor_and_none_without_values() -> None:
    def gain(figure: str, before: Measured, after: Measured) -> float | None:
        return Wish(Term(figure, figure, None, None, None, None), []).gain(before, after)

    one, two = did(30.0), did(60.0, evictions=2)
    assert (gain("p95_wait", one, two), gain("p95_wait", two, one)) == (-1.0, 0.5)
    assert gain("evictions", one, two) == -1.0
    assert gain("near", replace(one, near=0, hinted=4), replace(two, near=2, hinted=4)) == 49.0
    assert gain("p95_wait", replace(one, overall=None), two) is None
    assert term("--keep", "p95_wait:class=serius<=60", bounded=True).excess(one, one) == float("inf")


def test_nothing_is_proposed_where_nothing_helps() -> None:
    parameters = parameters_of(CONTENT, wanted=("sample_size",), with_quotas=False)
    tried = Tried(lambda _: did(50.0))
    wish = Wish(Term("p95_wait", "p95_wait", None, None, None, None), [])
    found = tune(
        PAST, parameters, wish, trial=tried.trial, run=tried.run, candidates=6, shakes=1, chance=random.Random(3)
    )
    assert found.without == {}
    assert found.values == tuple(each.now for each in parameters)
    assert found.refusal(wish, None) == "no candidate was better than what is in force"
    assert all(judged is None for _, judged, _ in tried.spans), "there is nothing to judge"


def test_what_is_worse_or_breaks_a_bound_on_what_it_was_chosen_by_is_not_proposed() -> None:
    parameters = parameters_of(CONTENT, wanted=("weights.priority", "weights.success"), with_quotas=False)
    now = tuple(each.now for each in parameters)

    def changes(values: Values) -> int:
        return sum(one != other for one, other in zip(values, now, strict=True))

    wish = Wish(Term("p95_wait", "p95_wait", None, None, None, None), [term("--keep", "evictions<=5", bounded=True)])

    def search(seen: Callable[[Values], Measured]) -> Tuned:
        tried = Tried(seen, lambda values: did(100.0 if values == now else 50.0))
        return tune(
            PAST, parameters, wish, trial=tried.trial, run=tried.run, candidates=6, shakes=1, chance=random.Random(3)
        )

    # Both changes together are worse than none, and each alone is worse still.
    found = search(lambda values: did((100.0, 200.0, 120.0)[changes(values)]))
    assert found.refusal(wish, None) == "no candidate was better than what is in force"
    # What is in force breaks the bound as well.
    found = search(lambda values: did(100.0 / (1 + changes(values)), evictions=7))
    assert found.refusal(wish, None) == "the best candidate breaks evictions<=5"


def test_a_change_that_cannot_be_taken_back_alone_stays() -> None:
    parameters = parameters_of(CONTENT, wanted=("weights.priority", "weights.success"), with_quotas=False)
    now = tuple(each.now for each in parameters)
    tried = Tried(lambda values: did(100.0 if values == now else 50.0))

    def trial(values: Values) -> Trial:
        if (values[0] == now[0]) != (values[1] == now[1]):
            raise BadInput("--parameter", "the maximum is below the minimum")
        return tried.trial(values)

    wish = Wish(Term("p95_wait", "p95_wait", None, None, None, None), [])
    found = tune(PAST, parameters, wish, trial=trial, run=tried.run, candidates=6, shakes=1, chance=random.Random(3))
    assert (found.without, found.refusal(wish, None)) == ({0: None, 1: None}, None)


def test_a_search_without_another_valid_policy_is_refused() -> None:
    parameters = parameters_of(CONTENT, wanted=("sample_size",), with_quotas=False)
    tried = Tried(lambda _: did(50.0))

    def trial(values: Values) -> Trial:
        if values[0] != parameters[0].now:
            raise BadInput("--parameter", "it is wrong")
        return tried.trial(values)

    wish = Wish(Term("p95_wait", "p95_wait", None, None, None, None), [])
    with pytest.raises(BadInput, match="no other values of these make a policy that is valid"):
        tune(PAST, parameters, wish, trial=trial, run=tried.run, candidates=6, shakes=1, chance=random.Random(3))


def test_the_error_is_that_of_the_objective() -> None:
    real, replayed = replace(did(30.0), utilisation=0.4), replace(did(36.0), utilisation=0.6)
    many = {"red": Waits(20, 0, 10.0, 30.0, 60.0)}, {"red": Waits(20, 0, 15.0, 36.0, 72.0)}
    in_use, wait = (Wish(Term(each, each, None, None, None, None), []) for each in ("in_use", "p95_wait"))
    assert in_use.error(real, replayed) == pytest.approx(0.5)
    assert wait.error(real, replayed) == pytest.approx(0.2)
    assert wait.error(replace(real, waits=many[0]), replace(replayed, waits=many[1])) == pytest.approx(0.5)
    assert wait.error(replace(real, overall=None), replayed) is None
    # A wait of a half is one of which the double is longer by a whole; of what is better if it is more a half is more.
    assert (wait.exceeds(0.5, 0.9), in_use.exceeds(0.5, 0.6)) == (True, False)
