"""Settings that are valid but probably a mistake, and what of them is not in force, as `config check` finds it.

Mistakes are found in the settings alone, without the database and a gateway.
"""

import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg
from leasehold import wire
from leasehold.errors import NotReady
from pydantic import BaseModel

from assigner.config.keys import KeyPath
from assigner.placement import strategy
from assigner.placement.registry import CAPACITY
from assigner.process.policies import unlike_file
from assigner.settings import Installation, PoolSettings
from schema.policy import versions
from schema.policy.priority_classes import FIRST_CLASSES, FIRST_LEVELS
from schema.policy.time_windows import ALL, WindowSettings
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.readable import cell


@dataclass(frozen=True)
class Mistake:
    """A setting that is probably a mistake.

    path: the key. reason: one clause without a full stop. is_fatal: true if jobs would wait for ever.
    """

    path: KeyPath
    reason: str
    is_fatal: bool = False


def mistakes(settings: PoolSettings) -> list[Mistake]:
    """Return what is probably a mistake, in the order of the sections."""
    return [
        *_of_assigners(settings),
        *_of_bots(settings),
        *_of_windows(settings),
        *_of_meters(settings),
        *_of_service_levels(settings),
    ]


def dominance(settings: PoolSettings) -> list[str]:
    """Return a note for each kind of assigner: which term of a bot's score can outweigh the others."""
    return [
        f"assigners[{n}].strategy.weights: {strategy.dominance(each.strategy.weights, each.strategy.capacity_term)}"
        for n, each in enumerate(settings.assigners)
    ]


def _of_assigners(settings: PoolSettings) -> Iterator[Mistake]:
    bot: BaseModel | None = getattr(settings, "bot", None)
    capacity = getattr(bot, "capacity", None)
    for n, assigner in enumerate(settings.assigners):
        at: KeyPath = ("assigners", n, "strategy")
        if strategy.Input.SUCCESS in assigner.strategy.inputs and not settings.success.statistics:
            yield Mistake(at, "it needs success statistics, which success.statistics does not turn on")
        if assigner.strategy.kind != CAPACITY and not assigner.strategy.sampling.enabled:
            yield Mistake((*at, "kind"), "means nothing while sampling is off: a job goes to the first bot with room")
        weights, term = assigner.strategy.weights, assigner.strategy.capacity_term
        if not any(weights.model_dump().values()):
            yield Mistake((*at, "weights"), "all of them are 0: every bot has the same score, and chance decides")
        units = strategy.outweighing_units(weights, term)
        most = 1 if term == "normalised" else capacity
        if units is not None and isinstance(most, int) and most >= units:
            whole = "1 (a wholly free bot)" if term == "normalised" else f"{capacity} (bot.capacity)"
            yield Mistake(
                (*at, "weights"),
                f"free capacity can outweigh bot priority: {whole} x weight {abs(weights.capacity):g} is more than the "
                f"weight {abs(weights.priority):g} of priority",
            )


def _of_bots(settings: PoolSettings) -> Iterator[Mistake]:
    bot: BaseModel | None = getattr(settings, "bot", None)
    if getattr(bot, "auto_capacity", False) and bot is not None and "capacity" in bot.model_fields_set:
        yield Mistake(("bot", "capacity"), "means nothing together with auto_capacity")


def _of_windows(settings: PoolSettings) -> Iterator[Mistake]:
    """Mistakes about classes. Operators may have made others, which only the database knows, so most are warnings."""
    for n, window in enumerate(settings.windows):
        for key, types in (("types", window.types), ("exempt_types", window.exempt_types)):
            for each in types:
                if not _is_known(window, each):
                    yield Mistake(
                        ("windows", n, key),
                        f"'{each}' is no class of a new pool, and jobs have it only after `leasehold class set {each}`"
                        + wire.suggestion(each, FIRST_CLASSES),
                    )
    left_out = [name for name in FIRST_CLASSES if not any(window.admits(name) for window in settings.windows)]
    if settings.windows and left_out:
        yield Mistake(
            ("windows", 0, "types"),
            f"no window lets jobs of {_listed(left_out)} start: they would wait for ever",
            is_fatal=len(left_out) == len(FIRST_CLASSES),
        )


