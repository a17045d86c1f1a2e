"""Cohorts: named sets of labels that divide the bots and the jobs of a pool.

A job has at most one label, a bot any number. Each belongs to the first cohort whose labels include all of its own. A
job or bot without labels, or with labels that no cohort includes, belongs to the cohort `default`, which comes last. A
job runs only on a bot of its own cohort.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self

from leasehold.errors import BadInput, Conflict, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field, model_validator

from schema import audit, declarations
from schema.fields import Label, Name
from schema.moves.reassign import reassign_cohorts
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.validation import MAX_LABEL, check_name, check_text

DEFAULT = "default"
#: The most labels one cohort may have.
MAX_LABELS = 1000
RULES = ("lower_priority_only", "any")
#: The largest position of a cohort. The default cohort comes after it.
MAX_POSITION = 1_000_000

# Until this transaction ends, no session opens, and nobody else changes cohorts.
_LOCK = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.platforms'))")
_LIST = Statement("SELECT id, name, labels, reclaim_min, position FROM cohorts ORDER BY position, id")
_PUT = Statement("""
INSERT INTO cohorts AS c (name, labels, position, reclaim_min)
VALUES (:name, CAST(:labels AS text[]), :position, :reclaim_min)
ON CONFLICT (name) DO UPDATE SET labels = EXCLUDED.labels, position = EXCLUDED.position,
    reclaim_min = EXCLUDED.reclaim_min
""")
_NEXT = Statement("SELECT coalesce(max(position), 0) + 1 FROM cohorts WHERE id <> 0")
# A transaction that sets a quota holds the cohort's row until the quota is visible.
_FOUND = Statement("SELECT id FROM cohorts WHERE name = :name FOR UPDATE")
# The cohort of a job with each label, as the SQL function `cohort_of` decides it.
_OWNERS = Statement("""
SELECT DISTINCT ON (label) label, c.id FROM cohorts c CROSS JOIN unnest(c.labels) AS label
ORDER BY label, c.position, c.id
""")
_USED = Statement("""
SELECT EXISTS (SELECT FROM leases l
               WHERE l.cohort = :id AND l.state IN ('pending', 'active', 'cancelling')) AS leases,
    EXISTS (SELECT FROM quotas WHERE cohort = :id) AS quotas
""")
_REMOVE = Statement("DELETE FROM cohorts WHERE id = :id")


class CohortSettings(BaseModel):
    """One cohort of the configuration. The list's order is the order in which cohorts are tried.

    labels: labels of its jobs and bots. A bot belongs to the cohort only if all labels of the bot are among them.
    reclaim_min: the jobs that may be evicted for an instance below its minimum: `lower_priority_only` or `any`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    labels: tuple[Label, ...] = Field(default=(), max_length=MAX_LABELS)
    reclaim_min: Literal["lower_priority_only", "any"] = "lower_priority_only"

    @model_validator(mode="after")
    def _default_has_no_labels(self) -> Self:
        if self.name == DEFAULT and self.labels:
            raise ValueError("labels: the default cohort has none")
        return self


@dataclass(frozen=True)
class Cohort:
    """One cohort as an operator sees it.

    reclaim_min: the rule of preemption for instances below their minimum. `lower_priority_only` evicts only less
    urgent jobs; `any` evicts jobs of any instance that uses more than its minimum.
    """

    id: int
    name: str
    labels: list[str]
    reclaim_min: str
    position: int


def cohorts(connection: Connection) -> list[Cohort]:
    """All cohorts in the order in which they are tried, the default cohort last."""
    return [Cohort(**row._asdict()) for row in connection.execute(_LIST)]


def put_cohort(
    connection: Connection,
    name: str,
    *,
    labels: Sequence[str] | None = None,
    position: int | None = None,
    reclaim_min: str | None = None,
    actor: str,
    reason: str = "",
) -> None:
    """Create a cohort or change it.

    An argument of None leaves the stored value. For a new cohort it means no labels, the last position, and
    `lower_priority_only`. Bots and waiting jobs move to the cohort that they now belong to; a job with a live lease
    moves when it is queued again. Raises BadInput for too many or malformed labels, an unknown rule, a position out of
    range, and for labels or a position of the default cohort.
    """
    _check(name, labels, position, reclaim_min)
    with _changing(connection) as concerned:
        concerned |= _put(connection, name, labels, position, reclaim_min, actor=actor, reason=reason)


def declare(connection: Connection, wanted: Sequence[CohortSettings], *, actor: str) -> None:
    """Store the cohorts of the configuration, in its order, and keep all others.

    Writes and locks nothing if the stored cohorts already agree.
    """
    declarations.replace(connection, "cohort", (each.name for each in wanted))
    if _is_so(_known(connection), wanted):
        return
    with _changing(connection) as concerned:
        for place, each in enumerate(wanted, start=1):
            labels, position = (None, None) if each.name == DEFAULT else (each.labels, place)
            concerned |= _put(
                connection, each.name, labels, position, each.reclaim_min, actor=actor, reason="configuration"
            )


