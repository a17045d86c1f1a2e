"""Runs of the other contenders: peers as processes of their own, and raw SQL, on the same server."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.fixtures import blank
from ops.bench.measure import Costs, Stretch
from ops.bench.raw_sql import floor

HERE = Path(__file__).parent
#: Directory of the peers' environments, relative to the working directory.
ENVIRONMENTS = Path(".bench")
PATIENCE = 1800.0

#: What each contender leaves out that Leasehold does in the same run; shown in the table.
LACKS = {
    "buildgrid": "one job in a transaction; completions are not fenced by attempt",
    "pgqueuer": "no placement, no quotas per tenant, completes by id without a fence",
    "procrastinate": "no placement, no quotas, completes by id without a fence",
    "floor": "bare tables: no events, fences, quotas or placement",
}


def install(peers: Sequence[str]) -> None:
    """Install the peers' environments, which are kept, and say on standard error which versions these are.

    Raises SystemExit if that fails; the reason has been said.
    """
    program = [sys.executable, HERE / "install.py", "--into", ENVIRONMENTS, *peers]
    if subprocess.run(program, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(1)


def version_of(name: str) -> str:
    """Return the version of a peer that is installed."""
    program = f"from importlib.metadata import version; print(version({name!r}))"
    command = [ENVIRONMENTS / name / "bin" / "python", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def peer(name: str, shape: str, **options: int) -> Callable[[str, bool], Stretch]:
    """Return a measurement of a peer. A watched run does nothing: our invariants do not apply to it."""

    def work(server: str, watched: bool) -> Stretch:
        if watched:
            return Stretch()
        found = _ran(name, shape, server, options)
        costs = Costs(transactions=found.get("transactions", 0), wal_bytes=found.get("wal_bytes", 0))
        return Stretch(found["jobs"], found["seconds"] + found.get("submit_seconds", 0.0), costs)

    return work


def latency(name: str, server: str, samples: int) -> dict[str, float]:
    """Return the percentiles of a peer's latency in milliseconds, as `p50_ms` and `p99_ms`."""
    return _ran(name, "latency", server, {"jobs": samples})


def _ran(name: str, shape: str, server: str, options: Mapping[str, int]) -> dict[str, Any]:
    """Run a peer's script and return what it printed. Raises SystemExit with its reason if it fails."""
    with blank(server, "peer") as url:
        program = [ENVIRONMENTS / name / "bin" / "python", "-B", HERE / f"{name}.py", shape, "--dsn", url]
        given = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        done = subprocess.run([*program, *given], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise SystemExit(f"error: {name} {shape}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def floor_of(shape: str, *, batch: int, jobs: int) -> Callable[[str, bool], Stretch]:
    """Return a measurement of the same work by raw SQL on bare tables."""
    act = {"submit": floor.submit, "assign": floor.assign, "cycle": floor.cycle}[shape]

    def work(server: str, watched: bool) -> Stretch:
        if watched:
            return Stretch()
        with blank(server, "peer") as url:
            return act(url, processes=2, batch=batch, jobs=jobs)

    return work
