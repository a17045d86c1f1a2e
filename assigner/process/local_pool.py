"""A pool on one machine for `up` and `demo`: assigners, a gateway and bots as separate processes."""

import fcntl
import json
import os
import pwd
import random
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from leasehold.errors import BadInput, Conflict, LeaseholdError, NotReady, Unauthorised
from leasehold.wire import check_place, withheld

from assigner.process.children import Child, Children, Role
from assigner.settings import Installation, require_safe_way
from schema import clock, gc_tuning
from schema.postgres import embedded, migrate
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.readable import plural
from schema.requests import DEFAULT_INSTANCE
from schema.tenancy import tokens

#: Seconds until the gateway must be ready, including the start of an embedded PostgreSQL on a slow machine.
READY_WITHIN = 90.0
#: Where the console of a local pool listens.
CONSOLE_HOST = "127.0.0.1"
#: The most bytes in which a process of an app names its tasks, as a bot reads them.
MOST_SAID = 1 << 18
#: Seconds between two looks at the embedded server.
KEEP_EVERY = 2.0
#: Command line of the pool's processes, before the name of the command.
PROGRAM = (sys.executable, "-m", "assigner.cli.main")
OPERATOR_TOKEN, BOT_TOKEN = "operator.token", "bot.token"
#: Variables for callers, which would mean something else to a bot.
_NOT_FOR_CHILDREN = frozenset({"LEASEHOLD_URL", "LEASEHOLD_TOKEN", "LEASEHOLD_CONFIG", "LEASEHOLD_DATA"})


@dataclass(frozen=True, kw_only=True)
class LocalBot:
    """One bot process. Fields that are None come from the `[bot]` section of the configuration.

    exclusive: properties that it keeps for jobs that ask for them. app: `MODULE:POOL`; the bot runs the tasks of that
    pool and nothing else. concurrency: how many tasks at once.
    """

    name: str
    capacity: int | None = None
    priority: int | None = None
    properties: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    exclusive: Sequence[str] = ()
    app: str | None = None
    concurrency: int | None = None


