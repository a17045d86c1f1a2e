"""Traces: the spans of an attempt, made from what the database has stored, once and only if the end was committed."""

import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from leasehold.errors import BadInput
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from bots.protocol import OpenSession, Session
from bots.sync import sessions
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.diagnostics import tracing
from schema.diagnostics.tracing import AttemptTracer, TracingSettings
from tests.support.http import Answer, gateway
from tests.support.patience import eventually
from tests.support.pool import Bot, Pool, answered, completed
from tests.support.requests import TRACE


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(pool: Pool, exporter: InMemorySpanExporter) -> Bot:
    """A bot whose gateway traces every attempt."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return pool.bot(sync_service=service(pool, AttemptTracer(provider)))


def service(pool: Pool, tracer: AttemptTracer | None) -> SyncService:
    return SyncService(
        pool.database, timing=pool.timing, fetch=FetchSettings(enabled=False), now=clock.monotonic, tracer=tracer
    )


def run_one(pool: Pool, bot: Bot, verdict: str = "succeeded") -> dict[str, Any]:
    (work,) = pool.given(bot)
    bot.sync(completed(work, verdict))
    return work


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The spans by name, of one attempt; none is left for the next call."""
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert len(found) == len(exporter.get_finished_spans())
    exporter.clear()
    return found


def times(span: ReadableSpan) -> tuple[int | None, int | None]:
    return span.start_time, span.end_time


def stored(*given: datetime) -> tuple[int, ...]:
    return tuple(round(each.timestamp() * 1_000_000) * 1000 for each in given)


def test_an_attempt_is_told_with_the_times_that_are_stored_below_the_callers_span(
    pool: Pool, traced: Bot, exporter: InMemorySpanExporter
) -> None:
    (job,) = pool.submit(metadata={"traceparent": TRACE})
    run_one(pool, traced)
    told = spans(exporter)
    assert {*told} == {"attempt", "wait", "placement", "run"}
    row, lease = pool.job(job), pool.row("SELECT * FROM leases")
    events = {event.move: event.at for event in pool.rows("SELECT move, at FROM job_events")}
    assert times(told["attempt"]) == stored(row.created_at, lease.ended_at)
    assert times(told["wait"]) == stored(events["submit"], max(events["submit"], lease.granted_at))
    assert times(told["placement"]) == stored(lease.granted_at, lease.acknowledged_at)
    assert times(told["run"]) == stored(lease.acknowledged_at, lease.ended_at)
    _, trace, parent, _ = TRACE.split("-")
    attempt = told.pop("attempt")
    assert attempt.parent is not None
    assert (f"{attempt.context.trace_id:032x}", f"{attempt.parent.span_id:016x}") == (trace, parent)
    assert {child.parent.span_id for child in told.values() if child.parent} == {attempt.context.span_id}
    assert attempt.attributes is not None
    assert attempt.attributes["leasehold.job"] == job
    assert (attempt.attributes["leasehold.verdict"], attempt.status.status_code) == ("succeeded", StatusCode.UNSET)
    placement = told["placement"].attributes
    assert placement is not None
    assert (placement["leasehold.bot"], placement["leasehold.assigner"]) == ("bot-1", "assigner:test")


def test_a_further_attempt_waits_from_its_return_to_the_queue_and_was_not_submitted_again(
    pool: Pool, traced: Bot, exporter: InMemorySpanExporter
) -> None:
    pool.submit(retry_failed=True)
    run_one(pool, traced, "failed")
    first = spans(exporter)
    assert first["attempt"].status.status_code is StatusCode.ERROR
    pool.change("UPDATE jobs SET schedule_after = now()")
    run_one(pool, traced)
    told = spans(exporter)
    assert {*told} == {"attempt", "wait", "placement", "run"}
    returned = pool.row("SELECT at FROM job_events WHERE move = 'retry'").at
    assert times(told["wait"])[0] == times(told["attempt"])[0] == stored(returned)[0]
    # Each attempt of a job without a trace of its own is a trace.
    assert first["attempt"].context.trace_id != told["attempt"].context.trace_id


