"""Traces: spans of each attempt that ends, for a collector of OpenTelemetry. Off unless `tracing.endpoint` is set.

All spans of an attempt are made in one place, when it ends, from the times that the database has stored:

attempt    from the entry into the queue to the end of the lease; its parent is the job's metadata `traceparent`
  submit     the transaction that stored the job, from its begin to its event; only below the first attempt of a job
  wait       in the queue: from the last entry into it to the grant
  placement  from the grant to the moment at which the bot began
  run        from there to the end

The process whose transaction ended the attempt exports them after the commit, so an attempt is told once. That is the
gateway if the bot reported the end, left or began a new session; an assigner process if its session expired.
What a collector cannot take is dropped: it never holds up a sync call. This module imports OpenTelemetry only where
tracing is on.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Self

from leasehold.errors import BadInput
from pydantic import BaseModel, ConfigDict, Field, field_validator

from schema import validation
from schema.moves.end import EndedAttempt
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

#: Seconds that one export may take, and the most spans that wait for theirs; further ones are dropped.
EXPORT_TIMEOUT, MAX_WAITING = 5.0, 8192

# The newest lease of each job is the one that has just ended: in this transaction the job was granted to nobody since.
# Events of a job are ordered by their ids.
ATTEMPTS = Statement("""
SELECT j.public_id::text AS job, i.name AS instance, j.created_at, coalesce(c.name, 'default') AS cohort, l.fence,
    l.granted_at, l.acknowledged_at, l.ended_at, l.assigner, l.strategy, l.units, b.name AS bot, l.first,
    m.value AS parent, coalesce(q.at, j.created_at) AS queued_at
FROM unnest(CAST(:jobs AS bigint[])) AS w (id)
CROSS JOIN LATERAL (SELECT * FROM jobs WHERE id = w.id OFFSET 0) j
JOIN instances i ON i.id = j.instance
CROSS JOIN LATERAL (
    SELECT *, NOT EXISTS (SELECT FROM leases o WHERE o.job_id = w.id AND o.fence < l.fence) AS first FROM leases l
    WHERE job_id = w.id ORDER BY job_id DESC, fence DESC LIMIT 1) l
LEFT JOIN cohorts c ON c.id = l.cohort
LEFT JOIN LATERAL (SELECT name FROM bots WHERE id = l.bot_id OFFSET 0) b ON true
LEFT JOIN job_metadata m ON m.job_id = w.id AND m.key = :key
LEFT JOIN LATERAL (
    SELECT id FROM job_events WHERE job_id = w.id AND to_state = 'leased' AND fence = l.fence ORDER BY id LIMIT 1) g
    ON true
LEFT JOIN LATERAL (
    SELECT at FROM job_events
    WHERE job_id = w.id AND id < g.id AND to_state = 'queued' AND from_state IS DISTINCT FROM 'queued'
    ORDER BY id DESC LIMIT 1) q ON true
""")


class TracingSettings(BaseModel):
    """Where gateways and assigner processes send spans.

    endpoint: URL of a collector that takes OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; None = no traces.
    ratio: share of the attempts that are traced if their jobs have no `traceparent`, 0 to 1. If they have, its flag
        decides. Half the ratio halves what is sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    endpoint: str | None = Field(default=None, max_length=2000)
    ratio: float = Field(default=1.0, ge=0, le=1)

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, given: str | None) -> str | None:
        if given is not None and not given.startswith(("http://", "https://")):
            raise ValueError("must be an http:// or https:// URL")
        return given


class AttemptTracer:
    """Makes the spans of ended attempts. provider: where the spans go."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("leasehold")

    @classmethod
    def to_collector(cls, settings: TracingSettings) -> Self | None:
        """Return the tracer that these settings ask for; None if they ask for none. Raises BadInput without the
        packages."""
        if settings.endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ImportError:
            raise BadInput(
                "tracing.endpoint", "traces need packages of OpenTelemetry; run: pip install 'leasehold[tracing]'"
            ) from None
        provider = TracerProvider(
            resource=Resource.create({"service.name": "leasehold"}), sampler=ParentBasedTraceIdRatio(settings.ratio)
        )
        exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_TIMEOUT)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
        return cls(provider)

    def trace(self, connection: Connection, ended: Sequence[EndedAttempt]) -> None:
        """Make the spans of attempts that have ended in this transaction, once it has been committed.

        They are sent in the background. Nothing is made if the transaction is undone.
        """
        if not ended:
            return
        outcomes = {attempt.public_id: (attempt.verdict.value, attempt.state) for attempt in ended}
        wanted = {"jobs": [attempt.job_id for attempt in ended], "key": validation.TRACEPARENT}
        rows = connection.execute(ATTEMPTS, wanted).all()

        def make() -> None:
            for row in rows:
                self._spans(row, *outcomes[row.job])

        connection.on_commit(make)

    def close(self) -> None:
        """Send what waits, within seconds, and stop."""
        self._provider.shutdown()

    def _spans(self, row: Row, verdict: str, state: str) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if row.parent is None else {validation.TRACEPARENT: row.parent}
        began = row.created_at if row.first else row.queued_at
        attempt = self._tracer.start_span(
            "attempt",
            TraceContextTextMapPropagator().extract(carrier),
            start_time=_nanoseconds(began),
            attributes={
                "leasehold.job": row.job,
                "leasehold.instance": row.instance,
                "leasehold.cohort": row.cohort,
                "leasehold.fence": row.fence,
                "leasehold.units": row.units,
                "leasehold.verdict": verdict,
                "leasehold.state": state,
            },
        )
        inside = set_span_in_context(attempt)

        def child(name: str, start: datetime, end: datetime, **attributes: str) -> "Span":
            told = {f"leasehold.{key}": value for key, value in attributes.items()}
            span = self._tracer.start_span(name, inside, start_time=_nanoseconds(start), attributes=told)
            span.end(_nanoseconds(max(start, end)))
            return span

        child("wait", row.queued_at, row.granted_at)
        started = row.acknowledged_at or row.ended_at
        child("placement", row.granted_at, started, assigner=row.assigner, strategy=row.strategy, bot=row.bot or "")
        if row.acknowledged_at is not None:
            child("run", started, row.ended_at, bot=row.bot or "")
        if verdict != "succeeded":
            attempt.set_status(Status(StatusCode.ERROR, f"{verdict}, the job is {state}"))
        attempt.end(_nanoseconds(max(began, row.ended_at)))


def _nanoseconds(time: datetime) -> int:
    return round(time.timestamp() * 1_000_000) * 1000
