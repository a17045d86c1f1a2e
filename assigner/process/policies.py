"""The policy of a process: what of its file decides, whether the file makes a version, and the settings of a version.

A file is the way to write a policy, and the database has the one in force. A file that has changed is put into force
once. After that the version in force decides, whatever the file says, so that a rollback outlasts restarts. Which
`[[assigners]]` entries a process runs, and with how many threads, only its file says.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import structlog
from leasehold.errors import Conflict
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from assigner.cycle.settings import AssignerSettings
from assigner.settings import PoolSettings
from schema import declarations
from schema.accounting import accounts, quotas, rates
from schema.accounting.accounts import PoolLimits
from schema.accounting.quotas import QuotaChange
from schema.fields import first_refusal
from schema.fleet import success
from schema.policy import queue_limits, time_windows, versions
from schema.policy.trials import TRIAL
from schema.policy.versions import Change, Content, Version
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Row
from schema.tenancy import cohorts, instances, lock_order
from schema.tenancy.instances import InstanceSettings
from schema.tenancy.lock_order import Limits

#: Actor and reason of declared changes in the audit and in versions.
ACTOR = "config"
REASON = "configuration"
#: Seconds between two looks which version is in force.
LOOK_EVERY = 1.0
#: Sections that decide, beside the entries. Those that only `bots` know are there if the model of the file has them.
SECTIONS = tuple(sorted(versions.SECTIONS - {"assigners"}))
#: Lists of the file whose items become rows.
DECLARED = ("cohorts", "queues", "instances", "rates", "windows")
#: Keys of an entry that are its name, and those that only its host decides.
NAMED_BY = ("kind", "instances", "cohorts")
OF_HOST = frozenset({*NAMED_BY, "threads", "at_once"})
#: The limits of the pool, which are rows although they stand in [fair_share].
_POOL_LIMITS = frozenset(PoolLimits.model_fields)

log = structlog.get_logger()


@dataclass(frozen=True)
class Trial:
    """Other settings that decide in some cohorts. cohorts, others: their ids, and those of all others."""

    cohorts: Sequence[int]
    others: Sequence[int]
    settings: PoolSettings


@dataclass(frozen=True)
class InForce:
    """The settings by which a process works, and the version that they are of; None = there is none yet.

    file: what the process's file says. shadow: a version that decides beside it. absent: entries of the file that the
    version does not have, which are as the file says. refused: a version that is in force and cannot be used here, so
    that the one before stays; error: why. trial: None = the settings decide everywhere.
    """

    file: PoolSettings
    changed: PoolSettings | None = None
    version: int | None = None
    absent: tuple[str, ...] = ()
    refused: int | None = None
    error: str | None = None
    trial: Trial | None = None
    shadow: "Candidate | None" = None

    @property
    def settings(self) -> PoolSettings:
        """The settings: those of the file, with what decides as the version has it."""
        return self.file if self.changed is None else self.changed


@dataclass(frozen=True)
class Candidate:
    """A version that decides beside the one in force. id: the number of the shadow. share: of the cycles, 0 to 1.
    stored: its settings as the version has them."""

    id: int
    version: int
    share: float
    stored: Mapping[str, Any]


def entry_names(settings: PoolSettings) -> list[str]:
    """Return the name of each entry in versions: its kind and what it serves, with a number if there are several."""
    found: list[str] = []
    for each in settings.assigners:
        served = [f"{word} {','.join(sorted(names))}" for word in NAMED_BY[1:] if (names := getattr(each, word))]
        name = " ".join([each.kind, *served])
        again = sum(one.partition("#")[0].rstrip() == name for one in found)
        found.append(f"{name} #{again + 1}" if again else name)
    return found


def deciding(settings: PoolSettings) -> dict[str, Any]:
    """Return what of the configuration decides and is not in rows, by section; of entries by their names."""
    entries = (each.model_dump(mode="json", exclude=set(OF_HOST)) for each in settings.assigners)
    found: dict[str, Any] = {"assigners": dict(zip(entry_names(settings), entries, strict=True))}
    for name in SECTIONS:
        if (section := getattr(settings, name, None)) is not None:
            found[name] = section.model_dump(mode="json", exclude=_left_out(name))
    return found


def _left_out(section: str) -> set[str]:
    """Return the keys of a section that become rows, or decide nothing."""
    return {"fair_share": set(_POOL_LIMITS), "quotas": {"metric_pairs"}}.get(section, set())


def file_digest(settings: PoolSettings) -> bytes:
    """Return a digest of what the file itself says of the policy. It stays equal when defaults change."""
    said = settings.model_dump(mode="json", include={"assigners", *SECTIONS, *DECLARED}, exclude_unset=True)
    return sha256(versions.canonical(said)).digest()


def put_file(connection: Connection, settings: PoolSettings, *, process: str, before: bytes | None) -> bool:
    """Put a file into force and make a version of it, unless that has been done since it was changed.

    before: the digest of what the process had before; None = it has just started. Returns whether it was done now.
    """
    versions.hold(connection)
    if versions.is_file_done(connection, file_digest(settings), process=process, before=before):
        found = versions.in_force(connection)
        if found is not None and found.content is not None and (unlike := unlike_file(settings, found.content)):
            log.warning("the file is not put into force, because that was done before", policy=found.id,
                        other_values=len(unlike), tells="leasehold config check")  # fmt: skip
        return False
    declare(connection, settings, reason=f"{REASON} of {process}")
    return True


def declare(connection: Connection, settings: PoolSettings, *, reason: str = REASON) -> None:
    """Write what the file says of the policy, and make a version if anything differs.

    An instance that cannot change its pool now is logged; then the file counts as changed at the next start or reload.
    """
    _, content = versions.hold_content(connection)
    cohorts.declare(connection, settings.cohorts, actor=ACTOR)
    now = versions.read(connection, {})["limits"]
    limited = _quotas(settings, {cohorts.DEFAULT, *now["cohort"]})
    wanted: Limits = {**declared_limits(settings), "quota": {name: each.terms for name, each in limited.items()}}
    lock_order.take(connection, now, {
        resource: {**now[resource], **{name: {**now[resource].get(name, {}), **terms} for name, terms in items.items()}}
        for resource, items in wanted.items()
    })  # fmt: skip
    queue_limits.declare(connection, settings.queues, actor=ACTOR)
    success.declare(connection, settings.success, actor=ACTOR)
    rates.declare(connection, settings.rates, actor=ACTOR)
    time_windows.declare(connection, settings.windows, actor=ACTOR)
    is_whole = _declare_instances(connection, settings)
    declarations.replace(connection, "quota", limited)
    if unlike := [each for name, each in limited.items() if now["quota"].get(name) != each.terms]:
        quotas.change_quotas(connection, unlike, actor=ACTOR, reason=REASON)
    before = content.get("settings", {})
    told = deciding(settings)
    # Entries of other hosts stay. Of a section that both have, the file that changed last decides.
    kept = {**before, **told, "assigners": {**before.get("assigners", {}), **told["assigners"]}}
    versions.note_change(connection, actor=ACTOR, reason=reason, settings=kept)
    if is_whole:
        versions.note_file(connection, file_digest(settings))


def _declare_instances(connection: Connection, settings: PoolSettings) -> bool:
    """Write instances, shares, locks and the limits of the pool; return whether all could be."""
    is_whole = _put_instances(connection, instances.changed_instances(connection, settings.instances))
    limits = settings.fair_share.model_dump(include=set(_POOL_LIMITS), exclude_none=True)
    named = settings.instances
    declarations.replace(connection, "instance", (each.name for each in named))
    declarations.replace(connection, "account", (each.name for each in named if each.is_given))
    declarations.replace(connection, "lock", (f"{each.name}/{lock}" for each in named for lock in each.locks))
    declarations.replace(connection, "pool-limit", limits)
    if shares := {each.name: each for each in named if each.is_given}:
        accounts.put_accounts(connection, shares, actor=ACTOR, reason=REASON)
    if limits:
        accounts.limit_pool(connection, PoolLimits.model_validate(limits), actor=ACTOR, reason=REASON)
    return is_whole


def _quotas(settings: PoolSettings, known: Collection[str]) -> dict[str, QuotaChange]:
    """Return the quotas that the file declares, by name. One in a cohort that is not `known` is logged and left out."""
    found = {}
    for each in settings.instances:
        for cohort, terms in each.quotas.items():
            if cohort in known:
                change = QuotaChange(cohort, each.name, terms.model_dump())
                found[change.name] = change
            else:
                log.error("a quota is left out, because there is no such cohort", cohort=cohort, instance=each.name)
    return found


def _put_instances(connection: Connection, wanted: Sequence[InstanceSettings]) -> bool:
    """Put instances into their pools, in one savepoint, and if that is refused in one for each half."""
    try:
        with connection.savepoint():
            instances.put_instances(connection, {each.name: each.pool for each in wanted}, actor=ACTOR, reason=REASON)
    except Conflict as error:
        if (half := len(wanted) // 2) > 0:
            done = [_put_instances(connection, part) for part in (wanted[:half], wanted[half:])]
            return all(done)
        log.error("an instance cannot be as configured now", instance=wanted[0].name, error=str(error))
        return False
    return True


def look(connection: Connection, file: PoolSettings, known: InForce | None) -> InForce:
    """Return the settings of the version in force for a process with this file; `known`, if they are the same.

    A version that this process cannot use changes nothing but `refused`, until another one is in force. A process that
    has just started, or has another file now, then works by the version before it, or else by the newest usable one.
    """
    has = None if known is None else known.refused or known.version
    before = None if known is None else known.shadow
    row = connection.execute(versions.LOOK, {"known": has, "shadow": before and before.id}).one()
    if before is None or row.shadow != before.id:
        before = row.shadow and Candidate(row.shadow, row.candidate, row.share, row.candidate_settings)
    found = _in_force(connection, file, known, row, has)
    return found if found.shadow is before else replace(found, shadow=before)


def _in_force(connection: Connection, file: PoolSettings, known: InForce | None, row: Row, has: int | None) -> InForce:
    """Return the settings of the version in force, as `look` has read it. has: the version that `known` knows."""
    if known is not None and row.id == has:
        return known
    if row.settings is None:
        return InForce(file)
    try:
        found = merged(file, row.id, row.settings)
        return replace(found, trial=_trial(connection, found, row.settings.get(TRIAL)))
    except ValidationError as error:
        reason = unusable(row.id, error)
        log.error("a policy cannot be used here, the one before stays", policy=row.id, error=reason)
        return replace(known or _newest_usable(connection, file, row.id), refused=row.id, error=reason)


def _trial(connection: Connection, found: InForce, mark: Mapping[str, Any] | None) -> Trial | None:
    """Return where other settings decide; None if they do nowhere. Raises ValidationError if they cannot be used here.

    A cohort that is new, or gone, makes a version, so that this is asked again.
    """
    if mark is None or "cohorts" not in mark:
        return None
    row = connection.execute(versions.TRIED, {"policy": mark["policy"], "names": mark["cohorts"]}).one()
    tried = merged(found.file, mark["policy"], row.settings).settings
    if tried == found.settings or row.tried is None:
        return None
    return Trial(tuple(row.tried), tuple(row.others or ()), tried)


def _newest_usable(connection: Connection, file: PoolSettings, refused: int) -> InForce:
    for row in connection.execute(versions.OTHERS, {"refused": refused}):
        with suppress(ValidationError):
            return merged(file, row.id, row.settings)
    return InForce(file)


def unusable(version: int, error: ValidationError) -> str:
    """Return why a process cannot use a version."""
    return f"policy {version} cannot be used here: {first_refusal(error)}"


class Follower:
    """Keeps a process that reads its file once at the version in force. `run_once` is for a loop.

    apply: called with the settings of each version, before the process serves and when another one is in force.
    """

    def __init__(self, database: Database, file: PoolSettings, apply: Callable[[InForce], object]) -> None:
        self._database, self._apply = database, apply
        self.policy = InForce(file)
        apply(self.policy)

    def check(self, wanted: Version) -> None:
        """Raise Conflict if this process cannot use a version, before it is put into force."""
        assert wanted.content is not None
        try:
            merged(self.policy.file, wanted.id, wanted.content["settings"])
        except ValidationError as error:
            raise Conflict("policy_unusable", unusable(wanted.id, error)) from None

    def run_once(self) -> float:
        """Look which version is in force. Returns the seconds until the next look."""
        found = self._database.run(lambda connection: look(connection, self.policy.file, self.policy))
        if found is not self.policy:
            self._apply(found)
            self.policy = found
        return LOOK_EVERY


#: The settings of a version by section.
_STORED = TypeAdapter(dict[str, dict[str, Any]])


def merged(file: PoolSettings, version: int, stored: Mapping[str, Any]) -> InForce:
    """Return the settings of the file with what decides as the version has it. Raises ValidationError."""
    stored = _STORED.validate_python(stored)
    entries, absent = [], []
    for name, entry in zip(entry_names(file), file.assigners, strict=True):
        if (terms := stored.get("assigners", {}).get(name)) is None:
            absent.append(name)
            entries.append(entry)
        else:
            own = from_json(entry.model_dump_json(include=set(OF_HOST), exclude_unset=True))
            entries.append(AssignerSettings.model_validate_json(to_json({**terms, **own})))
    found: dict[str, Any] = {"assigners": tuple(entries)}
    for name in SECTIONS:
        section: BaseModel | None = getattr(file, name, None)
        if section is not None and name in stored:
            own = section.model_dump(mode="json", include=_left_out(name))
            found[name] = type(section).model_validate_json(to_json({**stored[name], **own}))
    return InForce(file, file.model_copy(update=found), version, tuple(absent))


def unlike_file(file: PoolSettings, content: Content) -> list[Change]:
    """Return where a version has other values than the file says; what the file does not name is left out.

    Of each, `before` is what the file says, and `after` what the version has.
    """
    told, settings = deciding(file), content["settings"]
    entries = settings.get("assigners", {})
    has = {**settings, "assigners": {name: entries.get(name) for name in told["assigners"]}}
    said = declared_limits(file)
    limits = {
        resource: {
            name: {field: content["limits"].get(resource, {}).get(name, {}).get(field) for field in terms}
            for name, terms in items.items()
        }
        for resource, items in said.items()
    }
    kept = {name: {} if found is None else found for name, found in has["assigners"].items()}
    has = {name: terms for name, terms in {**has, "assigners": kept}.items() if name in told}
    return versions.differences({"settings": told, "limits": said}, {"settings": has, "limits": limits})


def declared_limits(file: PoolSettings) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows that the file declares, as versions have them, with the fields that it gives."""
    shares = {
        each.name: each.model_dump(mode="json", include=set(PoolLimits.model_fields) | {"weight", "unit", "slots"},
                                   exclude_none=True)
        for each in file.instances
    }  # fmt: skip
    return {
        "pool-limit": {"": file.fair_share.model_dump(include=set(_POOL_LIMITS), exclude_none=True)},
        "instance": {each.name: {"pool": each.pool} for each in file.instances},
        "account": {name: terms for name, terms in shares.items() if terms},
        "quota": {
            f"{cohort}/{each.name}": terms.model_dump()
            for each in file.instances
            for cohort, terms in each.quotas.items()
        },
        "lock": {f"{i.name}/{lock}": {"slots": slots} for i in file.instances for lock, slots in i.locks.items()},
        "cohort": {
            each.name: {"labels": sorted(set(each.labels)) or None, "reclaim_min": each.reclaim_min}
            for each in file.cohorts
        },
        "queue-limit": {each.label: {"max_queued": each.max_queued} for each in file.queues},
        "rate": {
            each.resource: {"per_second": each.per_second, "burst": each.per_second and each.burst}
            for each in file.rates
        },
        "window": {each.name: each.model_dump(mode="json", exclude={"name"}) for each in file.windows},
    }
