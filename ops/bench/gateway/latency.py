"""Measure how long a job waits in an idle pool: from its submit to its lease, and to the bot that runs it.

Real processes run on a private PostgreSQL with its default durability: one assigner, one gateway, and one idle bot in a
long poll over HTTP. A sample starts with the submit, by the function that a gateway calls for one job, while all
processes sleep. With wake-ups off, which replaces the database function `wake` by one that never notifies, the waits
are bounded by the polls instead.

With `--starts` it also measures how late jobs start that are asked to start at so many instants; none may be early.

    python -m ops.bench.gateway.latency [--samples 200] [--polled 30] [--starts 10000] [--json]
"""

import json
import os
import queue
import random
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
import psycopg
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from assigner.cycle.settings import AssignerSettings
from assigner.process.children import Child, Children, Role
from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync, SyncAnswer
from ops.bench.measure import blank_table, checked
from schema import clock
from schema.moves.submit import submit, submit_alone
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.timing import Timing

READY_WITHIN = 60.0
#: Seconds after which a sample without a result fails the benchmark.
SAMPLE_WITHIN = 30.0
BOT = "bench-1"
#: Jobs a second that are asked to start, and the units of the bot.
STARTS_RATE, UNITS = 100, 100
#: Seconds between two reads of the lease while wake-ups are off; short against the poll that is measured.
LOOK = 0.002
SILENCE = Statement("""
CREATE OR REPLACE FUNCTION leasehold.wake(topic text, keys text DEFAULT '') RETURNS boolean
LANGUAGE sql AS $$ SELECT false $$
""")
LEASED = "SELECT 1 FROM leasehold.leases WHERE job_id = %s"
# A job that has begun keeps the time from which it could start.
LATE = Statement("""
SELECT extract(epoch FROM l.granted_at - j.queued_at) AS seconds FROM leases l JOIN jobs j ON j.id = l.job_id
WHERE j.label = 'later'
""")
LEFT = Statement("SELECT count(*) FROM jobs WHERE label = 'later' AND finished_at IS NULL")
LISTENING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leasehold-listen'"


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in milliseconds, by nearest rank."""

    p50: float
    p99: float
    max: float


@dataclass(frozen=True)
class Waits:
    """Result of one run: the waits until the lease was committed, and until the bot had the job."""

    samples: int
    submit_to_lease_ms: Percentiles
    submit_to_bot_ms: Percentiles


class IdleBot(threading.Thread):
    """A bot that waits in one long poll, finishes each job at once, and records when it received it."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(name="bench-bot", daemon=True)
        self.taken: queue.Queue[float] = queue.Queue()
        self.resting = threading.Event()
        self.failure: Exception | None = None
        self._url, self._token = url, token
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Make the current call the last one."""
        self._stopping.set()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            with httpx.Client(base_url=self._url, headers=headers, timeout=60.0, trust_env=False) as http:
                self._work(http)
        except Exception as error:
            self.failure = error

    def _work(self, http: httpx.Client) -> None:
        session = Session.model_validate_json(_post(http, "/v1/sessions", OpenSession(bot=BOT, capacity=UNITS)))
        reports: list[LeaseReport] = []
        seq = 0
        while not self._stopping.is_set():
            seq += 1
            wait = 0.0 if reports else 5.0
            sync = Sync(bot=BOT, epoch=session.epoch, secret=session.secret, seq=seq, leases=reports, wait=wait)
            if not reports:
                self.resting.set()
            answer = SyncAnswer.model_validate_json(_post(http, "/v1/sync", sync))
            if answer.leases:
                self.taken.put(clock.monotonic())
                self.resting.clear()
            done = Outcome(verdict="succeeded", exit_code=0)
            reports = [
                LeaseReport(job=work.job, fence=work.fence, state="completed", outcome=done) for work in answer.leases
            ]


class Bench:
    """The measured pool, and the caller that submits to it."""

    def __init__(self, database: Database, bot: IdleBot, *, chance: random.Random) -> None:
        self._database, self._bot, self._chance = database, bot, chance
        self._watch = database.listen()
        self._watch.execute("LISTEN leasehold_bots")
        self._nobody = threading.Event()

    def close(self) -> None:
        self._watch.close()

    def silence(self) -> None:
        """Switch wake-ups off."""
        self._database.run(lambda connection: connection.execute(SILENCE))

    def measure(self, samples: int, *, announced: bool) -> Waits:
        """Submit `samples` jobs, one at a time, each into an idle pool."""
        to_lease, to_bot = [], []
        for number in range(samples + 1):
            lease, bot = self._sample(announced=announced)
            if number:  # the first one warms caches and connections up
                to_lease.append(lease)
                to_bot.append(bot)
        return Waits(samples, _percentiles(to_lease), _percentiles(to_bot))

    def starts(self, count: int) -> Percentiles:
        """Submit `count` jobs, each with an instant of its own, `STARTS_RATE` a second; return how late they start.

        Raises LeaseholdError if one starts early.
        """
        begin = datetime.now(UTC) + timedelta(seconds=2 + count / 2000)
        request = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}, "label": "later"}
        instants = [(begin + timedelta(seconds=nth / STARTS_RATE)).isoformat() for nth in range(count)]
        for first in range(0, count, 1000):
            asked = [request | {"schedule_after": instant} for instant in instants[first : first + 1000]]
            self._database.run(lambda connection, asked=asked: submit(connection, asked, actor="bench"))  # type: ignore[misc]
        deadline = clock.monotonic() + count / STARTS_RATE + 2 * SAMPLE_WITHIN
        while self._database.run(lambda connection: connection.execute(LEFT).scalar_one()):
            if clock.monotonic() > deadline:
                raise LeaseholdError(f"jobs have not started in time: {self._bot.failure or 'no answer'}")
            clock.wait(self._nobody, 0.5)
        late = [float(row.seconds) for row in self._database.run(lambda connection: list(connection.execute(LATE)))]
        if len(late) != count or min(late) < 0:
            raise LeaseholdError(f"{len(late)} of {count} jobs started, the first {min(late):.6f} s after its time")
        return _percentiles(late)

    def _sample(self, *, announced: bool) -> tuple[float, float]:
        if not self._bot.resting.wait(SAMPLE_WITHIN):
            raise LeaseholdError(f"the bot does not come to rest: {self._bot.failure or 'no answer'}")
        # All processes go to sleep, and the random pause keeps the submit independent of the pool's intervals.
        clock.wait(self._nobody, self._chance.uniform(0.1, 0.3))
        for _ in self._watch.notifies(timeout=0):
            pass
        request = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}}
        began = clock.monotonic()
        job = self._database.run_alone(lambda driver: submit_alone(driver, request, actor="bench"))
        leased = self._announced() if announced else self._written_at(job.job_id)
        try:
            taken = self._bot.taken.get(timeout=SAMPLE_WITHIN)
        except queue.Empty:
            raise LeaseholdError(f"the bot got nothing: {self._bot.failure or 'no answer'}") from None
        return leased - began, taken - began

    def _announced(self) -> float:
        for _ in self._watch.notifies(timeout=SAMPLE_WITHIN, stop_after=1):
            return clock.monotonic()
        raise LeaseholdError(f"no lease was announced within {SAMPLE_WITHIN:.0f} s")

    def _written_at(self, job_id: int) -> float:
        deadline = clock.monotonic() + SAMPLE_WITHIN
        while clock.monotonic() < deadline:
            if self._watch.execute(LEASED, (job_id,)).fetchone():
                return clock.monotonic()
            clock.wait(self._nobody, LOOK)
        raise LeaseholdError(f"no lease was written within {SAMPLE_WITHIN:.0f} s")


@contextmanager
def pool(data: Path, chance: random.Random) -> Iterator[Bench]:
    """Start a fresh pool of one assigner process, one gateway and one bot."""
    with ExitStack() as stack:
        url = stack.enter_context(embedded.serve(data)).url
        database = Database(url, DatabaseSettings(), role="bench", chance=chance)
        stack.callback(database.close)
        migrate.upgrade(database)
        token = database.run(lambda connection: tokens.create(connection, tokens.Kind.BOT, bot="*"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": url, "LEASEHOLD_GATEWAY_PORT": "0"}
        children = Children(data / "log", environ, report=lambda _: None, chance=chance, restart=False)
        stack.callback(children.kill)
        defaults = data / "leasehold.toml"
        defaults.touch()
        program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data), "--config", str(defaults))
        children.start(Child(name="assigner", role=Role.ASSIGNER, command=(*program, "assign", "--name", "bench")))
        children.start(Child(name="gateway", role=Role.GATEWAY, command=(*program, "gateway")))
        bot = IdleBot(ready(children, data / "gateway.url", database), token)
        bot.start()
        stack.callback(bot.stop)
        bench = Bench(database, bot, chance=chance)
        stack.callback(bench.close)
        yield bench
        checked(database)


def ready(children: Children, address: Path, database: Database, *, listeners: int = 2) -> str:
    """Wait until the gateway answers and both processes listen for wake-ups; return the gateway's URL."""
    deadline = clock.monotonic() + READY_WITHIN
    with database.listen() as connection:
        while clock.monotonic() < deadline:
            children.check()
            with suppress(FileNotFoundError, httpx.TransportError):
                url = address.read_text().strip()
                answers = httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
                listening = connection.execute(LISTENING).fetchone()
                if answers and listening and listening[0] > listeners:  # this connection listens too
                    return url
            clock.sleep(0.05)
    raise LeaseholdError(f"the pool was not ready within {READY_WITHIN:.0f} s; see {address.parent / 'log'}")


