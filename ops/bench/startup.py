"""Measure the processor time that a gateway takes to start, and that callers' commands take from start to end.

Real processes run on a private PostgreSQL: a gateway until it accepts connections, and commands that call a running
gateway. They take turns, and one run before them writes the compiled modules. With --imports it only shows which
modules cost most when the program for one command is loaded.

    python -m ops.bench.startup [--runs 5] [--only TEXT] [--imports gateway] [--json]
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from leasehold.errors import LeaseholdError
from rich.console import Console

from ops.bench.fixtures import opened
from ops.bench.measure import blank_table, cpu_seconds
from schema import clock
from schema.postgres import embedded, migrate
from schema.tenancy import tokens

#: Seconds within which a process must be ready or a command must end.
PATIENCE = 60.0
#: Seconds between two looks whether a gateway is ready. It bounds the error of the figures.
LOOK = 0.005
#: Modules that --imports shows.
SHOWN = 60
#: The figure of the gateway.
GATEWAY = "gateway"
#: Commands that are measured from start to end. JOB stands for the id of a job.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "--version": ("--version",),
    "submit": ("submit", "--", "true"),
    "show": ("show", "JOB"),
    "list": ("list",),
    "status": ("status", "--json"),
    "cancel": ("cancel", "JOB"),
    "instance list": ("instance", "list"),
}
#: A line that `-X importtime` writes: microseconds of the module itself, of it with its imports, indented name.
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)")


@dataclass
class Start:
    """Seconds of processor time and seconds that have passed, of each run."""

    processor: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the median, the least and the largest processor time, and the median of the time that passed."""
        return {
            "cpu_seconds": round(statistics.median(self.processor), 3),
            "cpu_least": round(min(self.processor), 3),
            "cpu_most": round(max(self.processor), 3),
            "seconds": round(statistics.median(self.passed), 3),
        }


@dataclass(frozen=True)
class Said:
    """What a command wrote."""

    output: str
    errors: str


class Installation:
    """A data directory on a fresh database; starts the program there."""

    def __init__(self, data: Path, database_url: str) -> None:
        self.data, self.log = data, data / "gateway.log"
        #: Options of the interpreter.
        self.options: tuple[str, ...] = ()
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self._environ |= {"LEASEHOLD_DATABASE_URL": database_url, "LEASEHOLD_GATEWAY_PORT": "0"}
        # As an installed program, which is compiled once; without this, compiling may be most of a start.
        self._environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environ["PYTHONPYCACHEPREFIX"] = str(data / "compiled")
        with opened(database_url) as database:
            migrate.upgrade(database)
            token = database.run(lambda connection: tokens.create(connection, tokens.Kind.OPERATOR))
        path = data / "operator.token"
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        (data / "leasehold.toml").touch()

    @contextmanager
    def gateway(self, figures: Start | None = None) -> Iterator[None]:
        """Run a gateway inside the block; note what its start took."""
        address = self.data / "gateway.url"
        address.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            began = clock.monotonic()
            process = self._start("gateway", output=log)
        try:
            while not (address.exists() and address.read_text()):
                if process.poll() is not None or clock.monotonic() - began > PATIENCE:
                    raise LeaseholdError(f"the gateway did not start: {self.log.read_text()[-500:]}")
                clock.sleep(LOOK)
            if figures is not None:
                figures.processor.append(cpu_seconds(process.pid))
                figures.passed.append(clock.monotonic() - began)
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE)

    def run(self, *arguments: str, figures: Start | None = None) -> Said:
        """Run a command to its end and note what it took. Raises LeaseholdError."""
        before, began = os.times(), clock.monotonic()
        process = self._start(*arguments, output=subprocess.PIPE)
        output, errors = process.communicate(timeout=PATIENCE)
        after = os.times()
        if process.returncode:
            raise LeaseholdError(f"leasehold {' '.join(arguments)}: {errors.decode()[-500:]}")
        if figures is not None:
            used = after.children_user + after.children_system - before.children_user - before.children_system
            figures.processor.append(used)
            figures.passed.append(clock.monotonic() - began)
        return Said(output.decode(), errors.decode())

    def _start(self, *arguments: str, output: Any) -> subprocess.Popen[bytes]:
        program = (sys.executable, *self.options, "-m", "assigner.cli.main", "--data", str(self.data))
        program += ("--config", str(self.data / "leasehold.toml"))
        errors = subprocess.PIPE if output is subprocess.PIPE else output
        return subprocess.Popen(
            (*program, *arguments), env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )


@contextmanager
def installation() -> Iterator[Installation]:
    """Make an installation on a private server."""
    data = embedded.scratch("leasehold-bench-")
    try:
        with embedded.serve(data) as server:
            yield Installation(data, server.url)
    finally:
        shutil.rmtree(data, ignore_errors=True)


def measure(ours: Installation, runs: int, *, only: str | None) -> dict[str, Start]:
    """Start everything whose name contains `only`, `runs` times in turns."""
    found = {name: Start() for name in (GATEWAY, *COMMANDS) if only is None or only in name}
    with ours.gateway():
        job = ours.run("submit", "--", "true").output.split()[0]
        for number in range(runs + 1):
            for name in found.keys() & COMMANDS.keys():
                arguments = [job if word == "JOB" else word for word in COMMANDS[name]]
                ours.run(*arguments, figures=found[name] if number else None)
    for _ in range(runs if GATEWAY in found else 0):
        with ours.gateway(found[GATEWAY]):
            pass
    return found


def imports(ours: Installation, name: str) -> list[tuple[str, float, float]]:
    """Return module, milliseconds of its own, milliseconds with its imports, of one start; the costliest first."""
    with ours.gateway():
        ours.options = ("-X", "importtime")
        if name != GATEWAY:
            told = ours.run(*COMMANDS[name]).errors
    if name == GATEWAY:
        with ours.gateway():
            told = ours.log.read_text()
    found = [
        (module, int(own) / 1000, int(whole) / 1000)
        for own, whole, module in (match.groups() for match in _IMPORT.finditer(told))
    ]
    return sorted(found, key=lambda row: -row[2])


def _show_imports(rows: list[tuple[str, float, float]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({name: {"own_ms": own, "ms": whole} for name, own, whole in rows}))
        return
    shown = blank_table("Imports, milliseconds", "module", "itself", "with its imports")
    for name, own, whole in rows[:SHOWN]:
        shown.add_row(name, f"{own:.1f}", f"{whole:.1f}")
    Console().print(shown)


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--runs", type=click.IntRange(1, 1000), default=5, show_default=True, help="Starts of each process.")
@click.option("--only", metavar="TEXT", help="Measure only what has this text in its name.")
@click.option(
    "--imports",
    "of",
    type=click.Choice([GATEWAY, *(name for name, words in COMMANDS.items() if "JOB" not in words)]),
    help="Show the costliest imports of one start instead.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(runs: int, *, only: str | None, of: str | None, as_json: bool) -> None:
    try:
        with installation() as ours:
            if of is not None:
                _show_imports(imports(ours, of), as_json=as_json)
                return
            found = {name: each.figures() for name, each in measure(ours, runs, only=only).items()}
    except LeaseholdError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if not found:
        raise click.UsageError(f"nothing has '{only}' in its name")
    if as_json:
        click.echo(json.dumps(found))
        return
    shown = blank_table("Processor time of a start", "start of", "processor, s", "least", "most", "passed, s")
    for name, figures in found.items():
        shown.add_row(name, *(f"{value:.3f}" for value in figures.values()))
    Console().print(shown)


if __name__ == "__main__":
    main()
