"""Random histories over the real moves, on a real database, held against a model after every step.

Bots are of cohorts and pools, quotas of tenants come and go, and minimums are reclaimed.
"""

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from leasehold.errors import Conflict, NotFound

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.preemption.plan import QuotaSettings
from bots.protocol import LeaseReport
from schema.accounting import quotas
from schema.diagnostics import invariants
from schema.moves import submit as submit_moves
from schema.moves.preempt import release_kept_units
from schema.moves.sessions import close_overdue
from schema.moves.submit import Submitted
from schema.moves.waiting.backoff import promote
from schema.postgres.statements import Statement
from schema.validation import normal_properties
from tests.support.model import Entry, Ledger, Worker
from tests.support.pool import Bot, Pool, active, answered, completed, synced
from tests.support.race import ask_stop, cancel, drain, expire, retention
from tests.support.tenancy import Tenancy, grown_too_far, watch_maxima

EXAMPLES_VARIABLE = "LEASEHOLD_TEST_EXAMPLES"
STEPS = 40
CLEAR = """
TRUNCATE jobs, job_payloads, job_metadata, job_outputs, job_results, job_checkpoints, submit_keys, bots, bot_changes,
    bot_localities, lost_attempts, blames, kinds, kind_platforms, leases, stored_events, queues, platforms, instances,
    ticks, audit RESTART IDENTITY"""
SEED = Statement("SELECT setseed(0.25)")
EXPIRED = "UPDATE bots SET expires_at = now() - interval '1 s' WHERE name = :name AND status <> 'gone'"
OVERDUE = "UPDATE leases SET due_at = now() - interval '1 s' WHERE ended_at IS NULL"
LATER = "UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE schedule_after IS NOT NULL"

VERDICTS = ("succeeded", "failed", "error", "stopped", "released")
NAMES = st.sampled_from(["bot-0", "bot-1", "bot-2"])
TENANTS = st.sampled_from(["default", "other"])
PROPERTIES = st.sampled_from([{}, {"os": ["linux"]}, {"gpu": ["a", "b"], "os": ["linux"]}])
OFFERS = st.sampled_from([{}, {"os": "linux"}, {"os": "linux", "gpu": ["b", "a", "c"]}])
DEEDS = st.lists(st.sampled_from(["active", "active", "pending", "forget", *VERDICTS]), min_size=1, max_size=4)
STATUSES = st.sampled_from(["ok", "ok", "ok", "ok", "unhealthy", "draining", "gone"])
REQUESTS = st.fixed_dictionaries(
    {
        "instance": TENANTS,
        "properties": PROPERTIES,
        "units": st.integers(1, 2),
        "priority": st.integers(-1, 1),
        "max_attempts": st.integers(1, 3),
        "retry_failed": st.booleans(),
        "locality_hint": st.sampled_from([None, "hint"]),
        "payload": st.sampled_from([{"command": ["true"]}, {"command": ["false"], "env": {"A": "ü"}}]),
    }
)


INTERFERENCE = st.sampled_from(["promote", "expire", "ask stop", "close", "drain", "undrain", "undrain", "delete"])
SYNC: dict[str, Any] = {
    "deeds": DEEDS,
    "stale": st.integers(0, 99),
    "status": STATUSES,
    "capacity": st.none() | st.integers(0, 4),
}
#: Evictions count among the effective maximum for ever, and a job may be evicted at most twice.
PATIENT = QuotaSettings(preemption_delay=0, max_evictions=2)
CLEAR_TENANTS = """
TRUNCATE quotas, evictions, grown_too_far;
DELETE FROM cohorts WHERE id <> 0;
INSERT INTO cohorts (id, name, labels, position, reclaim_min) VALUES (1, 'blue', '{blue}', 1, 'any');
INSERT INTO instances (name, pool) VALUES ('default', NULL), ('other', 'twins')"""
OVER = "UPDATE bots SET kept_until = now() - interval '1 s' WHERE kept_units > 0"
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
        return super().assigner(**{"quotas": PATIENT, **fields})


def has_workers(history: Any) -> bool:
    """Whether any bot has a session."""
    return bool(history.ledger.workers)


