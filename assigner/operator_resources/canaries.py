"""A version of the policy tried on some cohorts or instances first: its steps, its guards, and its return.

A trial is a row, and a part of the version in force. Each assigner process may look at it. If one dies, another takes
the next look.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import structlog
from leasehold.errors import BadInput, Conflict, NotFound
from leasehold.wire import escaped

from assigner import metrics
from assigner.operator_resources import guards
from assigner.operator_resources import versions as activation
from assigner.operator_resources.guards import Arms, Judged, guard, judge
from assigner.operator_resources.versions import Check
from schema import audit
from schema.policy import canaries, trials, versions
from schema.policy.canaries import Canary, Looked
from schema.policy.trials import PLACES, TRIAL, Kind, is_of, restricted, with_limits
from schema.policy.versions import Content, Origin
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.notify import wake

#: Error codes: no trial is running; the version has nothing for the named ones.
NONE, NOTHING = "no_canary", "nothing_to_try"
#: The actor of what a trial does by itself.
ACTOR = "canary"
#: What a look says that has let a trial rise or return.
ACTED = "acted"
#: Seconds between two looks at a trial.
LOOK_EVERY = 5.0
#: The most names, steps and guards of a trial, and the most differences told that it does not try.
MOST_NAMES, MOST_STEPS, MOST_GUARDS, MOST_UNTRIED = 1000, 10, 10, 20
#: Defaults of a trial: percent of the named ones, seconds of a step, and waits below which nothing is judged.
STEPS, EVERY, LEAST = (25, 50, 100), 1800.0, 50
#: The least and the most seconds of a step.
LEAST_EVERY, MOST_EVERY = 10.0, 7 * 86400.0
#: Sections of the settings that may differ by cohort. Others are of whole processes, such as gateways.
BY_COHORT = ("assigners", "quotas", "fair_share", "ordering", "checkers")
log = structlog.get_logger()


# The begin


@dataclass(frozen=True)
class Plan:
    """What a trial is to be. on: `cohort:NAME` or `instance:NAME`, all of one sort, in the order in which they are
    reached. steps: percent of these, rising. every: seconds that each step takes at least. least: as of `judge`."""

    on: Sequence[str]
    steps: Sequence[int]
    every: float
    guards: Sequence[str]
    least: int

    def checked(self) -> tuple[Kind, list[str], list[int]]:
        """Return the sort, the names, and how many of them each step reaches. Raises BadInput."""
        kind, names = _names(self.on)
        if not self.steps or len(self.steps) > MOST_STEPS or any(not 1 <= each <= 100 for each in self.steps):
            raise BadInput("steps", f"must be 1 to {MOST_STEPS} percentages from 1 to 100")
        if list(self.steps) != sorted(set(self.steps)):
            raise BadInput("steps", "must rise, such as 25,50,100")
        if not self.guards or len(self.guards) > MOST_GUARDS:
            raise BadInput("guard", f"must be given 1 to {MOST_GUARDS} times, such as p95_wait<=2x")
        for each in self.guards:
            guard(each)
        return kind, names, sorted({ceil(each * len(names) / 100) for each in self.steps})


def _names(on: Sequence[str]) -> tuple[Kind, list[str]]:
    found: list[tuple[Kind, str]] = []
    for each in on:
        kind, _, name = each.partition(":")
        if kind not in ("cohort", "instance") or not name:
            raise BadInput("on", f"'{escaped(each, 60)}' is neither cohort:NAME nor instance:NAME")
        found.append(("cohort" if kind == "cohort" else "instance", name))
    if not 1 <= len(found) <= MOST_NAMES:
        raise BadInput("on", f"must name 1 to {MOST_NAMES} cohorts or instances")
    if len({kind for kind, _ in found}) > 1:
        raise BadInput("on", "cohorts and instances cannot be mixed")
    if len(set(found)) < len(found):
        raise BadInput("on", "names one twice")
    return found[0][0], [name for _, name in found]


def begin(
    connection: Connection, id: int, plan: Plan, *, actor: str, reason: str, check: Check, stale: bool = False
) -> Canary:
    """Try the version on the first of the named ones.

    stale: also a draft since which something was changed, which is then taken back there. Raises BadInput, NotFound,
    and Conflict: if a trial is running, if the version says nothing else for the named ones, if it is a stale draft, or
    if it cannot be used here (`check`).
    """
    kind, names, steps = plan.checked()
    known = canaries.ids(connection, kind, names)
    if missing := [name for name in names if name not in known]:
        raise NotFound(f"on: there is no {kind} '{escaped(missing[0], 100)}'")
    of_steps = [[known[name] for name in names[:reached]] for reached in steps]
    before = [guards.measured(canaries.count(connection, kind, found, seconds=guards.BEFORE)) for found in of_steps]
    base, content = _present(connection)
    wanted = versions.version(connection, id)
    assert wanted.content is not None
    if (found := canaries.running(connection)) is not None:
        raise Conflict(activation.TRIAL, f"policy: a canary of version {found.policy} is running: see `policy canary`")
    if base is None or id == base:
        raise Conflict(activation.IN_FORCE, f"policy: version {id} is in force already")
    activation.refuse_trial(wanted)
    if not stale:
        activation.refuse_stale(connection, wanted)
    check(wanted)
    tried, undo = _of_names(kind, names, content, wanted.content), _of_names(kind, names, wanted.content, content)
    whole = with_limits(content, tried)
    if kind == "cohort":
        theirs = {name: wanted.content["settings"][name] for name in BY_COHORT if name in wanted.content["settings"]}
        whole = {**whole, "settings": {**whole["settings"], **theirs}}
    if not versions.differences(content, whole):
        hint = "" if kind == "cohort" else "; what assigners do is tried by cohort"
        raise Conflict(NOTHING, f"policy: version {id} says nothing else for the named {kind}s{hint}")
    left = [f"{each.what} {each.field}" for each in versions.differences(whole, wanted.content)]
    untried = left[:MOST_UNTRIED] + ([f"and {len(left) - MOST_UNTRIED} more"] if len(left) > MOST_UNTRIED else [])
    canaries.insert(
        connection, policy=id, base=base, kind=kind, names=names, steps=steps, every=plan.every,
        guards=list(plan.guards), least=plan.least, author=actor, reason=reason,
        before=[guards.told(each) for each in before], tried=tried, undo=undo, untried=untried,
    )  # fmt: skip
    begun = canaries.running(connection)
    assert begun is not None
    _reach(connection, begun, content, actor=actor)
    audit.write(connection, "policy.canary", actor=actor, subject=f"policy:{id}",
                details={"reason": reason, "on": list(plan.on), "guards": list(plan.guards)})  # fmt: skip
    return begun


def _of_names(kind: Kind, names: Sequence[str], base: Content, other: Content) -> dict[str, dict[str, Any]]:
    """Return the limits of these names that are otherwise in `other`, as they are there; None = there is none."""
    wanted, found = set(names), {}
    for resource in PLACES[kind]:
        one, two = base["limits"].get(resource, {}), other["limits"].get(resource, {})
        unlike = {
            item: two.get(item)
            for item in {*one, *two}
            if is_of(kind, resource, item, wanted) and one.get(item) != two.get(item)
        }
        if unlike:
            found[resource] = unlike
    return found


def _present(connection: Connection) -> tuple[int | None, Content]:
    """Lock the policy; return the version in force, and what decides now, also what was changed without a version."""
    held, content = versions.hold_content(connection)
    return held, versions.read(connection, content.get("settings", {}))


def _reach(connection: Connection, canary: Canary, content: Content, *, actor: str) -> None:
    """Let the version decide where the present step of the trial has reached, but for limits that somebody else has
    changed since the trial began."""
    mark = {"id": canary.id, "policy": canary.policy, "base": canary.base, canary.kind + "s": list(canary.reached)}
    why = f"canary of version {canary.policy} on {len(canary.reached)} of {len(canary.names)} {canary.kind}s"
    tried = {
        resource: {item: terms for item, terms in items.items()
                   if content["limits"].get(resource, {}).get(item) == canary.undo[resource][item]}
        for resource, items in restricted(canary.kind, canary.reached, canary.tried).items()
    }  # fmt: skip
    _put(connection, canary, with_limits(content, tried), {TRIAL: mark}, actor=actor, reason=why)


def _put(
    connection: Connection, canary: Canary, wanted: Content, mark: Mapping[str, Any], *, actor: str, reason: str
) -> Sequence[str]:
    """Put this into force; return what stays otherwise, with the reasons."""
    kept = activation.restore(connection, wanted, actor=actor, reason=reason)
    settings = {**trials.without(wanted)["settings"], **mark}
    versions.note_change(connection, actor=actor, reason=reason, settings=settings, origin=Origin(canary.base))
    wake(connection, "jobs")
    return kept


# The end


def stop(connection: Connection, *, actor: str, reason: str) -> Canary:
    """End the trial that is running, and let everything be as before it. Raises Conflict if there is none."""
    versions.hold(connection)
    if (canary := canaries.running(connection)) is None:
        raise Conflict(NONE, "policy: no canary is running")
    _return(connection, canary, "stopped", reason or f"stopped by {actor}", actor=actor)
    return canary


def _return(connection: Connection, canary: Canary, outcome: canaries.Outcome, why: str, *, actor: str) -> None:
    """Let everything be as before the trial, but for what somebody else has changed meanwhile."""
    _, content = _present(connection)
    reason = f"canary of version {canary.policy} {outcome}: {why}"[:500]
    kept = _put(connection, canary, trials.settled(connection, content), {}, actor=actor, reason=reason)
    if kept:
        why = f"{why}; stays as it was tried: {'; '.join(kept)}"
        log.error("what a canary has tried could not all be taken back", policy=canary.policy, kept=kept)
    canaries.end(connection, outcome, why)
    audit.write(connection, f"policy.canary.{outcome}", actor=actor, subject=f"policy:{canary.policy}",
                details={"reason": why})  # fmt: skip


# The looks


def watch(database: Database, *, pause: float = LOOK_EVERY) -> str | None:
    """Look at the trial, if it is time: measure, and let it rise or return. Returns what was done, in words.

    Any process may do so. Measuring, judging and acting are transactions of their own, so that what is measured is seen
    even if acting is refused.
    """
    looked = database.run(lambda connection: canaries.claim(connection, pause=pause))
    if looked is None:
        return None
    if not looked.is_in_force:
        database.run(_end_replaced)
        return "replaced"
    now, undecided = database.run(lambda connection: _measure(connection, looked))
    judged = judge_all(looked.canary, now)
    told = {**guards.told(now), "guards": [asdict(each) for each in judged], "undecided": undecided}
    database.run(lambda connection: canaries.note_measured(connection, looked.canary, told))
    if broken := [each for each in judged if each.holds is False]:
        why = "; ".join(f"{each.guard}: {each.value:.4g}, at most {each.limit:.4g}" for each in broken)
        if undecided:
            why += f"; no assigner decided by the version in {', '.join(undecided)}"
        done = _act(database, looked.canary, lambda c, canary: _return(c, canary, "returned", why, actor=ACTOR))
        if done == ACTED:
            metrics.CANARIES_RETURNED.inc()
            log.warning("a canary is taken back: a guard does not hold", policy=looked.canary.policy, why=why)
        return done
    # What nobody has decided by the version says nothing of it, such as starts that bots fetch.
    is_over = looked.lasted >= looked.canary.every and all(each.holds for each in judged) and not undecided
    if not is_over or looked.canary.is_last:
        return "looked"
    return _act(database, looked.canary, _rise)


def judge_all(canary: Canary, now: Arms) -> list[Judged]:
    """Judge all guards of a trial by what is measured now."""
    before = guards.read_arms(canary.before[canary.step])
    return [judge(guard(each), now, before, least=canary.least) for each in canary.guards]


def _measure(connection: Connection, looked: Looked) -> tuple[Arms, list[str]]:
    """Return the figures, and the cohorts where only assigners could try the version and none does."""
    canary = looked.canary
    found = list(canaries.ids(connection, canary.kind, canary.reached).values())
    before, seconds = guards.read_arms(canary.before[canary.step]), min(looked.lasted, canary.every)
    counted = canaries.count(connection, canary.kind, found, seconds=seconds)
    of_assigners = []
    if canary.kind == "cohort":
        quotas = [name.partition("/")[0] for name in canary.tried.get("quota", {})]
        of_assigners = [name for name in canary.reached if name not in quotas]
    undecided = canaries.undecided(connection, canary, of_assigners, sections=BY_COHORT) if of_assigners else []
    return guards.measured(counted, seconds=seconds, before=before), undecided


def _act(database: Database, looked: Canary, act: Callable[[Connection, Canary], object]) -> str:
    """Act on the trial unless it has moved on since it was looked at."""

    def work(connection: Connection) -> str:
        versions.hold(connection)
        canary = canaries.running(connection)
        if canary is None or (canary.id, canary.step) != (looked.id, looked.step):
            return "moved on"
        act(connection, canary)
        return ACTED

    return database.run(work)


def _rise(connection: Connection, canary: Canary) -> None:
    _, content = _present(connection)
    canaries.note_step(connection, canary, canary.step + 1)
    risen = canaries.running(connection)
    assert risen is not None
    _reach(connection, risen, content, actor=ACTOR)


def _end_replaced(connection: Connection) -> None:
    _, content = versions.hold_content(connection)
    canary, mark = canaries.running(connection), trials.of(content)
    if canary is not None and (mark is None or mark["id"] != canary.id):
        canaries.end(connection, "replaced", "another version was put into force")
