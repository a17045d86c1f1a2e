"""Random histories of several tenants: quotas come and go, minimums are reclaimed, bots are of cohorts and pools."""

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from assigner.cycle import PriorityAgeAssigner
from assigner.quotas import QuotaSettings
from assigner.tuning import AssignerSettings
from schema import clock, moves, quotas
from schema.errors import NotFound
from tests.ledger import Entry, Ledger
from tests.pool import Bot, Pool
from tests.tenancy import Tenancy, grown_too_far, watch_maxima
from tests.test_history import EXAMPLES_VARIABLE, TENANTS, History, has_workers

EXAMPLES, STEPS = 12, 40
#: Evictions count among the effective maximum for ever, and a job may be evicted at most twice.
EAGER = QuotaSettings(preemption_delay=0, max_evictions=2)
CLEAR = """
TRUNCATE quotas, evictions, reservations, grown_too_far;
DELETE FROM cohorts WHERE id <> 0;
INSERT INTO cohorts (id, name, labels, position, reclaim_min) VALUES (1, 'blue', '{blue}', 1, 'any');
INSERT INTO instances (name, pool) VALUES ('default', NULL), ('other', 'twins')"""
OVER = """
WITH over AS (UPDATE reservations SET until = now() - interval '1 s' RETURNING job_id)
UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE id IN (SELECT job_id FROM over)
    AND schedule_after IS NOT NULL"""
UNFOUNDED = """
SELECT v.job_id FROM reservations v JOIN jobs j ON j.id = v.job_id
WHERE j.state IN ('leased', 'running', 'cancelling') AND v.until > now()"""
COHORTS = st.sampled_from(["default", "default", "blue"])


class Tenants(Pool):
    """A pool with two cohorts and a bot pool: bot-1 is blue, bot-2 serves the pool `twins` or an instance."""

    def bot(self, name: str = "bot-1", **fields: Any) -> Bot:
        """A bot of its cohort or pool."""
        if name == "bot-1":
            fields["labels"] = ["blue"]
        elif name == "bot-2" and fields.get("instance") is None:
            fields["pool"] = "twins"
        return super().bot(name, **fields)

    def assigner(self, **fields: Any) -> PriorityAgeAssigner:
        """An assigner that preempts at once."""
        return PriorityAgeAssigner(
            self.database,
            AssignerSettings(**fields),
            timing=self.timing,
            chance=self.chance,
            name="assigner:test",
            now=clock.monotonic,
            quotas=EAGER,
        )


class TenantHistory(History):
    """All that any history does, with quotas on top."""

    evictions: list[int]

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.pool = Tenants(pool.database, pool.timing, random.Random(0))
        self.ledger = Ledger(self.pool)
        self.tenancy = Tenancy(self.pool)
        for statement in CLEAR.split(";"):
            self.pool.change(statement)

    def teardown(self) -> None:
        self.evictions.append(self.tenancy.evictions())

    @rule(cohort=COHORTS, instance=TENANTS, minimum=st.integers(0, 2), more=st.none() | st.integers(0, 3))
    def set_a_quota(self, cohort: str, instance: str, minimum: int, more: int | None) -> None:
        """Also one that is below what the instance has."""
        self.tenancy.quota(instance, cohort=cohort, minimum=minimum, maximum=None if more is None else minimum + more)

    @rule(cohort=COHORTS, instance=TENANTS)
    def remove_a_quota(self, cohort: str, instance: str) -> None:
        try:
            self.pool.database.run(lambda c: quotas.remove_quota(c, cohort, instance, actor="test"))
        except NotFound:
            return

    @rule(cohort=st.integers(0, 1))
    def assign_in_a_cohort(self, cohort: int) -> None:
        self.tenancy.cohort_assigner(cohort, EAGER).run_once()

    @precondition(has_workers)
    @rule(instance=TENANTS, cohort=COHORTS, units=st.integers(1, 2))
    def reclaim(self, instance: str, cohort: str, units: int) -> None:
        """Everything runs, and then an instance gets a minimum and has something urgent to run."""
        self.hand_out(started=True)
        self.tenancy.quota(instance, cohort=cohort, minimum=units + 1)
        request = {
            "instance": instance,
            "properties": {},
            "units": units,
            "priority": 1 if cohort == "blue" else -2,
            "max_attempts": 1,
            "retry_failed": False,
            "locality_hint": None,
            "payload": {"command": ["true"]},
        }
        (answer,) = self._submit([request])
        self.ledger.jobs[answer.public_id] = Entry(request)
        self.pool.assigner().run_once()

    @rule()
    def give_reservations_up(self) -> None:
        self.pool.change(OVER)
        self.pool.database.run(lambda connection: moves.expire_reservations(connection, 100))

    @invariant()
    def everything_is_in_order(self) -> None:
        """Also no usage has ever grown beyond what was allowed, and what is reserved is for jobs that wait."""
        super().everything_is_in_order()
        assert grown_too_far(self.pool) == []
        assert self.pool.rows(UNFOUNDED) == []

    def _submit(self, requests: list[dict[str, Any]]) -> list[moves.Submitted]:
        labels = [{"label": "blue"} if request["priority"] == 1 else {} for request in requests]
        return super()._submit([request | label for request, label in zip(requests, labels, strict=True)])


@pytest.mark.timeout(3600)  # a history that fails is shortened, which takes some minutes
def test_any_history_of_tenants_leaves_the_books_in_order(pool: Pool) -> None:
    """Some short histories; `LEASEHOLD_TEST_EXAMPLES=2000` runs so many for a longer look."""
    watch_maxima(pool)
    seen: list[int] = []

    class OnThisPool(TenantHistory):
        evictions = seen

        def __init__(self) -> None:
            super().__init__(pool)

    run_state_machine_as_test(
        OnThisPool,
        settings=settings(
            max_examples=int(os.environ.get(EXAMPLES_VARIABLE) or EXAMPLES),
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            database=None,
            phases=tuple(Phase) if EXAMPLES_VARIABLE in os.environ else (Phase.explicit, Phase.generate),
        ),
    )
    print(f"evictions in these histories: {sum(seen)}")
