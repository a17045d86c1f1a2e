"""`leasehold policy canary`: a version of the policy tried on some cohorts or instances first."""

from collections.abc import Mapping
from typing import Any

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped

from assigner.cli.output import Caller, Calling, duration, reason_option, version_number
from assigner.operator_resources.canaries import EVERY, LEAST, STEPS
from schema.readable import duration as in_words
from schema.readable import moment, plural, print_json, table

_FIGURES = (
    ("sample", "waits known"), ("starts", "starts"), ("fetched", "fetched by bots"), ("p50_wait", "median wait"),
    ("p95_wait", "95 % wait"), ("max_wait", "longest wait"), ("evictions", "evictions, of 1,000 starts"),
    ("failures", "failures, of 1,000 ended"),
)  # fmt: skip


def add(group: click.Group, calling: Calling) -> None:
    """Add the command `canary` to the group `policy`."""

    @group.command("canary")
    @click.argument("version", required=False, callback=version_number)
    @click.option("--on", multiple=True, metavar="cohort:A,B|instance:A,B", help="Where it is tried, in this order.")
    @click.option(
        "--steps", default=",".join(map(str, STEPS)), show_default=True, metavar="PERCENT,…", help="Of the named ones."
    )
    @click.option(
        "--every",
        default=f"{EVERY / 60:.0f}m",
        callback=duration,
        show_default=True,
        metavar="DURATION",
        help="For each step.",
    )
    @click.option("--guard", "guards", multiple=True, metavar="GUARD", help="Such as 'p95_wait<=2x', 'evictions<=20'.")
    @click.option("--least", type=click.IntRange(1, 100_000), default=LEAST, show_default=True,
                  help="Jobs below which nothing is judged.")  # fmt: skip
    @click.option("--stale", is_flag=True, help="Also a draft since which something was changed.")
    @click.option("--stop", is_flag=True, help="Take back the one that is running.")
    @reason_option
    @calling
    def canary(
        caller: Caller, /, version: int | None, on: tuple[str, ...], guards: tuple[str, ...], stop: bool, reason: str,
        **terms: Any,
    ) -> None:  # fmt: skip
        """Try VERSION on some cohorts or instances first, or show the trial that is running.

        The version decides for the first of the named ones, and after each step for more of them. When a guard does
        not hold, everything is as before by itself. A guard with x is a factor of what was before.
        """
        if version is None and not stop:
            if on or guards:
                raise BadInput("VERSION", "is missing: the number of the version to try")
            with caller.client() as gateway:
                found = gateway.call("GET", "/v1/policies/canary")
        elif stop:
            if version is not None or on or guards:
                raise BadInput("--stop", "goes alone: it takes back the trial that is running, whichever it is")
            with caller.client() as gateway:
                found = gateway.call("POST", "/v1/policies/canary/stop", body={"reason": reason})
        elif not guards:
            raise BadInput("--guard", "is missing: what must hold meanwhile, such as 'p95_wait<=2x'")
        else:
            body = {"on": _on(on), "guards": list(guards), "reason": reason, **_terms(terms)}
            with caller.client() as gateway:
                found = gateway.call("POST", f"/v1/policies/{version}/canary", body=body)
        if caller.json:
            print_json(found)
        else:
            _print(found)


def _on(given: tuple[str, ...]) -> list[str]:
    """Return each name with its sort: `cohort:a,b` names two."""
    found = []
    for each in given:
        kind, _, names = each.partition(":")
        found += [f"{kind}:{name.strip()}" for name in names.split(",")]
    if not found:
        raise BadInput("--on", "says where it is tried, such as cohort:gpu or instance:web")
    return found


def _terms(terms: Mapping[str, Any]) -> dict[str, Any]:
    try:
        steps = [int(each.strip().removesuffix("%")) for each in terms["steps"].split(",")]
    except ValueError:
        raise BadInput(
            "--steps", f"'{escaped(terms['steps'], 40)}' is no list of percentages such as 25,50,100"
        ) from None
    return {**terms, "steps": steps}


def _print(found: Mapping[str, Any]) -> None:
    reached, names, kind = found["reached"], found["names"], found["kind"]
    click.echo(f"version {found['policy']} on {len(reached)} of {plural(len(names), kind)}: {_short(reached)}")
    if found["outcome"] is None:
        since = f"step {found['step'] + 1} of {len(found['steps'])} since {moment(found['step_at'])}"
        last = found["step"] + 1 == len(found["steps"])
        then = f"; it stays so: `leasehold policy activate {found['policy']}` lets it decide everywhere" if last else (
            f", for at least {in_words(found['every'])}")  # fmt: skip
        click.echo(since + then)
    else:
        click.echo(f"{found['outcome']} {moment(found['ended_at'])}: {found['why']}")
    for each in found["untried"]:
        click.echo(f"not tried: {each}")
    if undecided := found.get("undecided"):  # a gateway of an earlier release does not tell
        click.echo(f"no assigner at work decides by it in {_short(undecided)}, so that it does not rise: "
                   "hosts are drained or stopped, or have other entries")  # fmt: skip
    click.echo()
    held = {True: "holds", False: "BROKEN", None: "not known: it may be chance, or jobs are too few"}
    table(
        ("guard", "now", "at most", ""),
        [(each["guard"], _figure(each["value"]), _figure(each["limit"]), held[each["holds"]])
         for each in found["guards"]],
    )  # fmt: skip
    click.echo()
    now, before = found["now"] or {}, found["before"]
    table(
        ("where it is tried", "since the step began", "in the hour before"),
        [(words, _figure(now.get(name)), _figure(before[name])) for name, words in _FIGURES],
    )


def _short(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
