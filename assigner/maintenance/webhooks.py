"""Webhooks: signed HTTP requests that tell other systems which jobs were deferred and which returned to the queue.

A delivery is stored in the transaction of the move that it tells of, so it is sent if and only if the move has been
made. A loop of its own sends deliveries, outside of any transaction, and nothing else waits for it. Any process may
send any delivery. One whose outcome is unknown is sent again, with the same id and the same body.
"""

import asyncio
import hmac
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from assigner import metrics
from schema.fields import Name
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement

if TYPE_CHECKING:
    import httpx

#: The events, as the field `type` of the body names them.
DEFERRED, RETURNED = "jobs.deferred", "jobs.returned"
#: Seconds between two looks for deliveries that are due.
POLL_INTERVAL = 5.0
#: The most deliveries that one look sends to one webhook, and the most that it gives up.
BATCH, EXPIRED_BATCH = 10, 500
#: Seconds for which a delivery belongs to the process that has claimed it, beyond the timeouts of its batch.
CLAIM_SLACK = 30.0
#: Bounds in seconds of the wait after a failed try: it doubles each time, and a random part of up to half is left out.
RETRY_FIRST, RETRY_LAST = 5.0, 3600.0
#: Least length of a secret in characters.
LEAST_SECRET = 16

PUT = Statement("""
INSERT INTO webhook_deliveries (webhook, body, public_id, expires_at)
SELECT w.name, jsonb_build_object('id', w.id, 'type', CAST(:type AS text), 'at', now(), 'data', CAST(:data AS jsonb)),
    w.id, now() + make_interval(secs => w.max_age)
FROM (SELECT u.name, u.max_age, gen_random_uuid() AS id
      FROM unnest(CAST(:names AS text[]), CAST(:ages AS float8[])) AS u (name, max_age) OFFSET 0) w
""")
# The newest are kept. Deliveries that another process is claiming may stay a little longer.
TRIM = Statement("""
DELETE FROM webhook_deliveries WHERE id = ANY (ARRAY(
    SELECT id FROM webhook_deliveries WHERE webhook = :name AND id <= (
        SELECT id FROM webhook_deliveries WHERE webhook = :name ORDER BY id DESC OFFSET :most LIMIT 1)
    ORDER BY id FOR UPDATE SKIP LOCKED))
""")
CLAIM = Statement("""
UPDATE webhook_deliveries d SET attempts = d.attempts + 1, next_at = now() + make_interval(secs => :held)
FROM (SELECT id FROM webhook_deliveries WHERE webhook = :name AND next_at <= now() AND expires_at > now()
      ORDER BY next_at, id LIMIT :limit FOR UPDATE SKIP LOCKED) due
WHERE d.id = due.id
RETURNING d.id, d.public_id::text, d.body::text, d.attempts, extract(epoch FROM now())::bigint AS at
""")
SENT = Statement("DELETE FROM webhook_deliveries WHERE id = :id")
FAILED = Statement("""
UPDATE webhook_deliveries SET last_error = :error, next_at = now() + make_interval(secs => :wait) WHERE id = :id
""")
RELEASED = Statement("""
UPDATE webhook_deliveries SET attempts = attempts - 1, next_at = now() + make_interval(secs => :wait)
WHERE id = ANY (CAST(:ids AS bigint[]))
""")
EXPIRED = Statement("""
DELETE FROM webhook_deliveries WHERE id = ANY (ARRAY(
    SELECT id FROM webhook_deliveries WHERE expires_at <= now() ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED))
RETURNING webhook, last_error
""")

log = structlog.get_logger()


class WebhookSettings(BaseModel):
    """An HTTP endpoint that is told of deferred and returned jobs.

    url: where each delivery is sent by POST; redirects are not followed.
    secret: key of the signature, at least 16 characters.
    timeout: seconds that a delivery may take, from connecting to the end of the answer's header. Doubling it tolerates
        slower endpoints, and other deliveries wait twice as long for one that hangs.
    max_age: seconds after which a delivery that has not succeeded is given up. Doubling it survives longer outages.
    max_queued: deliveries that may wait; beyond it the oldest are given up. Doubling it doubles the room they take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    url: str = Field(max_length=2000)
    secret: SecretStr = Field(min_length=LEAST_SECRET, max_length=1000)
    timeout: float = Field(default=10.0, gt=0, le=60)
    max_age: float = Field(default=86400.0, ge=60, le=30 * 86400)
    max_queued: int = Field(default=1000, ge=1, le=100_000)

    @field_validator("url")
    @classmethod
    def _url_is_http(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or not url.isascii() or not url.isprintable():
            raise ValueError("is not an http:// or https:// URL")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not hold a user or a password: the signature says who sends")
        return url


@dataclass(frozen=True)
class Delivery:
    """A claimed delivery. attempts: tries, with this one. at: the database's time of the claim, seconds since 1970."""

    id: int
    public_id: str
    body: str
    attempts: int
    at: int


def signature(secret: str, *, at: int, body: str) -> str:
    """Return the value of the header `Leasehold-Signature` for this body, sent `at` seconds since 1970."""
    return "v1=" + hmac.new(secret.encode(), f"{at}.{body}".encode(), "sha256").hexdigest()


