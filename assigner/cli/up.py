"""`leasehold up`, a whole pool on this machine, and `leasehold assign`, one assigner process of a pool."""

import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import click
import structlog
from leasehold.errors import BadInput, LeaseholdError
from prometheus_client import start_http_server

from assigner import logs
from assigner.cli.operator import pass_installation
from assigner.cli.output import as_json
from assigner.config.loading import Reloader
from assigner.loops import Signals, exit_within, standing
from assigner.process.app_files import AppFiles
from assigner.process.assign import GARBAGE, STOP_WITHIN, AssignerProcess
from assigner.process.local_pool import CONSOLE_HOST, OPERATOR_TOKEN, LocalBot, LocalPool, check_app, local_pool
from assigner.settings import Installation, PoolSettings
from schema.gc_tuning import infrequent_gc
from schema.readable import print_json, print_line, tell
from schema.validation import FARM, OF_FARM, metrics_place, metrics_refusal

#: Port of the console unless another is given; `leasehold console` has the same.
CONSOLE_PORT = 7412

#: Port of the farm door unless another is given; the section [farm] has the same.
FARM_PORT = 8980
#: Seconds after a signal in which an assigner process ends: its loops, and then its last sign of life.
END_WITHIN = STOP_WITHIN + 5.0

log = structlog.get_logger()


@click.command()
@click.option("--bots", type=click.IntRange(0, 1000), default=3, show_default=True, help="Bot processes.")
@click.option("--assigners", type=click.IntRange(1, 100), default=2, show_default=True, help="Assigner processes.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the gateway; 0 = any free one [as configured: 7411]."
)
@click.option(
    "--console",
    type=click.IntRange(0, 65535),
    metavar="[PORT]",
    is_flag=False,
    flag_value=CONSOLE_PORT,
    help=f"Also run the web console, on this port of {CONSOLE_HOST}; 0 = any free one [{CONSOLE_PORT}].",
)
@click.option(
    "--farm",
    type=click.IntRange(0, 65535),
    metavar="[PORT]",
    is_flag=False,
    flag_value=FARM_PORT,
    help=f"Also run a farm door on this port of {CONSOLE_HOST} [{FARM_PORT}], storage, and a bot farm-1 for actions.",
)
@click.option("--app", metavar="MODULE:POOL", help="Also run the tasks of this pool, by one bot named app-1.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), metavar="N", help="With --app: tasks at once [one per core]."
)
@click.option("--reload", is_flag=True, help="With --app: start its bot again when a file of the app changes.")
@as_json
@pass_installation
def up(
    installation: Installation,
    bots: int,
    assigners: int,
    port: int | None,
    console: int | None,
    farm: int | None,
    app: str | None,
    concurrency: int | None,
    reload: bool,
    as_json: bool,
) -> int:
    """Run a whole pool on this machine until Ctrl-C: PostgreSQL, assigners, gateway and bots.

    SIGTERM ends it too, and so does the end of its terminal; `nohup leasehold up` goes on without one.
    """
    logs.to_stderr("WARNING")
    _require("nicegui", console, extra="console", of="NiceGUI")
    _require("grpc", farm, extra="farm", of="gRPC")
    if concurrency is not None and app is None:
        raise BadInput("--concurrency", "means nothing without --app")
    if reload and app is None:
        raise BadInput("--reload", "means nothing without --app")
    names = [LocalBot(name=f"bot-{n}") for n in range(1, bots + 1)]
    names += [] if farm is None else [farm_bot("farm-1", capacity=os.cpu_count() or 1)]
    if app is not None:
        names.append(LocalBot(name="app-1", app=app, concurrency=concurrency or os.cpu_count() or 1))
    seen = installation.settings.seen_by_tasks(installation.environ)
    with Signals(*_ending()) as signals:

        def rest(seconds: float) -> None:
            if (number := signals.wait(seconds)) is not None:
                raise Stopped(number)

        is_up = False
        try:
            if app is not None:
                check_app(app, seen, unseen=installation.environ.keys() - seen.keys(), rest=rest)
            with local_pool(
                installation,
                assigners=assigners,
                bots=names,
                report=tell,
                chance=random.SystemRandom(),
                port=port,
                console=console,
                farm=farm,
                rest=rest,
            ) as pool:
                is_up = True
                if as_json:
                    parts = {"console": pool.console_url, "farm": pool.farm_url}
                    found = {"url": pool.url, "data": pool.data, "processes": pool.processes()}
                    print_json(found | {name: url for name, url in parts.items() if url is not None})
                else:
                    _greet(_welcome(pool, installation, commands=bots > 0, app=app))
                files = AppFiles(app, seen, report=tell, rest=rest) if reload and app is not None else None
                while True:
                    rest(pool.run_once())
                    if files is not None and files.run_once():
                        pool.reload_app()
        except Stopped as stopped:
            return _end(stopped, is_up=is_up)


def _ending() -> list[signal.Signals]:
    """Return the signals that end a pool: also that its terminal closes, unless `nohup` has detached it."""
    found = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def farm_bot(name: str, *, capacity: int) -> LocalBot:
    """Return a bot that runs actions of the farm door, and nothing else. capacity: how many at once."""
    return LocalBot(name=name, capacity=capacity, properties={FARM: OF_FARM}, exclusive=(FARM,))


