"""`leasehold tune`: search for a better policy by simulations of the pool's past, and keep it as a draft version."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import click
from leasehold.errors import BadInput
from pydantic import ValidationError

from assigner.cli.simulations.simulate import Asked, Tried, read, require_can_write, tell_progress
from assigner.operator_resources import versions as activation
from assigner.process.policies import deciding, merged
from assigner.settings import COMMAND_TIMEOUT, Installation, PoolSettings
from assigner.simulation.past import Past
from assigner.simulation.replay import BotsOf, measured_of, step_of
from assigner.simulation.runs import Trial, run_all
from assigner.simulation.tuning import Parameter, Tuned, Values, Wish, changed, parameters_of, tune
from schema.fields import first_error
from schema.policy import versions
from schema.readable import duration, number, plural, print_json, table

ACTOR = "tune"


@dataclass(frozen=True)
class Search:
    """What is searched for, and how. parameters: words of their names; none = all."""

    wish: Wish
    parameters: Sequence[str]
    with_quotas: bool
    candidates: int
    shakes: int


def run(
    installation: Installation,
    asked: Asked,
    search: Search,
    *,
    bots_of: Callable[[PoolSettings], BotsOf],
    as_json: bool,
) -> int:
    """Search and print. Returns the exit code: 2 if nothing is proposed. Raises BadInput."""
    past, tried = read(installation, asked, {})
    if not past.jobs or not past.bots:
        raise BadInput(asked.source, f"there was no {'bot' if past.jobs else 'job'} in that time")
    (base,) = tried.values()
    if base.content is not None:
        require_can_write(
            installation, partial(versions.try_to_draft, actor=ACTOR), "the proposal cannot be kept as a draft"
        )
    # Of other hosts' entries nothing is simulated, and what a stored version lacks is as the program has it.
    content = {**(base.content or {"limits": {}, "declared": {}}), "settings": deciding(base.settings)}
    parameters = parameters_of(content, wanted=search.parameters, with_quotas=search.with_quotas)
    step = step_of(past, asked.step)
    make = partial(_trial, content, parameters, base, past, bots_of)
    replays = partial(run_all, seed=asked.seed, step=step, told=tell_progress)
    (now,) = replays(past, [make(tuple(each.now for each in parameters))], shakes=0)
    search.wish.require_values(now.replayed.measured)
    error = None
    if past.records is not None:
        error = search.wish.error(measured_of(past, past.records), now.replayed.measured)
    found = tune(
        past,
        parameters,
        search.wish,
        trial=make,
        run=lambda part, trials, shakes: replays(part, trials, shakes=shakes),
        candidates=search.candidates,
        shakes=search.shakes,
        chance=random.Random(f"{asked.seed} tune"),
    )
    refusal = found.refusal(search.wish, error)
    version = None
    if refusal is None and base.content is not None:
        version = _draft(installation, parameters, search.wish, found)
    if as_json:
        print_json(_document(found, parameters, error, refusal, version))
    else:
        _print(found, parameters, search.wish, error, refusal, version)
    return 0 if refusal is None else 2


def _trial(
    content: versions.Content,
    parameters: Sequence[Parameter],
    base: Tried,
    past: Past,
    bots_of: Callable[[PoolSettings], BotsOf],
    values: Values,
) -> Trial:
    """The policy of some values. Raises BadInput if it is none."""
    wanted = changed(content, parameters, values)
    try:
        settings = merged(base.settings, 0, wanted["settings"]).settings
    except ValidationError as error:
        raise BadInput("--parameter", first_error(error)[1]) from None
    for name, quota in wanted.get("limits", {}).get("quota", {}).items():
        if quota["max"] is not None and quota["max"] < quota["min"]:
            raise BadInput("--parameter", f"quota {name}: its maximum is below its minimum")
    limits = None if base.content is None else wanted
    return Trial("tried", settings, limits, past.bots, bots_of(settings))


def _draft(installation: Installation, parameters: Sequence[Parameter], wish: Wish, found: Tuned) -> int:
    """Make a draft of the version that is in force now, with the values found. Raises BadInput."""
    reason = f"{wish.objective.text} better by {found.interval()[0]:.0%} on unseen jobs"

    def tuned(content: versions.Content) -> versions.Content:
        try:
            return changed(content, parameters, found.values)
        except KeyError as missing:
            raise BadInput("--parameter", f"{missing} is in the policy in force no more: search again") from None

    with installation.database("tune", patience=COMMAND_TIMEOUT) as database:
        return activation.draft_by(database, tuned, actor=ACTOR, reason=reason).id


def _document(
    found: Tuned, parameters: Sequence[Parameter], error: float | None, refusal: str | None, version: int | None
) -> dict[str, object]:
    median, low, high = found.interval()
    return {
        "version": version,
        "refused": refusal,
        "error": error,
        "replays": found.tried,
        "gain": {"median": median, "low": low, "high": high},
        "seen": {"before": found.seen[0], "after": found.seen[1]},
        "parameters": [
            {
                "name": each.name,
                "before": each.now,
                "after": found.values[nth],
                "seen_without": found.without.get(nth),
            }
            for nth, each in enumerate(parameters)
        ],
        "waits": {
            name: {"before": waits.p95, "after": found.after.waits[name].p95}
            for name, waits in found.before.waits.items()
            if name in found.after.waits
        },
    }


def _print(
    found: Tuned,
    parameters: Sequence[Parameter],
    wish: Wish,
    error: float | None,
    refusal: str | None,
    version: int | None,
) -> None:
    told = _figure(wish)
    known = "unknown" if error is None else f"{error:.1%}"
    click.echo(
        f"{plural(len(parameters), 'parameter')}, {plural(found.tried, 'replay')}; error of the simulation {known}"
    )
    if found.without:
        rows = [
            [each.name, number(each.now), number(found.values[nth]), told(found.without[nth])]
            for nth, each in enumerate(parameters)
            if nth in found.without
        ]
        table(["parameter", "now", "then", f"{wish.objective.text} without it"], rows)
        median, low, high = found.interval()
        click.echo(f"{wish.objective.text}, seen part: {told(found.seen[0])} now, {told(found.seen[1])} then.")
        click.echo(f"Unseen part: better by {median:.1%}, in 90 % of the replays by {low:.1%} to {high:.1%}.")
        names = [name for name in found.before.waits if name in found.after.waits]
        if names:
            click.echo("95 % of the waits there, by instance:")
            table(
                ["instance", "now", "then"],
                [
                    [name, duration(found.before.waits[name].p95), duration(found.after.waits[name].p95)]
                    for name in names
                ],
            )
    if refusal is not None:
        click.echo(f"Nothing is proposed: {refusal}.")
    elif version is not None:
        click.echo(
            f"Version {version} of the policy has these values. Put it into force: leasehold policy activate {version}"
        )
    else:
        click.echo("The load is not this pool's, so no version was made.")


def _figure(wish: Wish) -> Callable[[float | None], str]:
    told = duration if wish.objective.figure.endswith("_wait") or wish.objective.figure == "unmet" else _number
    return lambda value: "-" if value is None else told(value)


def _number(value: float) -> str:
    return number(value, digits=4)