def test_a_repeated_call_tells_nothing_again_and_one_that_is_undone_tells_nothing(
    pool: Pool, traced: Bot, exporter: InMemorySpanExporter
) -> None:
    pool.submit()
    (work,) = pool.given(traced)
    message = traced.message(completed(work))
    # The commit fails: nothing has ended.
    pool.change("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$")
    pool.change(
        "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON leases DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (NEW.ended_at IS NOT NULL) EXECUTE FUNCTION refuse()"
    )
    with pytest.raises(Exception, match="no"):
        answered(traced.sync_service, message)
    assert spans(exporter) == {}
    pool.change("DROP TRIGGER refuse ON leases")
    answered(traced.sync_service, message)
    assert "run" in spans(exporter)
    answered(traced.sync_service, message)
    assert spans(exporter) == {}
    pool.submit(metadata={"traceparent": f"{TRACE[:-2]}00"})
    run_one(pool, traced)
    assert spans(exporter) == {}, "its caller does not sample it"


@pytest.mark.parametrize("ends", ["expiry", "a new session", "leave"])
def test_an_attempt_that_ends_with_its_bots_session_is_told_once(
    pool: Pool, traced: Bot, exporter: InMemorySpanExporter, ends: str
) -> None:
    tracer = traced.sync_service.tracer
    (job,) = pool.submit()
    (work,) = pool.given(traced)
    if ends == "expiry":
        upkeep = pool.upkeep(tracer=tracer)
        upkeep.run_once()
        pool.change("UPDATE ticks SET grace_until = at")
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
        upkeep.run_once()
    elif ends == "a new session":
        request = OpenSession(bot=traced.session.bot)
        (opened,) = sessions.open_sessions(pool.database, [request], timing=pool.timing, tracer=tracer)
        assert isinstance(opened, Session)
    else:
        traced.sync(status="gone")
    told = spans(exporter)
    assert {"attempt", "wait", "placement"} <= {*told}
    attributes = told["attempt"].attributes
    assert attributes is not None
    assert attributes["leasehold.job"] == job
    assert attributes["leasehold.verdict"] == ("released" if ends == "leave" else "lost")
    assert times(told["attempt"])[1] == stored(pool.row("SELECT ended_at FROM leases").ended_at)[0]
    assert work["fence"] == attributes["leasehold.fence"]


def test_a_collector_receives_the_spans(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with gateway(lambda _: Answer()) as collector:
        tracer = AttemptTracer.to_collector(TracingSettings(endpoint=f"{collector.url}/v1/traces"))
        assert tracer is not None
        pool.submit()
        run_one(pool, pool.bot(sync_service=service(pool, tracer)))
        tracer.close()
        eventually(lambda: collector.asked)
    (resource,) = ExportTraceServiceRequest.FromString(collector.asked[0].raw).resource_spans
    assert {"service.name"} <= {each.key for each in resource.resource.attributes}
    assert {span.name for span in resource.scope_spans[0].spans} == {"attempt", "wait", "placement", "run"}


def test_a_collector_that_does_not_answer_holds_up_no_sync_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT", 1)
    tracer = AttemptTracer.to_collector(TracingSettings(endpoint="http://127.0.0.1:9/v1/traces"))
    assert tracer is not None
    (job,) = pool.submit()
    run_one(pool, pool.bot(sync_service=service(pool, tracer)))
    assert pool.job(job).state == "succeeded"
    tracer.close()


def test_nothing_of_opentelemetry_is_imported_where_no_endpoint_is_set() -> None:
    assert AttemptTracer.to_collector(TracingSettings()) is None
    check = "import sys, assigner.cli.main as m; m.sections(); import bots.sync.settle"
    check += "; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_without_the_packages_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BadInput, match=r"^tracing.endpoint: [^\n]*pip install 'leasehold\[tracing\]'$"):
        AttemptTracer.to_collector(TracingSettings(endpoint="http://127.0.0.1:4318/v1/traces"))
    with pytest.raises(ValueError, match="must be an http"):
        TracingSettings(endpoint="collector:4318")
