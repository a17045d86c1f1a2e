"""Webhooks: deliveries are stored with their move, signed, sent at least once; and the overflow that they tell of."""

import hashlib
import hmac
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput
from prometheus_client import REGISTRY
from pydantic import SecretStr, ValidationError

from assigner.config import loading
from assigner.maintenance.overflow import OverflowController
from assigner.maintenance.webhooks import BATCH, DEFERRED, POLL_INTERVAL, Webhooks, WebhookSettings
from assigner.settings import PoolSettings
from schema import clock
from schema.policy import priority_classes
from schema.policy.priority_classes import Policy
from schema.policy.queue_limits import COUNT_WAITING
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.http import Answer, Gateway, ReceivedRequest, gateway
from tests.support.patience import MINUTE
from tests.support.plans import statements
from tests.support.pool import Pool
from tests.support.race import Race, cancel

SECRET = "a secret of the test"
STORED = "SELECT webhook, body, attempts, last_error, next_at > now() AS later FROM webhook_deliveries ORDER BY id"


@pytest.fixture
def endpoint() -> Iterator[Gateway]:
    """A receiver of deliveries, which takes them."""
    with gateway(lambda _: Answer()) as receiver:
        receiver.url += "/hook?x=1"
        yield receiver


def webhooks(pool: Pool, url: str, **fields: Any) -> Webhooks:
    settings = WebhookSettings(**{"name": "pager", "url": url, "secret": SecretStr(SECRET), **fields})
    return Webhooks(pool.database, [settings], chance=random.Random(1))


def put(pool: Pool, sender: Webhooks, count: int = 1) -> None:
    for nth in range(count):
        pool.database.run(lambda c, nth=nth: sender.put(c, DEFERRED, {"jobs": [str(nth)]}))  # type: ignore[misc]


def limited(pool: Pool, most: int | None) -> None:
    pool.database.run(lambda c: priority_classes.put_policy(c, Policy(max_queue_size=most), actor="test"))


def due(pool: Pool) -> None:
    """The wait after a failure is over."""
    pool.change("UPDATE webhook_deliveries SET next_at = now()")


def test_deferred_and_returned_jobs_are_told_of_with_a_signature(pool: Pool, endpoint: Gateway) -> None:
    sender = webhooks(pool, endpoint.url)
    limited(pool, 1)
    first, *rest = pool.submit(3, priority=99)
    pool.upkeep(webhooks=sender).run_once()
    assert sender.run_once() == POLL_INTERVAL
    limited(pool, None)
    pool.upkeep(webhooks=sender).run_once()
    sender.run_once()
    told = [asked.body for asked in endpoint.asked]
    assert [each["type"] for each in told] == ["jobs.deferred", "jobs.returned"]
    assert [sorted(each["data"]["jobs"]) for each in told] == [sorted(rest)] * 2
    assert told[0]["data"]["max_queue_size"] == 1
    assert first not in told[0]["data"]["jobs"]
    for asked in endpoint.asked:
        assert (asked.path, asked.query) == ("/hook", {"x": "1"})
        assert asked.headers["Leasehold-Delivery"] == asked.body["id"]
        signed = asked.headers["Leasehold-Timestamp"].encode() + b"." + asked.raw
        expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
        assert asked.headers["Leasehold-Signature"] == f"v1={expected}"
    assert told[0]["id"] != told[1]["id"]
    assert pool.rows(STORED) == []


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [(500, {}, "HTTP status 500"), (307, {"Location": "/elsewhere"}, "HTTP status 307")],
)
def test_what_was_not_taken_is_sent_again_later_with_the_same_id(
    pool: Pool, endpoint: Gateway, status: int, headers: dict[str, str], said: str
) -> None:
    sender = webhooks(pool, endpoint.url)
    put(pool, sender)
    endpoint.script = lambda _: Answer(status=status, headers=headers)
    sender.run_once()
    (row,) = pool.rows(STORED)
    assert (row.attempts, row.last_error, row.later) == (1, said, True)
    sender.run_once()
    assert len(endpoint.asked) == 1, "not before its time, and no redirect is followed"
    due(pool)
    endpoint.script = lambda _: Answer()
    sender.run_once()
    first, again = endpoint.asked
    assert (again.raw, again.path) == (first.raw, first.path)
    assert again.headers["Leasehold-Delivery"] == first.headers["Leasehold-Delivery"]
    assert pool.rows(STORED) == []


