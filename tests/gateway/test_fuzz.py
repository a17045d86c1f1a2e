"""Calls that are generated from the gateway's OpenAPI document, in the name of each kind of caller.

Answers must have a status and a content type that the document names, and a body that fits its schema; none is a
failure of the gateway. Afterwards the pool's invariants must hold, as after every test.
"""

import os
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from schema import clock
from tests.support.patience import MINUTE
from tests.support.servers import Bot, Served

#: Operations of each kind of caller that are drawn, and calls that are generated from them; or minutes in which calls
#: of all operations are generated, with further seeds.
DRAWN, CALLS, MINUTES = 12, 20, float(os.environ.get("LEASEHOLD_TEST_MINUTES", "0"))
KINDS = ("nobody", "submitter", "bot", "operator")
ASKED = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]


@pytest.mark.long
def test_generated_calls_are_answered_as_the_document_says(served: Served, chance: random.Random) -> None:
    # Loaded here, for no other test needs them and they take seconds.
    import schemathesis
    from hypothesis import Phase, given, seed, settings
    from hypothesis import strategies as st
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    asked = CHECKS.get_by_names(ASKED)
    served.app.state.max_wait = 0.1  # else a call that asks for it is held for up to a minute
    described = schemathesis.openapi.from_dict(served.client().get("/openapi.json").json())
    every = [found.ok() for found in described.get_all_operations()]
    bounds = settings(max_examples=CALLS, phases=[Phase.generate])

    def answered(bot: Bot | None, token: str | None) -> Callable[[Any], None]:
        def answer(case: Any) -> None:
            if bot is not None and isinstance(case.body, dict):
                case.body |= bot.identity  # else no call would get past the check of the session
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            response = case.call(base_url=served.url, headers=headers, timeout=MINUTE)
            case.validate_response(response, checks=asked)

        return answer

    for kind in KINDS:
        bot = Bot(served) if kind == "bot" else None
        scope = {"bot": {"bot": "*"}, "submitter": {"instance": "ours"}}.get(kind, {})
        token = None if kind == "nobody" else served.token(kind, **scope)
        # Whoever has no token is refused everywhere.
        allowed = [each for each in every if kind in [*each.definition.raw.get("x-kinds", ()), "nobody"]]
        drawn = allowed if MINUTES else chance.sample(allowed, min(DRAWN, len(allowed)))

        generated = given(case=st.one_of([operation.as_strategy() for operation in drawn]))
        until = clock.monotonic() + 60 * MINUTES / len(KINDS)
        for number in count(1):
            seed(number if MINUTES else chance.getrandbits(32))(bounds(generated(answered(bot, token))))()
            if clock.monotonic() >= until:
                break
