"""One assigner process: every configured assigner thread, upkeep, and the configuration kept current."""

import random
import signal
import socket
from dataclasses import dataclass

import click
import structlog
from prometheus_client import start_http_server

from assigner import logs
from assigner.config import Reloader
from assigner.cycle import PriorityAgeAssigner
from assigner.installation import Installation, PoolSettings
from assigner.loops import Loop
from assigner.operate import pass_installation
from assigner.signals import Signals
from assigner.upkeep import Upkeep
from schema import clock
from schema.engine import Database
from schema.errors import BadInput
from schema.wakeups import Wakeups

#: Seconds a loop gets to end its transaction at shutdown; more than the statement timeout would not help.
STOP_WITHIN = 10.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Placed:
    """An assigner and the number of the `[[assigners]]` entry that it runs with."""

    entry: int
    assigner: PriorityAgeAssigner


class AssignerProcess:
    """The loops of one process. `start` and `stop` may be called once each; `reload` after a SIGHUP."""

    def __init__(
        self, database: Database, reloader: Reloader[PoolSettings], *, name: str, chance: random.Random
    ) -> None:
        settings = reloader.current
        self._reloader = reloader
        self._wakeups = Wakeups(database, chance=_seeded(chance))
        self._upkeep = Upkeep(database, settings.upkeep, timing=settings.timing, name=name, now=clock.monotonic)
        self._placed: list[Placed] = []
        self._loops: list[Loop] = []
        for entry, each in enumerate(settings.assigners):
            for thread in range(each.threads):
                assigner = PriorityAgeAssigner(
                    database,
                    each,
                    timing=settings.timing,
                    chance=_seeded(chance),
                    name=f"{name}/{entry}.{thread}",
                    now=clock.monotonic,
                )
                self._placed.append(Placed(entry, assigner))
                self._loops.append(
                    Loop(
                        f"assigner-{entry}-{thread}",
                        assigner.run_once,
                        chance=_seeded(chance),
                        signal=self._wakeups.signal("jobs"),
                        idle=lambda: self._wakeups.idle("jobs"),
                        on_error_delay=each.interval,
                    )
                )
        self._loops.append(Loop("upkeep", self._upkeep.run_once, chance=_seeded(chance)))
        self._config_loop = Loop("config", self._look_at_configuration, chance=_seeded(chance))
        self._loops.append(self._config_loop)

    def start(self) -> None:
        self._wakeups.start()
        for loop in self._loops:
            loop.start()

    def reload(self) -> None:
        """Read the configuration again at once."""
        self._reloader.request()
        self._config_loop.wake()

    def stop(self) -> None:
        """Let every loop end what it does, then return. What a killed loop would leave is a transaction undone."""
        deadline = clock.monotonic() + STOP_WITHIN
        for loop in self._loops:
            loop.stop(max(0.0, deadline - clock.monotonic()))
        self._wakeups.stop()

    def _look_at_configuration(self) -> float:
        before = self._reloader.current
        delay = self._reloader.run_once()
        now = self._reloader.current
        if now is not before:
            self._reconfigure(before, now)
        return delay

    def _reconfigure(self, before: PoolSettings, now: PoolSettings) -> None:
        for each in self._placed:
            if each.entry < len(now.assigners):
                each.assigner.reconfigure(now.assigners[each.entry])
        self._upkeep.reconfigure(now.upkeep)
        threads = [[each.threads for each in settings.assigners] for settings in (before, now)]
        if threads[0] != threads[1] or (before.database, before.timing) != (now.database, now.timing):
            log.warning("some changes need a restart", sections="database, timing, number of assigners and threads")


@click.command()
@click.option("--name", metavar="NAME", help="Of this process in decisions and logs [the host's name].")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics on 127.0.0.1.")
@pass_installation
def assign(installation: Installation, name: str | None, metrics_port: int | None) -> int:
    """Run one assigner process: all configured assigners and upkeep."""
    logs.to_stderr("INFO")
    name = name or socket.gethostname()
    with (
        Signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals,
        installation.ready_database(f"assign {name}") as database,
    ):
        reloader = Reloader(
            installation.config, installation.sections, installation.environ, current=installation.settings
        )
        if metrics_port is not None:
            _serve_metrics(metrics_port)
        process = AssignerProcess(database, reloader, name=name, chance=random.SystemRandom())
        process.start()
        log.info("assigners run", name=name)
        try:
            while (number := signals.wait(None)) is signal.SIGHUP:
                process.reload()
        finally:
            process.stop()
        log.info("assigners stopped", name=name)
        return 130 if number is signal.SIGINT else 0


def _serve_metrics(port: int) -> None:
    try:
        start_http_server(port, addr="127.0.0.1")
    except OSError as error:
        raise BadInput("--metrics-port", f"cannot listen on 127.0.0.1:{port}: {error.strerror}") from None


def _seeded(chance: random.Random) -> random.Random:
    """A source for one thread alone, so that threads neither share state nor march in step."""
    return random.Random(chance.getrandbits(64))