def test_the_wait_doubles_and_those_behind_a_failure_have_used_up_no_try(pool: Pool, endpoint: Gateway) -> None:
    sender = webhooks(pool, endpoint.url)
    put(pool, sender, 3)
    endpoint.script = lambda _: Answer(status=503)
    waits = []
    for _ in range(4):
        sender.run_once()
        left = pool.rows("SELECT extract(epoch FROM next_at - now())::float8 AS wait FROM webhook_deliveries")
        waits.append(max(row.wait for row in left))
        due(pool)
    assert all(0 < wait <= 5.0 * 2**nth for nth, wait in enumerate(waits))
    assert waits[3] > waits[0]
    assert [row.attempts for row in pool.rows(STORED)] == [4, 0, 0]


def test_an_endpoint_that_is_not_there_stops_nothing_else_and_without_one_nothing_is_stored(pool: Pool) -> None:
    sender, none = webhooks(pool, "http://127.0.0.1:1/"), Webhooks(pool.database, (), chance=random.Random(1))
    limited(pool, 1)
    pool.submit(2, priority=99)
    pool.upkeep(webhooks=sender).run_once()
    assert pool.row("SELECT count(*) AS jobs FROM jobs WHERE state = 'deferred'").jobs == 1
    sender.run_once()
    (row,) = pool.rows(STORED)
    assert (row.attempts, row.last_error.startswith("ConnectError: ")) == (1, True)
    pool.submit(2, priority=99)
    pool.upkeep(webhooks=none).run_once()
    assert (none.run_once(), len(pool.rows(STORED))) == (POLL_INTERVAL, 1)


def test_an_endpoint_that_answers_byte_by_byte_has_no_more_time_than_one_that_is_silent(pool: Pool) -> None:
    over = threading.Event()

    def dribble(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not over.wait(0.02):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=dribble, args=(listener,))
        thread.start()
        sender = webhooks(pool, f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=0.3)
        put(pool, sender)
        sender.run_once()
        over.set()
        thread.join()
    assert pool.row("SELECT last_error FROM webhook_deliveries").last_error == "no answer within 0.3 s"


def test_two_processes_do_not_send_one_delivery_at_once(pool: Pool, endpoint: Gateway) -> None:
    sender, other = webhooks(pool, endpoint.url), webhooks(pool, endpoint.url)
    put(pool, sender)

    def answer(_: ReceivedRequest) -> Answer:
        if len(endpoint.asked) == 1:
            other.run_once()
        return Answer()

    endpoint.script = answer
    sender.run_once()
    assert len(endpoint.asked) == 1


def test_a_process_that_died_while_it_sent_leaves_the_delivery_to_another(pool: Pool, endpoint: Gateway) -> None:
    sender, other = webhooks(pool, endpoint.url), webhooks(pool, endpoint.url)
    put(pool, sender)

    sender._database = Dying(pool.database)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        sender.run_once()
    other.run_once()
    assert len(endpoint.asked) == 1, "it still belongs to the first"
    due(pool)
    other.run_once()
    first, again = (asked.headers["Leasehold-Delivery"] for asked in endpoint.asked)
    assert first == again
    assert pool.rows(STORED) == []


class Dying:
    """A database of a process that dies once it has claimed deliveries."""

    def __init__(self, database: Any) -> None:
        self._database, self._runs = database, 0

    def run(self, work: Any) -> Any:
        self._runs += 1
        if self._runs > 2:
            raise KeyboardInterrupt
        return self._database.run(work)


def given_up(result: str) -> float | None:
    return REGISTRY.get_sample_value("leasehold_webhook_deliveries_total", {"webhook": "new", "result": result})