class Webhooks:
    """Stores deliveries for the webhooks of one process, and sends those that are due."""

    def __init__(self, database: Database, settings: Sequence[WebhookSettings], *, chance: random.Random) -> None:
        self._database, self._chance = database, chance
        self.reconfigure(settings)

    def reconfigure(self, settings: Sequence[WebhookSettings]) -> None:
        """Use these webhooks from now on. Deliveries for others wait until they are too old."""
        self._settings = settings
        for each in settings:
            # From 0 on: `increase` sees no first one if the series begins with it.
            for result in ("sent", "failed", "expired", "dropped"):
                metrics.WEBHOOKS.labels(webhook=each.name, result=result)

    def put(self, connection: Connection, event: str, data: Mapping[str, object]) -> None:
        """Store a delivery of this event for each webhook, in the transaction of the move that it tells of."""
        settings = self._settings
        if not settings:
            return
        values = {"names": [each.name for each in settings], "ages": [each.max_age for each in settings]}
        connection.execute(PUT, {**values, "type": event, "data": json.dumps(data)})
        for each in settings:
            dropped = connection.execute(TRIM, {"name": each.name, "most": each.max_queued}).rowcount
            if dropped:
                metrics.WEBHOOKS.labels(webhook=each.name, result="dropped").inc(dropped)
                log.error("deliveries are given up because too many wait", webhook=each.name, deliveries=dropped)

    def run_once(self) -> float:
        """Send what is due, and give up what is too old; returns the seconds until the next look."""
        expired = self._give_up()
        full = [self._send_due(each) == BATCH for each in self._settings]
        return 0.0 if any(full) or expired == EXPIRED_BATCH else POLL_INTERVAL

    def _give_up(self) -> int:
        """Delete deliveries that are too old, also of webhooks that there are no more; returns how many."""
        rows = self._database.run(lambda connection: connection.execute(EXPIRED, {"limit": EXPIRED_BATCH}).all())
        errors = {row.webhook: row.last_error for row in rows}
        for webhook, count in Counter(row.webhook for row in rows).items():
            metrics.WEBHOOKS.labels(webhook=webhook, result="expired").inc(count)
            error = errors[webhook]
            log.error(
                "deliveries are given up because they are too old", webhook=webhook, deliveries=count, error=error
            )
        return len(rows)

    def _send_due(self, webhook: WebhookSettings) -> int:
        """Send a batch to one webhook, up to the first that fails; returns how many succeeded."""
        values = {"name": webhook.name, "limit": BATCH, "held": BATCH * 4 * webhook.timeout + CLAIM_SLACK}
        claimed = sorted(
            self._database.run(lambda connection: [Delivery(*row) for row in connection.execute(CLAIM, values)]),
            key=lambda each: each.id,
        )
        return asyncio.run(self._send(webhook, claimed)) if claimed else 0

    async def _send(self, webhook: WebhookSettings, claimed: Sequence[Delivery]) -> int:
        """Send these deliveries one after the other. A coroutine, because asyncio can limit the time of a whole call:
        with a limit for each read alone, an endpoint could answer byte by byte for ever."""
        import httpx  # every process reads the settings of webhooks, but few have a delivery to send

        # What the environment says of proxies and credentials is not meant for webhooks.
        async with httpx.AsyncClient(timeout=None, follow_redirects=False, trust_env=False) as client:
            for nth, delivery in enumerate(claimed):
                error = await _post(client, webhook, delivery)
                if error is not None:
                    self._failed(webhook, delivery, error, rest=claimed[nth + 1 :])
                    return nth
                done = delivery.id
                self._database.run(lambda connection, done=done: connection.execute(SENT, {"id": done}))  # type: ignore[misc]
                metrics.WEBHOOKS.labels(webhook=webhook.name, result="sent").inc()
        return len(claimed)

    def _failed(self, webhook: WebhookSettings, delivery: Delivery, error: str, *, rest: Sequence[Delivery]) -> None:
        """Put off the delivery that failed, and for as long those behind it, which have not been sent."""
        longest = min(RETRY_LAST, RETRY_FIRST * 2.0 ** min(delivery.attempts - 1, 30))
        wait = longest * self._chance.uniform(0.5, 1.0)

        def work(connection: Connection) -> None:
            connection.execute(FAILED, {"id": delivery.id, "error": error, "wait": wait})
            connection.execute(RELEASED, {"ids": [each.id for each in rest], "wait": wait})

        self._database.run(work)
        metrics.WEBHOOKS.labels(webhook=webhook.name, result="failed").inc()
        log.warning("a delivery failed", webhook=webhook.name, attempts=delivery.attempts, error=error, retry=wait)


async def _post(client: "httpx.AsyncClient", webhook: WebhookSettings, delivery: Delivery) -> str | None:
    """Send one delivery; returns why it failed, None if the endpoint has taken it."""
    import httpx

    headers = {
        "Content-Type": "application/json",
        "Leasehold-Delivery": delivery.public_id,
        "Leasehold-Timestamp": str(delivery.at),
        "Leasehold-Signature": signature(webhook.secret.get_secret_value(), at=delivery.at, body=delivery.body),
    }
    try:
        # The answer's body is not read, however long it is.
        async with (
            asyncio.timeout(webhook.timeout),
            client.stream("POST", webhook.url, content=delivery.body.encode(), headers=headers) as answer,
        ):
            return None if answer.is_success else f"HTTP status {answer.status_code}"
    except TimeoutError:
        return f"no answer within {webhook.timeout:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return escaped(f"{type(error).__name__}: {error}", 200)