def _is_known(window: WindowSettings, given: str) -> bool:
    alike = (window.match == "prefix" and name.startswith(given) for name in FIRST_CLASSES)
    return given == ALL or given in FIRST_CLASSES or any(alike)


def _listed(names: list[str]) -> str:
    return ("class " if len(names) == 1 else "the classes ") + ", ".join(f"'{name}'" for name in names)


def _of_meters(settings: PoolSettings) -> Iterator[Mistake]:
    """Mistakes about meters. Operators and programs may set a meter that no command reads."""
    declared = [meter.name for meter in settings.meters]
    used = {window.meter for window in settings.windows}
    for n, window in enumerate(settings.windows):
        meant = None if window.meter is None or window.meter in declared else wire.meant(window.meter, declared)
        if meant is not None:
            # If no window goes by the declared meter, this window was meant to, and its jobs would wait for ever.
            yield Mistake(
                ("windows", n, "meter"),
                f"nothing reads '{window.meter}', and jobs of this window would wait for ever; did you mean '{meant}'?",
                is_fatal=meant not in used,
            )
    for n, meter in enumerate(settings.meters):
        if shutil.which(meter.command[0]) is None:
            is_used = meter.name in used
            wait = ", and jobs that wait for it would wait for ever" if is_used else ""
            yield Mistake(
                ("meters", n, "command"),
                f"{meter.command[0]!r} is no program that can be run on this machine{wait}",
                is_fatal=is_used,
            )
        if meter.timeout > meter.interval:
            yield Mistake(
                ("meters", n, "timeout"),
                f"{meter.timeout:g} s is longer than the interval of {meter.interval:g} s: the next reading would be "
                "due before this one is given up",
            )


def _of_service_levels(settings: PoolSettings) -> Iterator[Mistake]:
    """A default level that a new pool does not have. Operators may have made it."""
    level = settings.service_levels.default
    if level is not None and level not in FIRST_LEVELS:
        yield Mistake(
            ("service_levels", "default"),
            f"'{level}' is no service level of a new pool, and gateways start only after "
            f"`leasehold rule service-level set {level}`" + wire.suggestion(level, FIRST_LEVELS),
        )


# What a configuration file says beside the version in force.


#: Values that `config check` names at most.
MAX_TOLD = 20


def told_of_file(installation: Installation, file: PoolSettings) -> list[str]:
    """Return in lines how the version in force differs from a file; none if they agree, or there is no pool yet."""
    url = file.database.url.get_secret_value()
    if url == "embedded":
        if not (embedded.directory_of(installation.data) / "postmaster.pid").exists():
            return []
        url = embedded.Cluster.find(installation.data).url
    settings = file.database.model_copy(update={"outage_seconds": 0.0})
    with closing(Database(url, settings, role="leasehold-check", chance=random.SystemRandom())) as database:
        try:
            migrate.require(database)
            found = database.run(versions.in_force)
        except (NotReady, psycopg.Error):
            return ["policy: no database of this version answers, so nothing tells whether another policy is in force"]
    if found is None or found.content is None:
        return []
    unlike = unlike_file(file, found.content)
    if not unlike:
        return []
    return [
        f"policy: version {found.id} is in force, and this file says otherwise; it counts when it is changed:",
        *(
            f"  {each.what} {each.field}: {_said(each.before)} here, {_said(each.after)} in force"
            for each in unlike[:MAX_TOLD]
        ),
        *([f"  and {len(unlike) - MAX_TOLD:,} more"] if len(unlike) > MAX_TOLD else []),
    ]


def _said(value: object) -> str:
    return "none" if value is None else cell(value)