def test_the_oldest_are_given_up_when_too_many_wait_and_when_they_are_too_old(pool: Pool, endpoint: Gateway) -> None:
    sender = webhooks(pool, endpoint.url, max_queued=3, name="new")
    for result in ("expired", "dropped"):
        assert given_up(result) == 0.0, "an increase is seen only from a series on that is there before"
    put(pool, sender, 5)
    assert [row.body["data"]["jobs"] for row in pool.rows(STORED)] == [["2"], ["3"], ["4"]]
    pool.change("UPDATE webhook_deliveries SET expires_at = now() WHERE body->'data'->'jobs' ? '3'")
    sender.run_once()
    assert [asked.body["data"]["jobs"] for asked in endpoint.asked] == [["2"], ["4"]]
    assert (given_up("expired"), given_up("dropped")) == (1.0, 2.0)


def test_deliveries_of_a_webhook_that_is_gone_are_given_up_too(pool: Pool) -> None:
    put(pool, webhooks(pool, "http://localhost:1/"), 3)
    pool.change("UPDATE webhook_deliveries SET expires_at = now()")
    Webhooks(pool.database, [], chance=random.Random(1)).run_once()
    assert pool.rows(STORED) == []


def test_a_full_batch_is_followed_by_the_next_at_once(pool: Pool, endpoint: Gateway) -> None:
    sender = webhooks(pool, endpoint.url)
    put(pool, sender, BATCH + 1)
    assert [sender.run_once(), sender.run_once()] == [0.0, POLL_INTERVAL]
    assert len(endpoint.asked) == BATCH + 1


