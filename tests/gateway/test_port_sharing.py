"""Several processes of one gateway on one port: who serves, what happens when one dies or hangs, and how all end."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from bots.gateway import port_sharing
from bots.gateway.port_sharing import AHEAD, SharedPort
from bots.gateway.settings import GatewaySettings
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.patience import MINUTE, NEWS, eventually
from tests.support.pool import Pool
from tests.support.servers import Bot, Process, Processes, Served, serving

TWO = "[gateway]\nprocesses = 2\n"
NUMBERS = {"1", "2"}


def pids(gateway: Process) -> list[int]:
    """The processes that serve the port."""
    return [
        int(each) for each in Path(f"/proc/{gateway.popen.pid}/task/{gateway.popen.pid}/children").read_text().split()
    ]


def is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def served(processes: Processes, database: Database) -> Served:
    return Served(processes.url, None, None, database)  # type: ignore[arg-type]


def values(url: str, name: str, *, http: httpx.Client | None = None) -> dict[str, float]:
    """The value of a metric without other labels, by process."""
    text = (http or httpx).get(f"{url}/metrics", **({} if http else {"trust_env": False, "timeout": MINUTE})).text
    lines = (line for line in text.splitlines() if line.startswith(name + "{"))
    return {line.split('process="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def metrics_as_they_are(url: str) -> str:
    """The metrics of all processes. Each publishes its own when it answers, and only every five seconds otherwise."""
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(trust_env=False, timeout=MINUTE)) for _ in range(8)]
        return [client.get(f"{url}/metrics").text for client in clients][-1]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process hangs while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def can_be_bound(url: str) -> bool:
    place = urlsplit(url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place.hostname, place.port))
            probe.listen()
        except OSError:
            return False
        return True


@pytest.fixture
def processes(database: Database, timing: Timing, scratch: Path) -> Iterator[Processes]:
    with Processes(scratch, database.url, timing, config=TWO) as running:
        yield running
        for process in running.running:
            if process.alive:
                process.signal(signal.SIGTERM)
                process.end()


def test_two_processes_share_the_connections_their_metrics_and_their_end(processes: Processes, pool: Pool) -> None:
    gateway = processes.gateway()
    url = processes.url
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(trust_env=False, timeout=MINUTE)) for _ in range(20)]
        assert [client.get(f"{url}/readyz").status_code for client in clients] == [200] * 20
        for client in clients:
            client.get(f"{url}/metrics")  # so that its process publishes what it has
        counts = values(url, "leasehold_connections", http=clients[0])
        assert (counts.keys(), sum(counts.values())) == (NUMBERS, 20)
        assert min(counts.values()) >= 10 - AHEAD
        ready = 'leasehold_requests_total{process="%s",route="/readyz",status_class="2xx"}'
        text = clients[0].get(f"{url}/metrics").text
        assert text.count("# TYPE leasehold_requests_total counter") == 1
        assert all(ready % number in text for number in NUMBERS)
    eventually(lambda: len(pool.rows("SELECT 1 FROM gateways WHERE stopped_at IS NULL")) == 2)
    rows = pool.rows("SELECT name, url FROM gateways ORDER BY name")
    assert [(row.name.rpartition("#")[2], row.url) for row in rows] == [("1", url), ("2", url)]
    members = pids(gateway)
    gateway.signal(signal.SIGTERM)
    assert gateway.end() == 0
    assert all(is_over(pid) for pid in members)
    assert can_be_bound(url)
    assert len(pool.rows("SELECT 1 FROM gateways WHERE stopped_at IS NOT NULL")) == 2
    said = gateway.said()
    assert all(f"process={number}" in said for number in NUMBERS)


def test_the_end_of_one_process_before_all_are_ready_ends_the_gateway(
    empty_url: str, timing: Timing, scratch: Path, database: Database
) -> None:
    with Processes(scratch, database.url, timing, config=TWO) as processes:
        gateway = processes.start("gateway", "gateway", environment={"LEASEHOLD_DATABASE_URL": empty_url})
        assert gateway.popen.wait(MINUTE) == 3
        assert "leasehold db upgrade" in gateway.said()
        assert not (scratch / "gateway.url").exists()


def test_calls_of_a_bot_come_to_any_process_a_killed_one_is_started_again_and_none_outlives_the_parent(
    processes: Processes, pool: Pool
) -> None:
    gateway = processes.gateway()
    check_that_calls_may_come_to_any_process(processes, pool, *pids(gateway))
    check_that_a_killed_process_is_started_again(processes, gateway)
    members = pids(gateway)
    gateway.kill()
    assert len(members) == 2
    eventually(lambda: all(is_over(pid) for pid in members))
    assert can_be_bound(processes.url)


def check_that_calls_may_come_to_any_process(processes: Processes, pool: Pool, first: int, second: int) -> None:
    with stopped(second):  # who connects now is served by the other one
        bot = Bot(served(processes, pool.database))
    elsewhere = httpx.Client(base_url=processes.url, headers=bot.http.headers, trust_env=False, timeout=MINUTE)
    with stopped(first):
        assert elsewhere.get("/healthz").status_code == 200
    held = 'leasehold_waits{process="%s",topic="bots"} 1.0'

    def holding() -> set[str]:
        text = metrics_as_they_are(processes.url)
        return {number for number in NUMBERS if held % number in text}

    def repeated() -> httpx.Response:
        return elsewhere.post("/v1/sync", json={**bot.identity, "seq": bot.seq, "wait": 60})

    with ThreadPoolExecutor() as threads:
        older = threads.submit(bot.sync, wait=60)
        eventually(lambda: len(holding()) == 1, every=0.2)
        # The bot has given up its connection and calls again, with the next number, and is served by another process.
        bot.seq += 1
        newer = threads.submit(repeated)
        eventually(lambda: holding() == NUMBERS, every=0.2)
        job = pool.submit()[0]
        pool.assigner().run_once()
        granted = newer.result(NEWS)
        assert granted.status_code == 200
        assert [lease["job"] for lease in granted.json()["leases"]] == [job]
        late = older.result(NEWS)
        assert (late.status_code, late.json()["code"]) == (409, "stale_seq")
    # The same call again is answered the same by either process, and a newer session ends the one that both know.
    again = [client.post("/v1/sync", json={**bot.identity, "seq": bot.seq}) for client in (elsewhere, bot.http)]
    assert [[lease["job"] for lease in each.json()["leases"]] for each in again] == [[job], [job]]
    assert elsewhere.post("/v1/sessions", json={"bot": "b1", "capacity": 2}).status_code == 200
    over = [client.post("/v1/sync", json={**bot.identity, "seq": 9}) for client in (elsewhere, bot.http)]
    assert [each.json()["code"] for each in over] == ["session_superseded"] * 2
    elsewhere.close()


def check_that_a_killed_process_is_started_again(processes: Processes, gateway: Process) -> None:
    """The other one serves meanwhile."""
    url, members = processes.url, pids(gateway)
    os.kill(members[0], signal.SIGKILL)
    eventually(lambda: is_over(members[0]))

    def again() -> bool:
        assert httpx.get(f"{url}/readyz", trust_env=False, timeout=MINUTE).status_code == 200
        now = pids(gateway)
        return values(url, "leasehold_connections").keys() == NUMBERS and len(now) == 2 and members[0] not in now

    eventually(again, every=0.1)
    assert "was killed by SIGKILL; starting it again in" in gateway.said()


def test_a_unix_socket_is_shared_and_ctrl_c_removes_it_after_all_processes_have_ended(
    database: Database, timing: Timing, scratch: Path
) -> None:
    path = scratch / "gateway.sock"
    with Processes(scratch, database.url, timing, config=f'{TWO}unix_socket = "{path}"\n') as processes:
        gateway = processes.start("gateway", "gateway")
        eventually((scratch / "gateway.url").exists)
        with ExitStack() as stack:
            transports = [httpx.HTTPTransport(uds=str(path)) for _ in range(10)]
            clients = [stack.enter_context(httpx.Client(transport=each, timeout=MINUTE)) for each in transports]
            assert all(client.get("http://gateway/healthz").status_code == 200 for client in clients)
            counts = values("http://gateway", "leasehold_connections", http=clients[0])
            assert counts.keys() == NUMBERS
        members = pids(gateway)
        gateway.signal(signal.SIGINT)
        assert gateway.popen.wait(MINUTE) == 130
        assert all(is_over(pid) for pid in members)
    assert not path.exists()


@pytest.fixture
def shared() -> Iterator[list[SharedPort]]:
    """A port as its parent and two processes have it."""
    with closing(SharedPort.create(socket.create_server(("127.0.0.1", 0)), processes=2)) as parent:
        made = [parent]
        for number in (1, 2):
            listener, file = (os.dup(each) for each in parent.files)
            made.append(SharedPort.inherited(f"{number}:2:{listener}:{file}"))
        yield made
        for port in made[1:]:
            port.close()


def test_processes_share_a_port_with_tls(
    database: Database, timing: Timing, tmp_path: Path, shared: list[SharedPort]
) -> None:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    wanted = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([openssl, *wanted, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    settings = GatewaySettings(tls_cert=certificate, tls_key=key)
    _, one, two = shared
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    with ExitStack() as stack:
        for port in (one, two):
            stack.enter_context(serving(database, timing, settings=settings, shared_port=port))
        url = f"https://127.0.0.1:{one.listener.getsockname()[1]}"
        clients = [stack.enter_context(httpx.Client(verify=context, trust_env=False)) for _ in range(10)]
        assert all(client.get(f"{url}/healthz", timeout=MINUTE).status_code == 200 for client in clients)
        for client in clients:
            client.get(f"{url}/metrics", timeout=MINUTE)
        counts = values(url, "leasehold_connections", http=clients[0])
        assert (counts.keys(), sum(counts.values())) == (NUMBERS, 10)
        assert min(counts.values()) >= 5 - AHEAD


def test_the_process_with_fewer_connections_takes_the_next_one(shared: list[SharedPort]) -> None:
    parent, one, two = shared
    assert parent.accepting == 0
    one.has(0)
    assert (parent.accepting, one.is_my_turn) == (1, True)
    for _ in range(5):
        one.took_one()
    assert one.is_my_turn, "a process that does not accept is not waited for"
    two.has(5 - AHEAD)
    assert (one.is_my_turn, two.is_my_turn) == (True, True)
    two.has(5 - AHEAD - 1)
    assert (one.is_my_turn, two.is_my_turn) == (False, True)
    two.leave()
    assert (parent.accepting, one.is_my_turn) == (1, True)


def test_a_counter_of_another_process_never_goes_back(shared: list[SharedPort]) -> None:
    _, one, two = shared
    registries = [CollectorRegistry(), CollectorRegistry()]
    counters = [Counter("jobs", "Jobs.", ["kind"], registry=registry) for registry in registries]
    for port, counter, registry in zip((one, two), counters, registries, strict=True):
        port.has(0)
        counter.labels("a").inc()
        port.publish(registry, now=0.0)
    counters[1].labels("a").inc()
    two.publish(registries[1], now=1.0)
    assert 'jobs_total{kind="a",process="2"} 1.0' in one.metrics_text(registries[0], now=1.0).decode()
    assert 'jobs_total{kind="a",process="2"} 2.0' in two.metrics_text(registries[1], now=1.0).decode()
    assert 'jobs_total{kind="a",process="2"} 2.0' in one.metrics_text(registries[0], now=1.0).decode()
    two.leave()
    assert 'process="2"' not in one.metrics_text(registries[0], now=1.0).decode()


def test_metrics_that_are_half_written_are_left_out(shared: list[SharedPort]) -> None:
    _, one, two = shared
    registry = CollectorRegistry()
    Counter("jobs", "Jobs.", registry=registry).inc()
    for port in (one, two):
        port.has(0)
    two.publish(registry, now=0.0)
    os.pwrite(two.files[1], b"x", two._place(2) + port_sharing._HEAD.size + 3)
    text = one.metrics_text(registry, now=0.0).decode()
    assert 'process="1"' in text
    assert 'process="2"' not in text
