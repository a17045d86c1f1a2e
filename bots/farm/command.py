"""`leasehold farm`: the door, the lines for its clients, and the demo.

It imports no module of gRPC before it needs one, so that its help comes without the extra.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
import structlog
from click.decorators import pass_meta_key
from leasehold.errors import BadInput, LeaseholdError

from schema import gc_tuning
from schema.validation import metrics_place, metrics_refusal

if TYPE_CHECKING:
    from bots.farm.execution.jobs import Submit, Why
    from bots.farm.settings import FarmSettings
    from bots.sync.settle import SyncService
    from schema.postgres.engine import Database
    from schema.timing import Timing

#: In the `meta` of a command's context: the `Parts`.
PARTS = "leasehold.farm"
#: The bots of the demo. The first of them is killed, and the door.
DEMO_BOTS, DOOR = ("farm-1", "farm-2"), "farm"


class Installation(Protocol):
    """Where a command runs, as far as the door needs it."""

    data: Path

    @property
    def settings(self) -> Any:
        """The whole configuration. Raises BadInput."""

    @property
    def described(self) -> str:
        """The database and the configuration file, in one line."""

    def ready_database(self, role: str) -> "AbstractContextManager[Database]":
        """Connect to the database. Raises NotReady."""


class DemoPool(Protocol):
    """A pool with a door. Who dies is started again."""

    farm_url: str | None

    def processes(self) -> Mapping[str, int]:
        """Return the processes by their names."""


#: The file of the data directory that has the instance to which the last door's callers without a token submit.
ANONYMOUS = "farm.anonymous"


@dataclass(frozen=True)
class Parts:
    """What the composition root hands in, because nothing here may import the assigner.

    log_to_stderr: begins to write lines of a level and above, in a format. overridden: puts given values in place of
    settings. submit: what submits jobs. why: tells why one waits. sync_service: what settles calls of workers, until
    the stack closes. keep: writes an address to a file. demo_pool: runs a pool with bots of these names for actions,
    and a door.
    """

    log_to_stderr: Callable[[str, str], None]
    overridden: Callable[["FarmSettings", Mapping[str, Any]], "FarmSettings"]
    submit: Callable[["Database"], "Submit"]
    why: "Why"
    sync_service: Callable[["Database", "Timing", ExitStack], "SyncService"]
    keep: Callable[[Path, str], None]
    demo_pool: Callable[[Sequence[str]], AbstractContextManager[DemoPool]]


@click.group(name="farm", invoke_without_command=True)
@click.option(
    "--cas",
    metavar="ADDRESS",
    help="The server that keeps blobs and results: grpc://HOST:PORT, grpcs://HOST:PORT with TLS, or unix:/PATH.",
)
@click.option(
    "--storage",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run storage, and keep blobs and results in this directory.",
)
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the door; 0 = any free one [as configured: 8980].")
@click.option("--anonymous", metavar="INSTANCE", help="Take callers without a token, for this instance.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics.")
@click.option("--metrics-host", metavar="ADDRESS", help="The address to serve them on [127.0.0.1].")
@click.option("--anonymous-workers", is_flag=True, default=None, help="Take workers without a token.")
@click.pass_context
def farm(
    context: click.Context, /, storage: Path | None, metrics_port: int | None, metrics_host: str | None, **given: Any
) -> int | None:
    """Run one door for build clients: Bazel, recc and others. Options override the [farm] section."""
    if context.invoked_subcommand is not None:
        return None
    metrics_at = metrics_place(metrics_host, metrics_port)
    installation: Installation = context.obj
    parts: Parts = context.meta[PARTS]
    own = parts.overridden(installation.settings.farm, {name: each for name, each in given.items() if each is not None})
    with ExitStack() as stack:
        return _run_door(installation, parts, own, storage, metrics_at, stack)


@farm.command(name="clients")
@click.option(
    "--address",
    metavar="ADDRESS",
    help="The door, grpc://HOST:PORT or grpcs:// [that of farm.url in the data directory].",
)
@click.pass_obj
def clients(installation: Installation, address: str | None) -> None:
    """Print what Bazel, recc, Pants and bots need.

    These are lines for .bazelrc, recc.conf and pants.toml, and the command of a bot.
    """
    from bots.farm import clients
    from bots.farm.settings import door_address

    if address is not None:
        try:
            door_address(address)
        except ValueError as error:
            raise BadInput("--address", str(error)) from None
    own, kept, anonymous = (installation.settings.farm, *(installation.data / each for each in ("farm.url", ANONYMOUS)))
    if address is None and kept.is_file() and anonymous.is_file():
        own = own.model_copy(update={"anonymous": anonymous.read_text().strip()})
    configured = own.bots_reach or f"{'grpc' if own.tls_cert is None else 'grpcs'}://{own.host}:{own.port}"
    click.echo(clients.lines(address or (kept.read_text().strip() if kept.is_file() else configured), own))


@farm.command(name="demo")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@pass_meta_key(PARTS)
def demo(parts: Parts, /, as_json: bool) -> None:
    """Build a C program twice, while a bot and the door are killed.

    It runs on a pool of its own, in a temporary directory and without a configuration file, unless --data or --config
    say otherwise.
    """
    demo, programs = _module("demo"), _module("storage.programs")
    programs.require(programs.STORAGE, programs.RUNNER, programs.BUBBLEWRAP)
    with parts.demo_pool(DEMO_BOTS) as pool:

        def kill(name: str) -> None:
            os.kill(pool.processes()[name], signal.SIGKILL)

        demo.run(pool.farm_url, kill, victims=(DEMO_BOTS[0], DOOR), as_json=as_json)


def _run_door(
    installation: Installation,
    parts: Parts,
    own: "FarmSettings",
    storage: Path | None,
    metrics_at: tuple[str, int] | None,
    stack: ExitStack,
) -> int:
    """Run the farm door until a signal comes. storage: the directory of storage of its own; None = that of `own`.

    metrics_at: the address and port of the metrics; None = they are not served.
    """
    from bots.farm.settings import timing_of_workers
    from bots.gateway.identity import verifier
    from schema.postgres.notify import Wakeups

    settings = installation.settings
    parts.log_to_stderr(settings.log.level.upper(), settings.log.format)
    server = _module("server")
    beside = None
    if storage is not None:
        if own.cas is not None:
            raise BadInput("--storage", "is in place of --cas: give one of them")
        address, beside = stack.enter_context(_module("storage.own_storage").running(storage.absolute()))
        own = own.model_copy(update={"cas": address})

    def on_ready(address: str) -> None:
        parts.keep(installation.data / "farm.url", address)
        if own.anonymous is None:
            (installation.data / ANONYMOUS).unlink(missing_ok=True)
        else:
            parts.keep(installation.data / ANONYMOUS, own.anonymous)
        structlog.get_logger().info("the farm door listens", address=address, using=installation.described)

    database = stack.enter_context(installation.ready_database("farm"))
    wakeups = Wakeups(database)
    wakeups.start()
    stack.callback(wakeups.stop)
    door = server.Door(
        database,
        own,
        timing=settings.timing,
        wakeups=wakeups,
        submit=parts.submit(database),
        why=parts.why,
        signed=verifier(settings.identity),
        sync_service=parts.sync_service(database, timing_of_workers(settings.timing), stack),
    )
    if metrics_at is not None:
        try:
            door.metrics.serve(*metrics_at)
        except (OSError, UnicodeError) as error:
            raise metrics_refusal(metrics_at, error) from None
    gc_tuning.collect_as_usual()
    return 130 if server.run(door, on_ready, beside=beside) is signal.SIGINT else 0


def _module(name: str) -> Any:
    """Import a module of the farm door, which needs an extra. Raises LeaseholdError without it."""
    # This process makes others by exec alone, about which gRPC would write a line each time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        return import_module(f"bots.farm.{name}")
    except ModuleNotFoundError as error:
        raise LeaseholdError(f"the farm door needs {error.name}: pip install 'leasehold[farm]'") from None
