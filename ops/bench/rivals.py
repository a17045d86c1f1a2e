"""The peers and the floor: the same shapes by others, each run as a process of its own on the same server."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import floor
from meters import Costs, Stretch
from pools import blank

HERE = Path(__file__).parent
#: Where the peers' environments are made, from where the benchmark is called.
ENVIRONMENTS = Path(".bench")
PATIENCE = 1800.0

#: What the peers lack that we do in the same run, for the table.
LACKS = {
    "buildgrid": "one job in a transaction; completions are not fenced by attempt",
    "pgqueuer": "no placement, no quotas per tenant, completes by id without a fence",
    "procrastinate": "no placement, no quotas, completes by id without a fence",
    "floor": "bare tables: no events, fences, quotas or placement",
}


def install(peers: Sequence[str]) -> None:
    """Make the peers' environments; they stay. Raises CalledProcessError without a package index."""
    subprocess.run([sys.executable, HERE / "peers" / "install.py", "--into", ENVIRONMENTS, *peers], check=True)


def peer(name: str, shape: str, **options: int) -> Callable[[str, bool], Stretch]:
    """One measurement of that peer. Its watched run measures nothing: our invariants are not its own."""

    def work(server: str, watched: bool) -> Stretch:
        if watched:
            return Stretch()
        with blank(server, "peer") as url:
            program = [ENVIRONMENTS / name / "bin" / "python", "-B", HERE / "peers" / f"{name}.py", shape, "--dsn", url]
            given = [part for key, value in options.items() for part in (f"--{key}", str(value))]
            done = subprocess.run([*program, *given], capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise SystemExit(f"error: {name} {shape}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1])
        costs = Costs(transactions=found["transactions"], wal_bytes=found["wal_bytes"])
        return Stretch(found["jobs"], found["seconds"] + found.get("submit_seconds", 0.0), costs)

    return work


def floor_of(shape: str, *, batch: int, jobs: int) -> Callable[[str, bool], Stretch]:
    """The same by raw SQL on bare tables."""
    act = {"submit": floor.submit, "assign": floor.assign, "cycle": floor.cycle}[shape]

    def work(server: str, watched: bool) -> Stretch:
        if watched:
            return Stretch()
        with blank(server, "peer") as url:
            return act(url, processes=2, batch=batch, jobs=jobs)

    return work