def _post(http: httpx.Client, path: str, message: OpenSession | Sync) -> bytes:
    answer = http.post(path, content=message.model_dump_json(), headers={"Content-Type": "application/json"})
    if answer.status_code >= 300:
        raise LeaseholdError(f"POST {path} gave {answer.status_code}: {answer.text[:300]}")
    return answer.content


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    ordered = sorted(seconds)
    # Nearest rank: the smallest value that at least q of all values do not exceed.
    rank = {q: ordered[max(0, -(-len(ordered) * q // 100) - 1)] for q in (50, 99, 100)}
    return Percentiles(*(round(rank[q] * 1000, 2) for q in (50, 99, 100)))


def _table(found: dict[str, Waits], bounds: dict[str, float]) -> Table:
    columns = ("wake-ups", "from submit to", "p50", "p99", "max", "samples", "bound by polls")
    table = blank_table("Latency on an idle pool, milliseconds", *columns, names=2)
    for mode, waits in found.items():
        for what, seen, bound in (
            ("lease written", waits.submit_to_lease_ms, bounds["lease"]),
            ("bot has it", waits.submit_to_bot_ms, bounds["bot"]),
        ):
            cells = (f"{seen.p50:.1f}", f"{seen.p99:.1f}", f"{seen.max:.1f}", str(waits.samples))
            table.add_row(mode, what, *cells, f"{bound:.0f}" if mode == "off" else "")
    return table


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option(
    "--samples", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Samples with wake-ups."
)
@click.option(
    "--polled",
    type=click.IntRange(0, 10_000),
    default=30,
    show_default=True,
    help="Samples without wake-ups, about a second each.",
)
@click.option(
    "--starts",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="Jobs that are asked to start later.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the pauses between samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(samples: int, polled: int, starts: int, seed: int, *, as_json: bool) -> None:
    data = embedded.scratch("leasehold-bench-")
    found: dict[str, Waits] = {}
    late: Percentiles | None = None
    try:
        with pool(data, random.Random(seed)) as bench:
            found["on"] = bench.measure(samples, announced=True)
            late = bench.starts(starts) if starts else None
            if polled:
                bench.silence()
                found["off"] = bench.measure(polled, announced=False)
    except (LeaseholdError, psycopg.Error) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    finally:
        shutil.rmtree(data, ignore_errors=True)
    assigner, timing = AssignerSettings(), Timing()
    lease = (assigner.interval + assigner.jitter) * 1000
    bounds = {"lease": lease, "bot": lease + timing.poll * 1000}
    if as_json:
        shown: dict[str, Any] = {f"wakeups_{mode}": asdict(waits) for mode, waits in found.items()}
        shown |= {} if late is None else {"late_ms": asdict(late)}
        click.echo(json.dumps({**shown, "poll_bound_ms": bounds}))
    else:
        Console().print(_table(found, bounds))
        if late is not None:
            click.echo(
                f"{starts:,} starts at instants of their own, none early: {late.p50}, {late.p99}, {late.max} ms late"
            )


if __name__ == "__main__":
    main()