def remove_cohort(connection: Connection, name: str, *, actor: str, reason: str = "") -> None:
    """Remove a cohort. Its bots and waiting jobs move to the next cohort that includes their labels.

    Raises NotFound, BadInput for the default cohort, and Conflict `cohort_in_use` while it has quotas or live leases.
    """
    if name == DEFAULT:
        raise BadInput("name", "the default cohort cannot be removed")
    with _changing(connection) as concerned:
        before = _known(connection).get(name)
        if before is None or connection.execute(_FOUND, {"name": name}).one_or_none() is None:
            raise NotFound(f"cohort: no cohort '{escaped(name, 63)}'")
        connection.execute(_REMOVE, {"id": before.id})
        concerned.update(before.labels)
    used = connection.execute(_USED, {"id": before.id}).one()
    if used.quotas or used.leases:
        what = "quotas" if used.quotas else "live leases"
        raise Conflict("cohort_in_use", f"cohort '{name}' still has {what}")
    _note(connection, "cohort.rm", name, before=before, after=None, actor=actor, reason=reason)


def _put(
    connection: Connection,
    name: str,
    labels: Sequence[str] | None,
    position: int | None,
    reclaim_min: str | None,
    *,
    actor: str,
    reason: str,
) -> set[str]:
    """Write one cohort; returns the labels whose bots may now belong to another cohort."""
    before = _known(connection).get(name)
    before_or_new = Cohort(0, name, [], RULES[0], connection.execute(_NEXT).scalar_one()) if before is None else before
    after = Cohort(
        before_or_new.id,
        name,
        before_or_new.labels if labels is None else sorted(set(labels)),
        reclaim_min or before_or_new.reclaim_min,
        before_or_new.position if position is None else position,
    )
    if after == before:
        return set()
    connection.execute(_PUT, _values(after))
    _note(connection, "cohort.set", name, before=before, after=after, actor=actor, reason=reason)
    if before is None or before.position == after.position:
        return set(before.labels if before else ()) ^ set(after.labels)
    return {*before.labels, *after.labels}


@contextmanager
def _changing(connection: Connection) -> Iterator[set[str]]:
    """Lock cohorts, sessions and requirement sets for a change; afterwards move the bots and jobs concerned.

    The body adds to the yielded set every label that joined a cohort, left one, or is in a cohort with a new position.
    """
    connection.execute(_LOCK)
    before = _owners(connection)
    concerned: set[str] = set()
    yield concerned
    if concerned:
        after = _owners(connection)
        moved = {label for label in concerned if before.get(label) != after.get(label)}
        reassign_cohorts(connection, of_bots=concerned, of_jobs=moved)


def _owners(connection: Connection) -> dict[str, int]:
    return {row.label: row.id for row in connection.execute(_OWNERS)}


def _known(connection: Connection) -> dict[str, Cohort]:
    return {each.name: each for each in cohorts(connection)}


def _is_so(known: dict[str, Cohort], wanted: Sequence[CohortSettings]) -> bool:
    return all(
        (found := known.get(each.name)) is not None
        and found.reclaim_min == each.reclaim_min
        and (each.name == DEFAULT or (found.labels, found.position) == (sorted(set(each.labels)), place))
        for place, each in enumerate(wanted, start=1)
    )


def _check(name: str, labels: Sequence[str] | None, position: int | None, rule: str | None) -> None:
    check_name("name", name)
    if name == DEFAULT and (labels or position is not None):
        raise BadInput("labels" if labels else "position", "the default cohort has no labels and comes last")
    if labels is not None and len(set(labels)) > MAX_LABELS:
        raise BadInput("labels", f"are {len(set(labels))}, at most {MAX_LABELS} are allowed")
    for label in labels or ():
        if not check_text("labels", label, MAX_LABEL):
            raise BadInput("labels", "must not be empty")
    if position is not None and not 0 <= position <= MAX_POSITION:
        raise BadInput("position", f"must be between 0 and {MAX_POSITION}")
    if rule is not None and rule not in RULES:
        raise BadInput("reclaim_min", f"must be one of {', '.join(RULES)}")


def _values(cohort: Cohort) -> dict[str, object]:
    return {
        "name": cohort.name,
        "labels": cohort.labels,
        "position": cohort.position,
        "reclaim_min": cohort.reclaim_min,
    }


def _note(
    connection: Connection,
    action: str,
    name: str,
    *,
    before: Cohort | None,
    after: Cohort | None,
    actor: str,
    reason: str,
) -> None:
    details = {
        "before": None if before is None else _values(before),
        "after": None if after is None else _values(after),
        "reason": reason,
    }
    audit.write(connection, action, actor=actor, subject=f"cohort:{name}", details=details)
    wake(connection, "jobs")