def _require(module: str, port: int | None, *, extra: str, of: str) -> None:
    """Raise LeaseholdError if an optional part shall run, which has a port then, and its package is not installed."""
    if port is not None and find_spec(module) is None:
        raise LeaseholdError(f"the {extra} needs {of}: pip install 'leasehold[{extra}]'")


class Stopped(Exception):
    """A signal asked this process to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def _end(stopped: Stopped, *, is_up: bool) -> int:
    """Say what a signal has stopped, the pool or only its start, and return the exit code."""
    tell(
        "everything has stopped; no job is lost, and `leasehold up` continues with them"
        if is_up
        else "stopped before the pool was up; nothing runs, and `leasehold up` begins the start again"
    )
    return 130 if stopped.number is signal.SIGINT else 0


def _welcome(pool: LocalPool, installation: Installation, *, commands: bool, app: str | None) -> list[str]:
    """Say what runs and what to do next. commands: bots run commands; app: what a bot runs the tasks of."""
    lines = [f"  {name:12} process {pid}" for name, pid in pool.processes().items()]
    lines = [f"The pool is up at {pool.url}, its data and logs are in {pool.data}.", *lines, ""]
    if pool.console_url is not None:
        lines += [f"Its console is at {pool.console_url}; log in with the token in {pool.data / OPERATOR_TOKEN}.", ""]
    if pool.farm_url is not None:
        lines += [f"Build clients reach it at {pool.farm_url}; `leasehold farm clients` prints what they need.", ""]
    lines.append("In another terminal:")
    if not installation.at_home:
        lines.append(f"  export LEASEHOLD_DATA={pool.data}")
    tries = ["  leasehold submit --wait -- echo hello"] if commands else []
    lines += [*tries, "  leasehold status", "  leasehold bots list", ""]
    if app is not None:
        lines += [f"Programs call the tasks of {app} by `defer`; see `leasehold help tasks`.", ""]
    lines += _reach(installation.settings, commands=commands, tasks=app is not None)
    where = "PostgreSQL with it" if installation.is_embedded else "not the database"
    return [*lines, f"Ctrl-C stops everything, {where}; running jobs get 10 s, then they go back to the queue."]


def _greet(lines: Iterable[str]) -> None:
    """Print the lines; sentences go on below on a narrow terminal, and what is to be copied stays whole."""
    for line in lines:
        click.echo(line) if line.startswith("  ") or not line else print_line("", line)


def _reach(settings: PoolSettings, *, commands: bool, tasks: bool) -> list[str]:
    """Say what jobs can reach on this machine: once if it is the same for commands and for tasks."""
    of_jobs, of_tasks = settings.job_reach if commands else None, settings.task_reach if tasks else None
    if of_jobs is not None and of_tasks is not None and of_tasks.removeprefix("tasks") == of_jobs.removeprefix("jobs"):
        of_tasks = None
    told = [each for each in (of_jobs, of_tasks) if each is not None]
    return [line for each in told for line in (f"{each[:1].upper()}{each[1:]}; see `leasehold help security`", "")]


@click.command()
@click.option("--name", metavar="NAME", help="Name of this process in decisions and logs [the host's name].")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics, /healthz and /readyz.")
@click.option("--metrics-host", metavar="ADDRESS", help="The address to serve them on [127.0.0.1].")
@pass_installation
def assign(installation: Installation, name: str | None, metrics_port: int | None, metrics_host: str | None) -> int:
    """Run one assigner process: all configured assigners and upkeep."""
    place = metrics_place(metrics_host, metrics_port)
    logs.to_stderr(installation.settings.log.level.upper(), installation.settings.log.format)
    name = name or socket.gethostname()
    with (
        Signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals,
        installation.ready_database(f"assign {name}") as database,
        infrequent_gc(*GARBAGE),
    ):
        reloader = Reloader(
            installation.config, installation.sections, installation.environ, current=installation.settings
        )
        if place is not None:
            _serve_metrics(place)
        process = AssignerProcess(database, reloader, name=name, chance=random.SystemRandom())
        process.start()
        log.info("assigners run", name=name, using=installation.described)
        try:
            while (number := signals.wait(None)) is signal.SIGHUP:
                process.reload()
        finally:
            exit_within(END_WITHIN, 1)
            process.stop()
        log.info("assigners stopped", name=name)
        return 130 if number is signal.SIGINT else 0


def _serve_metrics(place: tuple[str, int]) -> None:
    """Serve metrics at /metrics and /, and whether this process lives (/healthz) and its loops go on (/readyz)."""
    host, port = place
    try:
        server, _ = start_http_server(port, addr=host)
    except (OSError, UnicodeError) as error:
        raise metrics_refusal(place, error) from None
    page = server.get_app()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path in ("/", "/metrics") and page is not None:
            return page(environ, start)
        status, told = "404 Not Found", b'{"status":"not found"}'
        if path in ("/healthz", "/readyz"):
            found = standing() if path == "/readyz" else []
            status = "503 Service Unavailable" if found else "200 OK"
            said = f"loops of this process stand still: {', '.join(found)}" if found else "ok"
            told = json.dumps({"status": said}).encode()
        start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(told)))])
        return [told]

    server.set_app(answer)