class History(RuleBasedStateMachine):
    """Callers, bots, assigners, upkeep and operators, one step at a time; quotas come and go."""

    def __init__(self, pool: Pool, evictions: list[int]) -> None:
        super().__init__()
        pool.change(CLEAR)
        for urgent in (False, True):
            pool.database.run(lambda connection: connection.execute(SEED), urgent=urgent)
        for statement in CLEAR_TENANTS.split(";"):
            pool.change(statement)
        self.pool, self.evictions = Tenants(pool.database, pool.timing, random.Random(0)), evictions
        self.ledger, self.tenancy = Ledger(self.pool), Tenancy(self.pool)

    def teardown(self) -> None:
        self.evictions.append(self.tenancy.evictions())

    @initialize(requests=st.lists(REQUESTS, min_size=2, max_size=6), fill=st.booleans())
    def begin(self, requests: list[dict[str, Any]], fill: bool) -> None:
        """Some work, and a bot that may have all of it, so that short histories have something to go wrong."""
        self.submit(requests)
        self.open_session("bot-0", {"os": "linux", "gpu": ["a", "b"]}, 4, None, fill)

    # --- callers

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=3))
    def submit(self, requests: list[dict[str, Any]]) -> None:
        for request, answer in zip(requests, self._submit(requests), strict=True):
            assert answer.created
            self.ledger.jobs[answer.public_id] = Entry(request)

    @rule(request=REQUESTS, key=st.sampled_from(["a", "b", "c"]), times=st.integers(1, 2))
    def submit_with_a_key(self, request: dict[str, Any], key: str, times: int) -> None:
        self._submit_keyed(request, key, times)

    @precondition(lambda self: self.ledger.keys)
    @rule(nth=st.integers(0, 9), other=st.booleans())
    def submit_a_key_again(self, nth: int, other: bool) -> None:
        (_, key), (_, asked) = _pick(list(self.ledger.keys.items()), nth)
        request = dict(asked)
        if other:
            request["units"] += 1
        self._submit_keyed(request, key, 1)

    @precondition(lambda self: self.ledger.jobs)
    @rule(picks=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def cancel(self, picks: list[int]) -> None:
        jobs = list(dict.fromkeys(_pick(list(self.ledger.jobs), nth) for nth in picks))
        before = {job: self.ledger.jobs[job].state for job in jobs}
        for answer in cancel(self.pool, *jobs):
            was = before[answer.public_id]
            assert answer.changed == (was in ("queued", "leased", "running"))
            now = {"queued": "cancelled", "leased": "cancelling", "running": "cancelling"}.get(was, was)
            assert answer.state == now
            self.ledger.jobs[answer.public_id].cancelled |= answer.changed

    # --- assigners and upkeep

    @rule(batch=st.integers(1, 5), urgent=st.booleans())
    def assign(self, batch: int, urgent: bool) -> None:
        self.pool.assigner(batch=batch, priority_percentage=100 * urgent).run_once()

    @rule(started=st.booleans())
    def hand_out(self, started: bool) -> None:
        """The usual course: what waits is assigned, and the bots hear of it, or have begun with it."""
        self.pool.assigner().run_once()
        for name, worker in self.ledger.workers.items():
            for _ in range(0 if name in self.ledger.closing else 1 + started):
                told = [active({"job": job, "fence": fence}) for job, fence in worker.beliefs]
                worker.message = worker.bot.message(*told)
                self._answered(worker)

    @rule(what=INTERFERENCE, name=NAMES)
    def interfere(self, what: str, name: str) -> None:
        """What only time, upkeep or an operator does. One rule, so that it does not crowd out the work itself."""
        match what:
            case "promote":
                self.pool.change(LATER)
                self.pool.database.run(lambda connection: promote(connection, 100))
            case "expire":
                self.pool.change(EXPIRED, name=name)
                expire(self.pool)
                self.ledger.bury(name)
            case "ask stop" | "close":
                self.pool.change(OVERDUE)
                if what == "close":
                    self.ledger.closing |= set(self.pool.database.run(lambda c: close_overdue(c, 100)))
                ask_stop(self.pool)
                ask_stop(self.pool, from_state="active", reason="timeout")
            case "drain" | "undrain" if name in self.ledger.workers:
                drain(self.pool, draining=what == "drain", bot=name)
                self.ledger.drained = (self.ledger.drained | {name}) - ({name} if what == "undrain" else set())
            case "delete":
                assert retention(self.pool) == self.ledger.forget()

    # --- tenants

    @rule(cohort=COHORTS, instance=TENANTS, minimum=st.integers(0, 2), more=st.none() | st.integers(0, 3))
    def set_a_quota(self, cohort: str, instance: str, minimum: int, more: int | None) -> None:
        """Also one that is below what the instance has."""
        self.tenancy.quota(instance, cohort=cohort, minimum=minimum, maximum=None if more is None else minimum + more)

    @rule(cohort=COHORTS, instance=TENANTS)
    def remove_a_quota(self, cohort: str, instance: str) -> None:
        try:
            self.pool.database.run(lambda c: quotas.remove_quotas(c, [(cohort, instance)], actor="test"))
        except NotFound:
            return

    @rule(cohort=st.integers(0, 1))
    def assign_in_a_cohort(self, cohort: int) -> None:
        self.tenancy.cohort_assigner(cohort, PATIENT).run_once()

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
    def release_kept_units(self) -> None:
        self.pool.change(OVER)
        self.pool.database.run(lambda connection: release_kept_units(connection, 100))

    # --- bots

    @rule(name=NAMES, offer=OFFERS, capacity=st.integers(0, 4), instance=st.none() | TENANTS, fill=st.booleans())
    def open_session(self, name: str, offer: dict[str, Any], capacity: int, instance: str | None, fill: bool) -> None:
        self.ledger.bury(name)
        sync_service = self.pool.sync_service(to_capacity=fill)
        bot = self.pool.bot(name, sync_service=sync_service, properties=offer, capacity=capacity, instance=instance)
        self.ledger.workers[name] = Worker(bot)

    def _sync(self, nth: int, deeds: list[str], stale: int, status: str, capacity: int | None) -> None:
        name, worker = _pick(list(self.ledger.workers.items()), nth)
        told = dict(zip(worker.beliefs, _cycle(deeds), strict=False))
        on_its_way = self.ledger.pending()
        kept = {
            lease
            for lease, deed in told.items()
            if deed in ("active", "pending") or (deed == "forget" and lease in on_its_way)
        }
        reports = [report for report in (self._report(*each) for each in told.items()) if report is not None]
        reports += self._stale(worker, stale)
        worker.message = worker.bot.message(*reports, status=status, capacity=capacity, wait=stale % 2)
        if name in self.ledger.closing:
            _refused(worker, "session_over")
            return
        self._answered(worker)
        if status == "gone":
            self.ledger.bury(name)
        else:
            assert kept == told.keys() & worker.beliefs.keys(), "a lease ends when its bot says so, and only then"

    # Twice, because the choice of rules favours neither the work nor the bots.
    @precondition(has_workers)
    @rule(**SYNC)
    def sync(self, **how: Any) -> None:
        self._sync(0, **how)

    @precondition(has_workers)
    @rule(nth=st.integers(0, 2), **SYNC)
    def sync_any(self, nth: int, **how: Any) -> None:
        self._sync(nth, **how)

    @precondition(lambda self: any(worker.answer for worker in self.ledger.workers.values()))
    @rule(nth=st.integers(0, 2))
    def repeat_the_last_call(self, nth: int) -> None:
        name, worker = _pick([item for item in self.ledger.workers.items() if item[1].answer], nth)
        if name in self.ledger.closing:
            _refused(worker, "session_over")
        else:
            told = set(worker.beliefs)
            self._answered(worker)
            assert told <= worker.beliefs.keys(), "its report has ended nothing a second time"

    @precondition(lambda self: self.ledger.ghosts)
    @rule(nth=st.integers(0, 9))
    def hear_from_a_session_that_is_over(self, nth: int) -> None:
        worker = _pick(self.ledger.ghosts, nth)
        reports = [completed({"job": job, "fence": fence}, exit_code=-1) for job, fence in worker.beliefs]
        worker.message = worker.bot.message(*reports)
        _refused(worker, "session_over", "session_superseded")

    # --- what always holds

    @invariant()
    def everything_is_in_order(self) -> None:
        assert [finding for finding in invariants.verify(self.pool.database) if finding.rows] == []
        self.ledger.check()
        assert grown_too_far(self.pool) == [], "a usage has grown beyond what was allowed"

    # --- how

    def _submit(self, requests: list[dict[str, Any]]) -> list[Submitted]:
        normal = [
            request
            | {"properties": normal_properties("properties", request["properties"])}
            | ({"label": "blue"} if request["priority"] == 1 else {})
            for request in requests
        ]
        return self.pool.database.run(lambda connection: submit_moves.submit(connection, normal, actor="test"))

    def _submit_keyed(self, request: dict[str, Any], key: str, times: int) -> None:
        known, asked = self.ledger.keys.get((request["instance"], key), (None, request))
        if asked != request:
            with pytest.raises(Conflict, match=f"'{key}'"):
                self._submit([request | {"key": key}] * times)
            return
        answers = self._submit([request | {"key": key}] * times)
        assert len({answer.public_id for answer in answers}) == 1
        assert len(answers) == times
        assert sum(answer.created for answer in answers) == (known is None)
        if known is None:
            self.ledger.jobs[answers[0].public_id] = Entry(request)
            self.ledger.keys[request["instance"], key] = answers[0].public_id, request
        else:
            assert answers[0].public_id == known

    def _report(self, lease: tuple[str, int], deed: str) -> LeaseReport | None:
        work = dict[str, Any](job=lease[0], fence=lease[1])
        if deed == "forget":
            return None
        if deed == "active":
            return active(work)
        if deed == "pending":
            return LeaseReport(**work, state="pending")
        self.ledger.exit_codes[lease] = len(self.ledger.exit_codes)
        return completed(work, deed, exit_code=self.ledger.exit_codes[lease])

    def _stale(self, worker: Worker, nth: int) -> list[LeaseReport]:
        """Results that must not count: for a lease that is not the bot's any more, and with fences around its own."""
        leases = [lease for lease in self.ledger.offered if lease not in worker.beliefs]
        wrong = [_pick(leases, nth)] if leases else []
        if worker.beliefs and nth % 3 == 0:
            job, fence = _pick(list(worker.beliefs), nth)
            wrong += [(job, fence - 1), (job, fence + 1), (job, 0)]
        told = dict.fromkeys(wrong)  # a report names a lease once
        return [completed({"job": job, "fence": fence}, exit_code=-1) for job, fence in told]

    def _answered(self, worker: Worker) -> None:
        worker.answer = answered(worker.bot.sync_service, worker.message)
        said = json.loads(worker.answer)
        assert said["drain"] == (worker.bot.session.bot in self.ledger.drained) or worker.message.status == "gone"
        works = said["leases"]
        worker.beliefs = {(work["job"], work["fence"]): work["state"] for work in works}
        self.ledger.offered += [lease for lease in worker.beliefs if lease not in self.ledger.offered]


def _pick(things: Any, nth: int) -> Any:
    return things[nth % len(things)]


def _cycle(deeds: list[str]) -> Iterator[str]:
    while True:
        yield from deeds


def _refused(worker: Worker, *codes: str) -> None:
    with pytest.raises(Conflict) as refused:
        synced(worker.bot.sync_service, worker.message)
    assert refused.value.code in codes


@pytest.mark.long
@pytest.mark.timeout(3600)  # a history that fails is shortened, which takes some minutes
def test_any_history_leaves_the_books_in_order(pool: Pool) -> None:
    """Some short histories; `LEASEHOLD_TEST_EXAMPLES=2000` runs that number for a longer look."""
    watch_maxima(pool)
    evictions: list[int] = []
    longer = os.environ.get(EXAMPLES_VARIABLE)
    run_state_machine_as_test(
        lambda: History(pool, evictions),
        settings=settings(
            max_examples=int(longer or 12),
            stateful_step_count=STEPS,
            print_blob=True,
            # Making a failure smaller takes minutes; it is done where somebody asks for a longer look.
            phases=tuple(Phase) if longer else (Phase.explicit, Phase.generate),
        ),
    )
    print(f"evictions in these histories: {sum(evictions)}")
