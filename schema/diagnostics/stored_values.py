"""Stored values that were valid once and cannot be used here any more, for `db doctor`.

A host has other time zones than the one where a value was checked, and a version other rules than the one that stored
it. The loop that meets such a value goes on without it; the row, or explain, says what is wrong. This names all, also
those that no loop has met yet.
"""

from collections.abc import Iterator

from leasehold.errors import BadInput
from leasehold.wire import escaped
from pydantic import ValidationError

from schema.diagnostics.checks import NAMED, Check, Verdict, printable_name
from schema.fields import as_stored, first_error
from schema.fleet import kinds
from schema.picking import constrained
from schema.policy import cron, submit_rules, time_windows, versions
from schema.policy.submit_rules import SubmitRuleTerms
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from schema.validation import load_zone

#: The most rows of one kind that are looked at.
MOST = 10_000
_SCHEDULES = Statement("""
SELECT i.name || '/' || s.name AS name, s.cron, s.zone, s.request
FROM schedules s JOIN instances i ON i.id = s.instance WHERE s.enabled ORDER BY 1 LIMIT :most
""")
_CONSTRAINT_SETS = Statement("""
SELECT s.id, s.terms FROM constraint_sets s
WHERE EXISTS (SELECT FROM queues q WHERE q.constraint_set = s.id) ORDER BY s.id LIMIT :most
""")
# What `settle` and lists of ceilings cannot read.
_REPORT_CEILINGS = Statement("""
SELECT name FROM instances WHERE jsonb_typeof(report_ceilings) <> 'object'
    OR jsonb_path_exists(report_ceilings, 'strict $.* ? (@.type() != "number")', '{}', true)
ORDER BY name LIMIT :most
""")
_PROPERTIES = Statement("""
(SELECT 'requirement set' AS what, id, properties FROM platforms ORDER BY id LIMIT :most)
UNION ALL (SELECT 'kind of bots', id, properties FROM kinds ORDER BY id LIMIT :most)
""")


def check_stored_values(connection: Connection) -> Check:
    """Check that what is stored of schedules, windows, properties, constraints, rules, ceilings of reports and the
    policy in force can be used here."""
    wrong = [
        *_of_schedules(connection),
        *(
            f"window '{each.settings.name}': {each.wrong}"
            for each in time_windows.read(connection).windows
            if each.wrong
        ),
        *_of_properties(connection),
        *_of_constraints(connection),
        *_of_rules(connection),
        *_of_report_ceilings(connection),
        *_of_policy(connection),
    ]
    figures = {"unusable": len(wrong)}
    if not wrong:
        return Check("stored values", Verdict.OK, "all of them can be used here", None, figures)
    others = [f"and {len(wrong) - NAMED} more"] if len(wrong) > NAMED else []
    remedy = (
        "set them anew (leasehold schedule add, rule window set, rule submit set, limit report set, policy draft and"
        " activate), submit such jobs again, or install the time zones of this host (tzdata)"
    )
    return Check("stored values", Verdict.WARNING, "; ".join([*wrong[:NAMED], *others]), remedy, figures)


def _of_schedules(connection: Connection) -> Iterator[str]:
    for row in connection.execute(_SCHEDULES, {"most": MOST}):
        try:
            cron.check_cron("cron", row.cron)
            load_zone(row.zone)
            JobRequest.model_validate(row.request)
        except BadInput as error:
            yield f"schedule {printable_name(row.name)}: {error}"
        except ValidationError as error:
            field, said = first_error(error)
            yield f"schedule {printable_name(row.name)}: {'.'.join(filter(None, ('job', field)))}: {said}"
        except ValueError as error:
            yield f"schedule {printable_name(row.name)}: {error}"


def _of_constraints(connection: Connection) -> Iterator[str]:
    for row in connection.execute(_CONSTRAINT_SETS, {"most": MOST}):
        terms = constrained.usable(row.terms)
        if constrained.UNUSABLE in terms:
            yield f"constraint set {row.id}: {terms[constrained.UNUSABLE]}"
            continue
        try:
            load_zone(terms.get("preferred_zone", "UTC"))
        except ValueError as error:
            yield f"constraint set {row.id}: preferred_zone: {error}"


def _of_properties(connection: Connection) -> Iterator[str]:
    for row in connection.execute(_PROPERTIES, {"most": MOST}):
        if kinds.clauses(row.properties) == kinds.UNUSABLE:
            yield f"{row.what} {row.id}: they are no properties"


def _of_rules(connection: Connection) -> Iterator[str]:
    for rule in submit_rules.submit_rules(connection):
        given = {name: getattr(rule, name) for name in SubmitRuleTerms.model_fields}
        wrong = as_stored(SubmitRuleTerms, given)[1]
        if wrong is not None:
            yield f"submit rule of {escaped(rule.instance or 'all instances', 63)}: {escaped(wrong, 200)}"


def _of_report_ceilings(connection: Connection) -> Iterator[str]:
    for row in connection.execute(_REPORT_CEILINGS, {"most": MOST}):
        yield f"ceilings of reports of {printable_name(row.name)}: they are no numbers by unit"


def _of_policy(connection: Connection) -> Iterator[str]:
    found = versions.in_force(connection)
    if found is not None and found.content is None:
        yield f"policy version {found.id}, which is in force: wrong JSON is stored"
