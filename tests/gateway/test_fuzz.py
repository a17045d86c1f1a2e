"""Calls that are generated from the gateway's OpenAPI document, in the name of each kind of caller.

Answers must have a status and a content type that the document names, and a body that fits its schema; none is a
failure of the gateway. Afterwards the pool's invariants must hold, as after every test.
"""

import os
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks

from schema import clock
from tests.support.patience import MINUTE
from tests.support.servers import Bot, Served

#: Generated calls for each kind of caller, and minutes in which further ones follow with other seeds.
CALLS, MINUTES = 30, float(os.environ.get("LEASEHOLD_TEST_MINUTES", "0"))
KINDS = ("nobody", "submitter", "bot", "operator")
load_all_checks()
ASKED = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_calls_are_answered_as_the_document_says(served: Served, kind: str) -> None:
    served.app.state.max_wait = 0.1  # else a call that asks for it is held for up to a minute
    document = served.client().get("/openapi.json").json()
    described = schemathesis.openapi.from_dict(document)
    bot = Bot(served) if kind == "bot" else None
    scope = {"bot": {"bot": "*"}, "submitter": {"instance": "ours"}}.get(kind, {})
    token = None if kind == "nobody" else served.token(kind, **scope)
    operations = [found.ok() for found in described.get_all_operations() if kind in _kinds(found.ok(), kind)]

    def answered(case: Any) -> None:
        if bot is not None and isinstance(case.body, dict):
            case.body |= bot.identity  # else no call would get past the check of the session
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        response = case.call(base_url=served.url, headers=headers, timeout=MINUTE)
        case.validate_response(response, checks=ASKED)

    generated = given(st.one_of([operation.as_strategy() for operation in operations]))
    bounds = settings(
        max_examples=CALLS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    until = clock.monotonic() + 60 * MINUTES / len(KINDS)
    for number in count(1):
        seed(number)(bounds(generated(answered)))()
        if clock.monotonic() >= until:
            break


def _kinds(operation: Any, kind: str) -> list[str]:
    """The kinds that may use the operation; whoever has no token is refused everywhere."""
    found: list[str] = operation.definition.raw.get("x-kinds", [])
    return [*found, "nobody"] if kind == "nobody" else found