class Steps:
    """Reports each step of a start when it begins, with the seconds since the first step was about to begin."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._began = report, clock.monotonic()

    def __call__(self, step: str) -> None:
        self._report(f"{clock.monotonic() - self._began:5.1f} s  {step}")


class LocalPool:
    """The processes of one data directory. `local_pool` makes one with a migrated database and tokens.

    config: the file that every process reads; None = defaults.
    report: receives short lines for people.
    steps: receives each step of the start.
    port: the gateway's port; None = as configured, 0 = any free one.
    console: the console's port; None = no console.
    farm: the port of a farm door with storage of its own, and callers without a token; None = no door.
    rest: waits for some seconds while the gateway and the console start; it may raise to give up.
    """

    def __init__(
        self,
        data: Path,
        *,
        config: Path | None,
        assigners: int,
        bots: Sequence[LocalBot],
        environ: Mapping[str, str],
        report: Callable[[str], None],
        chance: random.Random,
        steps: Callable[[str], None] = lambda _: None,
        port: int | None = None,
        console: int | None = None,
        farm: int | None = None,
        rest: Callable[[float], object] = clock.sleep,
        keeper: "ServerKeeper | None" = None,
    ) -> None:
        self.data, self._server = data, keeper
        self._bots, self._assigners, self._rest, self._steps, self._report = bots, assigners, rest, steps, report
        self._environ = {name: value for name, value in environ.items() if name not in _NOT_FOR_CHILDREN}
        if farm is not None:
            # Bots start `leasehold-action`, which is beside this program.
            self._environ["PATH"] = f"{environ.get('PATH', os.defpath)}:{os.path.dirname(sys.executable)}"
        self._global = ["--data", str(data), "--config", str((config or Path(os.devnull)).absolute())]
        self._gateway_environment = {} if port is None else {"LEASEHOLD_GATEWAY_PORT": str(port)}
        self._children = Children(data / "log", self._environ, report=report, chance=chance)
        self.url = ""
        self.farm_url = None if farm is None else f"grpc://{CONSOLE_HOST}:{farm}"
        self.console_url = None if console is None else f"http://{CONSOLE_HOST}:{console}"

    def start(self) -> None:
        """Start every process and return once the gateway and the console answer.

        Raises LeaseholdError if one of them does not answer or a process ends at once; then nothing is left running.
        """
        url_file = self.data / "gateway.url"
        url_file.unlink(missing_ok=True)
        try:
            self._steps(f"starting {plural(self._assigners, 'assigner')} and the gateway")
            for n in range(1, self._assigners + 1):
                self._start(f"assigner-{n}", Role.ASSIGNER, "assign", "--name", f"assigner-{n}")
            self._start("gateway", Role.GATEWAY, "gateway", environment=self._gateway_environment)
            self.url = self._wait_for_gateway(url_file)
            if port := urlsplit(self.url).port:
                # Bots, the console and waiting callers know it by that port, also if any free one was asked for.
                self._children.restart_with("gateway", {"LEASEHOLD_GATEWAY_PORT": str(port)})
            self._steps(f"the gateway answers at {self.url}; starting {plural(len(self._bots), 'bot')}")
            for bot in self._bots:
                if bot.app is not None:
                    self._apply_schedules(bot.app)
                self._start_bot(bot)
            if self.farm_url is not None:
                self._start_farm(self.farm_url)
            if self.console_url is not None:
                self._start_console(self.console_url)
        except BaseException:
            self._children.stop(patience=5.0)
            raise

    @property
    def token(self) -> str:
        """An operator token of this pool."""
        return (self.data / OPERATOR_TOKEN).read_text().strip()

    def run_once(self) -> float:
        """Restart dead processes and a dead server. Returns the seconds until the next call."""
        if self._server is not None:
            self._server.run_once()
        return self._children.run_once()

    def reload_app(self) -> None:
        """Apply the schedules of the app again, and start its bot again once its tasks have ended, or after 10 s.

        Tasks that are dropped then run again. A refusal of the schedules is reported.
        """
        for bot in self._bots:
            if bot.app is not None:
                try:
                    self._apply_schedules(bot.app)
                except LeaseholdError as refused:
                    self._report(str(refused))
                self._children.renew(bot.name)

    def processes(self) -> dict[str, int]:
        """Process ids of the running processes by name."""
        return self._children.processes()

    def stop(self, *, patience: float = 10.0) -> None:
        """Stop the console, bots, the gateway, then the assigners, each group within `patience` seconds. Idempotent."""
        self._children.stop(patience=patience)
        (self.data / "gateway.url").unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill every process at once. Running jobs are queued again when their bots' sessions expire."""
        self._children.kill()

    def _start(self, name: str, role: Role, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        command = (*PROGRAM, *self._global, *arguments)
        self._children.start(Child(name=name, role=role, command=command, environment=environment or {}))

    def _apply_schedules(self, app: str) -> None:
        """Make the schedules of the app those that its code declares. Raises LeaseholdError with the reason if not."""
        command = [*PROGRAM, *self._global, "schedule", "apply", app, "--url", self.url, "--json"]
        done = subprocess.run(
            command, env=self._environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"the command ended with {done.returncode}"]
            raise LeaseholdError(f"the schedules of {app} were not applied: {lines[-1].removeprefix('error: ')}")
        if count := len(json.loads(done.stdout)):
            self._steps(f"{plural(count, 'schedule')} of {app} applied")

    def _start_bot(self, bot: LocalBot) -> None:
        arguments = ["bot", "--name", bot.name, "--url", self.url, "--token-file", str(self.data / BOT_TOKEN)]
        if bot.app is not None:
            arguments += ["--app", bot.app]
        numbers = {"--capacity": bot.capacity, "--concurrency": bot.concurrency, "--priority": bot.priority}
        for option, number in numbers.items():
            if number is not None:
                arguments += [option, str(number)]
        arguments += [word for each in bot.exclusive for word in ("--exclusive", each)]
        for key, value in bot.properties.items():
            for each in [value] if isinstance(value, str) else value:
                arguments += ["--property", f"{key}={each}"]
        self._start(bot.name, Role.BOT, *arguments)

    def _start_farm(self, url: str) -> None:
        url_file = self.data / "farm.url"
        url_file.unlink(missing_ok=True)
        host, _, port = url.removeprefix("grpc://").rpartition(":")
        arguments = ["--storage", str(self.data / "farm"), "--anonymous", DEFAULT_INSTANCE, "--port", port]
        self._start("farm", Role.GATEWAY, "farm", *arguments, environment={"LEASEHOLD_FARM_HOST": host})
        deadline = clock.monotonic() + READY_WITHIN
        while not url_file.exists():
            self._children.check()
            if clock.monotonic() > deadline:
                raise LeaseholdError(
                    f"the farm door was not ready within {READY_WITHIN:.0f} s; see {self.data / 'log'}"
                )
            self._rest(0.1)
        self._steps(f"the farm door answers at {url}")

    def _start_console(self, url: str) -> None:
        port = url.rpartition(":")[2]
        self._start("console", Role.CONSOLE, "console", "--url", self.url, "--host", CONSOLE_HOST, "--port", port)
        deadline = clock.monotonic() + READY_WITHIN
        while not answers(url, "/login"):
            self._children.check()
            if clock.monotonic() > deadline:
                raise LeaseholdError(f"the console was not ready within {READY_WITHIN:.0f} s; see {self.data / 'log'}")
            self._rest(0.1)
        self._steps(f"the console answers at {url}")

    def _wait_for_gateway(self, url_file: Path) -> str:
        deadline = clock.monotonic() + READY_WITHIN
        while clock.monotonic() < deadline:
            self._children.check()
            with suppress(FileNotFoundError):
                url = url_file.read_text().strip()
                if url and answers(url, "/readyz"):
                    return url
            self._rest(0.05)
        raise LeaseholdError(f"the gateway was not ready within {READY_WITHIN:.0f} s; see {self.data / 'log'}")


@contextmanager
def reserved_port(port: int, option: str, *, host: str = CONSOLE_HOST) -> Iterator[int]:
    """Keep a port, or any free one for 0, for a process that listens there later, and again after it has died.

    Linux gives a bound port to nobody who takes any free one. A process that asks for it by its number may listen
    there, because both sockets are bound with SO_REUSEADDR.
    Raises BadInput, naming the option, if somebody listens there.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            kept.bind((host, port))
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {error.strerror}; give another port, 0 = any"
            raise BadInput(option, reason) from None
        yield int(kept.getsockname()[1])


def answers(url: str, page: str) -> bool:
    """True if the server at `url` answers with status 200 at this path of it."""
    import httpx  # gateways and assigners import this module too, and wait for no gateway

    path = url.removeprefix("http+unix://")
    # No secret is sent, so the certificate, which is for callers from outside, need not match.
    transport = httpx.HTTPTransport(verify=False, uds=None if path == url else path)
    base = url if path == url else "http://localhost"
    with httpx.Client(transport=transport, timeout=5.0, trust_env=False) as client:
        try:
            return client.get(f"{base}{page}").status_code == 200
        except httpx.TransportError:
            return False


class ServerKeeper:
    """Restarts the embedded server of a data directory when it has died; its clients cannot."""

    def __init__(self, data: Path, *, report: Callable[[str], None], steps: Callable[[str], None]) -> None:
        self._data, self._report = data, report
        self._server = embedded.serve(data, report=steps)
        self._pid = self._server.pid
        self._next = clock.monotonic() + KEEP_EVERY

    @property
    def is_ready(self) -> bool:
        """True if the server takes connections."""
        return self._server.is_ready

    @property
    def log(self) -> Path:
        """The file of the server's messages."""
        return self._server.log

    def run_once(self) -> None:
        """Check the server if the last check is old enough. Errors are reported and tried again."""
        if clock.monotonic() < self._next:
            return
        try:
            if not self._server.is_ready:
                before, self._server = self._server, embedded.serve(self._data)
                before.close()
            if self._server.pid != self._pid:
                self._pid = self._server.pid
                self._report("PostgreSQL had died and runs again")
        except NotReady as error:
            self._report(str(error))
        self._next = clock.monotonic() + KEEP_EVERY

    def close(self) -> None:
        """Release the server; its last user stops it."""
        self._server.close()


def check_app(
    place: str, environ: Mapping[str, str], *, rest: Callable[[float], object], unseen: Collection[str] = ()
) -> None:
    """Import an app in a process of its own, as a bot's process does. Raises BadInput with the reason if that fails.

    environ: the variables that tasks see. unseen: the names of those that they do not, for the reason.
    rest: waits for some seconds meanwhile; it may raise to give up.
    """
    try:
        check_place(place)
    except BadInput as refused:
        raise refused.renamed(lambda _: "--app") from None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-m", "leasehold.runtime.task_child", place]
        process = subprocess.Popen(
            command, env=dict(environ), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        theirs.close()
        try:
            while not select.select([ours], [], [], 0.0)[0]:
                rest(0.05)
            said = ours.recv(MOST_SAID)
        finally:
            process.kill()
            process.wait()
    failed = json.loads(said).get("failed") if said else "its process ended without a word"
    if failed is not None:
        raise BadInput("--app", f"'{place}' cannot be used: {failed}{withheld(failed, unseen)}")


@contextmanager
def local_pool(
    installation: Installation,
    *,
    assigners: int,
    bots: Sequence[LocalBot],
    report: Callable[[str], None],
    chance: random.Random,
    port: int | None = None,
    console: int | None = None,
    farm: int | None = None,
    rest: Callable[[float], object] = clock.sleep,
) -> Iterator[LocalPool]:
    """Run a local pool until the context ends, with a migrated database and tokens in the data directory.

    report: receives each step of the start with its time, and later what happens to the processes.
    port, console, farm: the ports, 0 = any free one; None = the gateway's as configured, no console, no farm door.
    Raises Conflict if a pool runs there already, and NotReady and BadInput as its parts do.
    """
    steps = Steps(report)
    with ExitStack() as stack:
        if console is not None:
            console = stack.enter_context(reserved_port(console, "--console"))
        if farm is not None:
            farm = stack.enter_context(reserved_port(farm, "--farm"))
        stack.enter_context(hold_data_directory(installation.data))
        steps(f"using {installation.described}")
        keeper = ServerKeeper(installation.data, report=report, steps=steps) if installation.is_embedded else None
        if keeper:
            stack.callback(keeper.close)
            _refuse_the_servers_account(installation)
        try:
            _prepare(stack.enter_context(installation.database("pool")), installation.data, steps)
        except NotReady:
            if keeper and not keeper.is_ready:
                reason = f"the private PostgreSQL has ended during the start; its log is {keeper.log}"
                raise NotReady(f"{reason}; `leasehold up` begins the start again") from None
            raise
        pool = LocalPool(
            installation.data,
            config=installation.config,
            assigners=assigners,
            bots=bots,
            environ=_with_own_work(installation),
            report=report,
            chance=chance,
            steps=steps,
            port=port,
            console=console,
            farm=farm,
            rest=rest,
            keeper=keeper,
        )
        gc_tuning.collect_as_usual()
        pool.start()
        try:
            yield pool
        finally:
            first = "" if console is None else "the console, "
            report(f"stopping {first}the bots, the gateway and the assigners")
            pool.stop()


def _prepare(database: Database, data: Path, steps: Callable[[str], None]) -> None:
    """Bring the tables up to date, and leave tokens for an operator and for bots in the data directory."""
    require_safe_way(database)
    _upgrade(database, steps)
    _keep_token(database, data / OPERATOR_TOKEN, kind=tokens.Kind.OPERATOR, bot=None)
    _keep_token(database, data / BOT_TOKEN, kind=tokens.Kind.BOT, bot="*")


def _upgrade(database: Database, steps: Callable[[str], None]) -> None:
    """Bring the schema to the version of this program."""
    version = migrate.status(database)
    if version.current is None:
        steps(f"creating the tables of schema {version.needed}")
    elif version.current != version.needed:
        steps(f"upgrading the tables from schema {version.current} to {version.needed}")
    migrate.must_be_ready(migrate.upgrade(database))


def _refuse_the_servers_account(installation: Installation) -> None:
    """Raise BadInput if jobs would run as the account of the embedded server, which is a superuser of it."""
    name = getattr(getattr(installation.settings, "bot", None), "job_user", None)
    with suppress(KeyError):
        if name is not None and pwd.getpwnam(name).pw_uid == (installation.data / "pg").stat().st_uid != os.geteuid():
            raise BadInput(
                "bot.job_user",
                f"'{name}' also runs the private PostgreSQL server; choose another account, or name one in "
                f"{embedded.ACCOUNT_VARIABLE} before the data directory is made",
            )


def _with_own_work(installation: Installation) -> Mapping[str, str]:
    """Return the environment of the pool's processes.

    Bots work below the data directory unless configured otherwise, so that two pools on one machine stay apart.
    """
    bot: object = getattr(installation.settings, "bot", None)
    if getattr(bot, "work_dir", None) is not None:
        return installation.environ
    return {**installation.environ, "LEASEHOLD_BOT_WORK_DIR": str(installation.data / "work")}


def _keep_token(database: Database, path: Path, *, kind: tokens.Kind, bot: str | None) -> None:
    """Leave a valid token in `path`: the stored one, or a new one if the database rejects it."""

    def work(connection: Connection) -> str | None:
        try:
            if tokens.verify(connection, path.read_text().strip()).kind is kind:
                return None
        except (FileNotFoundError, UnicodeDecodeError, Unauthorised):
            pass
        return tokens.create(connection, kind, bot=bot, note=f"the local pool's {path.name}")

    made = database.run(work)
    if made is not None:
        write_file(path, made + "\n")


@contextmanager
def hold_data_directory(data: Path) -> Iterator[None]:
    """Lock the data directory for one local pool. Raises Conflict if another pool holds it."""
    try:
        data.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        file = embedded.open_private(data / "pool.lock")
    except OSError as error:
        raise BadInput("--data", f"{data} cannot be used: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                "pool_running",
                f"a pool already runs in {data}; stop it, or give another directory: leasehold --data DIRECTORY up",
            ) from None
        yield


def write_file(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace the file atomically. Only its owner can read it, unless `mode` says otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    temporary.replace(path)