@pytest.mark.parametrize(
    "url",
    ["ftp://host/", "/path", "http://", "https://user:word@host/", "http://host:99999/", "http://a\nb/", "http://é/"],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        WebhookSettings(name="pager", url=url, secret=SecretStr(SECRET))


def test_the_secret_may_come_from_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "leasehold.toml"
    path.write_text('[[webhooks]]\nname = "pager"\nurl = "https://hooks.example.com/"\n')
    with pytest.raises(BadInput, match=r"webhooks\[0\]\.secret: is missing"):
        loading.load(path, PoolSettings, {})
    settings = loading.load(path, PoolSettings, {"LEASEHOLD_WEBHOOKS_0_SECRET": SECRET})
    assert settings.webhooks[0].secret.get_secret_value() == SECRET
    assert SECRET not in repr(settings)
    with pytest.raises(BadInput) as refused:
        loading.load(path, PoolSettings, {"LEASEHOLD_WEBHOOKS_0_SECRET": "short word"})
    assert "short word" not in str(refused.value)


# Overflow: while more jobs wait than may, the newest of the low level are deferred, and the oldest return first.


def states(pool: Pool) -> dict[str, int]:
    return {row.state: row.jobs for row in pool.rows("SELECT state, count(*) AS jobs FROM jobs GROUP BY state")}


def test_jobs_of_many_batches_are_deferred_newest_first_and_return_oldest_first(pool: Pool) -> None:
    limited(pool, 400)
    background = JobRequest(command=["true"], job_class="background").normal()
    for _ in range(4):
        pool.submit(200, priority=70)
        pool.submit(200, **background)
    upkeep = pool.upkeep()
    upkeep.run_once()
    assert states(pool) == {"queued": 400, "deferred": 1200}
    ids = "SELECT id FROM jobs WHERE state = :state ORDER BY queued_at, id"
    kept, off = ([row.id for row in pool.rows(ids, state=state)] for state in ("queued", "deferred"))
    assert max(kept) < min(off), "those that have waited longest go on waiting"
    pool.change(
        "WITH gone AS (UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE state = 'queued' RETURNING *)"
        " INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)"
        " SELECT id, 'cancel', 'queued', 'cancelled', fence, 'test' FROM gone"
    )
    pool.upkeep().run_once()
    assert states(pool) == {"cancelled": 400, "queued": 360, "deferred": 840}
    assert [row.id for row in pool.rows(ids, state="queued")] == off[:360]
    limited(pool, None)
    upkeep.run_once()
    assert states(pool) == {"cancelled": 400, "queued": 1200}


def test_nothing_is_deferred_that_is_not_low_or_that_somebody_may_join(pool: Pool) -> None:
    limited(pool, 2)
    pool.submit(3)
    pool.submit(3, priority=60)
    (shared,) = pool.submit(priority=99, dedup_key="k")
    pool.submit(**JobRequest(command=["true"], job_class="random").normal())
    (low,) = pool.submit(**JobRequest(command=["true"], job_class="auto_generated").normal())
    (last,) = pool.submit(priority=61)
    pool.upkeep().run_once()
    deferred = {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'deferred'")}
    assert deferred == {low, last}
    assert pool.job(shared).state == "queued"


def test_without_a_limit_nobody_counts_and_below_it_hardly_ever(pool: Pool) -> None:
    upkeep = pool.upkeep()

    def counted() -> int:
        with statements() as sent:
            upkeep.run_once()
        return sent.count(COUNT_WAITING.query.decode())

    pool.submit(20, priority=70)
    assert counted() == 0
    limited(pool, 30)
    assert counted() == 1
    pool.submit(9, priority=70)
    assert counted() == 0, "one more would still be within the limit"
    pool.submit(2, priority=70)
    assert counted() == 1
    assert states(pool) == {"queued": 30, "deferred": 1}


def test_who_listens_is_told_the_list_of_deferred_jobs(pool: Pool) -> None:
    limited(pool, 1)
    jobs = pool.submit(450, priority=70)
    with pool.database.connect() as listening:
        driver = listening.session
        driver.execute("LISTEN leasehold_deferred")
        driver.execute("SELECT pg_advisory_lock_shared(hashtext('leasehold.idle'), hashtext('deferred'))")
        pool.upkeep().run_once()
        told = [name for notice in driver.notifies(timeout=MINUTE, stop_after=3) for name in notice.payload.split(",")]
        driver.execute("SELECT pg_advisory_unlock_all()")
    assert sorted(told) == sorted(jobs[1:])


def test_deferred_jobs_are_counted_listed_explained_and_can_be_cancelled(pool: Pool, operator: httpx.Client) -> None:
    limited(pool, 1)
    _, one, other = pool.submit(3, priority=70)
    pool.upkeep().run_once()
    assert operator.get("/v1/status").json()["jobs"]["deferred"] == 2
    assert len(operator.get("/v1/jobs", params={"state": "deferred"}).json()["jobs"]) == 2
    told = operator.get(f"/v1/jobs/{one}/explain").json()
    sentences = [gate["sentence"] for gate in told["gates"] if gate["open"] is False]
    assert sentences[0] == "it is deferred (more jobs wait than may)"
    (done,) = cancel(pool, one)
    assert (done.state, done.changed) == ("cancelled", True)
    assert pool.history(one) == ["submit", "defer", "cancel"]
    limited(pool, None)
    pool.upkeep().run_once()
    assert (pool.history(other), pool.job(other).state) == (["submit", "defer", "return"], "queued")


def test_what_an_assigner_is_about_to_place_is_not_deferred(pool: Pool) -> None:
    limited(pool, 1)
    jobs = pool.submit(3, priority=70)

    def placing(connection: Connection) -> None:
        connection.execute(
            Statement("SELECT FROM jobs WHERE public_id = CAST(:id AS uuid) FOR NO KEY UPDATE"), {"id": jobs[2]}
        )
        pool.upkeep().run_once()

    pool.database.run(placing)
    assert [pool.job(job).state for job in jobs] == ["queued", "deferred", "queued"]
    pool.upkeep().run_once()
    assert [pool.job(job).state for job in jobs] == ["queued", "deferred", "deferred"]


@pytest.mark.conflicts
def test_two_processes_do_not_each_defer_what_is_too_much(pool: Pool, race: Race) -> None:
    limited(pool, 10)
    pool.submit(16, priority=70)

    def controller(of: Pool) -> OverflowController:
        return OverflowController(of.database, name="test", now=clock.monotonic)

    with race.first() as ahead:
        controller(ahead).run_once()
        race.unhindered(controller(pool).run_once, by=ahead)
        ahead.commit()
    controller(pool).run_once()
    assert states(pool) == {"queued": 10, "deferred": 6}
