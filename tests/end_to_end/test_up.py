"""`leasehold up`: a whole pool from one command, and nothing of it left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from schema.postgres import embedded
from tests.support.patience import eventually

LEASEHOLD = Path(sys.executable).parent / "leasehold"
#: Seconds a pool gets to start on a machine that runs other tests as well.
STARTS_WITHIN = 120.0


@dataclass
class Up:
    """A running `leasehold up`."""

    popen: subprocess.Popen[str]
    told: dict[str, Any]

    @property
    def processes(self) -> dict[str, int]:
        found: dict[str, int] = self.told["processes"]
        return found


class Home:
    """A data directory of its own, and what is started in it. `program`: that of the fork server."""

    def __init__(self, data: Path, program: Path) -> None:
        self.data, self.program = data, program
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self.environ = {**kept, "LEASEHOLD_DATA": str(data), "LEASEHOLD_TIMING_TTL": "6", "LEASEHOLD_TIMING_SYNC": "1"}
        self.environ["LEASEHOLD_BOT_DRAIN_SECONDS"] = "1"

    def up(self, *options: str) -> Up:
        popen = subprocess.Popen(
            [LEASEHOLD, "up", "--json", "--port", "0", "--bots", "1", "--assigners", "1", *options],
            cwd=self.data, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=(self.data / "said").open("w"), text=True,
        )  # fmt: skip
        assert popen.stdout is not None
        line = popen.stdout.readline()
        assert line, f"`leasehold up` ended with {popen.wait()}"
        return Up(popen, json.loads(line))

    def said(self) -> list[str]:
        """What the last pool that was started here has said to people, without the times."""
        return [re.sub(r"^ *\d+\.\d s  ", "", line) for line in (self.data / "said").read_text().splitlines()]

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.program, *arguments], cwd=self.data, env=self.environ,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STARTS_WITHIN, check=False,
        )  # fmt: skip

    def here(self) -> list[int]:
        """Processes whose command line names the data directory: ours, PostgreSQL and commands of jobs."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    named = os.fsencode(self.data) in (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if named:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def home(leasehold: Path) -> Iterator[Home]:
    made = Home(embedded.scratch("leasehold-up-"), leasehold)
    yield made
    for pid in made.here():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not made.here())
    shutil.rmtree(made.data)


@pytest.mark.timeout(600)
def test_a_pool_runs_jobs_stops_on_ctrl_c_goes_on_later_and_dies_with_its_parent(home: Home) -> None:
    up = home.up()
    assert set(up.processes) == {"assigner-1", "gateway", "bot-1"}
    gateway = f"the gateway answers at {up.told['url']}; starting 1 bot"
    start = ["starting PostgreSQL", "starting 1 assigner and the gateway", gateway]
    assert [step.partition(" schema")[0] for step in home.said()] == [
        f"using database embedded, in {home.data}; configuration none",
        f"creating the database cluster in {home.data / 'pg'}", start[0],
        "creating the tables of", *start[1:],
    ]  # fmt: skip
    for name in ("operator.token", "bot.token"):
        assert (home.data / name).stat().st_mode & 0o777 == 0o600
    done = home.run("submit", "--wait", "--json", "--", "echo", "hello")
    assert done.returncode == 0, done
    job = json.loads(done.stdout)[0]["id"]
    assert home.run("logs", job).stdout == "hello\n"
    with psycopg.connect(home.run("db", "url").stdout.strip()) as connection:
        assert connection.execute("SELECT state FROM leasehold.jobs").fetchall() == [("succeeded",)]
    second = home.run("up", "--port", "0")
    assert (second.returncode, second.stderr) == (
        2, f"error: a pool already runs in {home.data}; stop it, or give another --data\n"
    )  # fmt: skip

    # Ctrl-C in the middle of a job: it goes back to the queue, and the next `up` runs it again.
    ran = home.data / "ran"
    ran.touch()
    ran.chmod(0o666)  # for whatever account the job has
    script = f"echo run >> {ran}; test $(wc -l < {ran}) -gt 1 || exec sleep 600"
    long = home.run("submit", "--", "sh", "-c", script).stdout.strip()
    eventually(ran.read_text, STARTS_WITHIN)
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(STARTS_WITHIN) == 130
    assert home.here() == []
    assert home.said()[-2].startswith("stopping"), "what takes time is told before it does"

    tokens = (home.data / "operator.token").read_text()
    up = home.up()
    assert home.said()[1:3] == start[:2], "what is there already is neither created nor upgraded"
    assert (home.data / "operator.token").read_text() == tokens
    assert home.run("wait", long, "--timeout", "60").returncode == 0
    assert json.loads(home.run("show", job, "--json").stdout)["state"] == "succeeded"
    verified = home.run("db", "verify")
    assert verified.returncode == 0, verified

    up.popen.kill()
    up.popen.wait()
    pids = up.processes.values()
    eventually(lambda: not set(pids) & set(home.here()), what="the children have ended")
    eventually(lambda: home.here() == [], what="PostgreSQL has been stopped by its last user")
    stopped = home.run("db", "url")
    assert (stopped.returncode, stopped.stdout) == (3, ""), stopped


@pytest.mark.timeout(600)
def test_the_console_is_a_process_of_the_pool_that_is_started_again_on_the_same_port(home: Home) -> None:
    pytest.importorskip("nicegui", reason="the console needs the extra leasehold[console]")
    up = home.up("--console", "0")
    assert set(up.processes) == {"assigner-1", "gateway", "bot-1", "console"}
    assert home.said()[-1] == f"the console answers at {up.told['console']}"
    with httpx.Client(base_url=up.told["console"], headers={"Origin": up.told["console"]}, trust_env=False) as http:

        def logged_in() -> bool:
            token = (home.data / "operator.token").read_text()
            with suppress(httpx.TransportError):
                answer = http.post("/login", data={"token": token})
                return (answer.status_code, answer.headers["location"]) == (303, "/")
            return False

        assert logged_in()
        os.kill(up.processes["console"], signal.SIGKILL)
        eventually(lambda: home.said()[-1] == "console runs again", STARTS_WITHIN)
        eventually(logged_in, STARTS_WITHIN)
    port = up.told["console"].rpartition(":")[2]
    second = home.run("--data", str(home.data / "second"), "up", "--console", port)
    assert second.returncode == 2
    assert second.stderr.startswith(f"error: --console: cannot listen on 127.0.0.1:{port}: ")
    assert len(second.stderr.splitlines()) == 1
    assert not (home.data / "second").exists()
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(STARTS_WITHIN) == 130
    assert home.here() == []


APP = """
import leasehold

pool = leasehold.Pool.from_env()

@pool.periodic("0 4 * * *", timezone="UTC")
@pool.task
def clean() -> str:
    return "cleaned"

@pool.task(retries=3)
def charge(order: int) -> str:
    return f"order {order} charged"

if __name__ == "__main__":
    print(charge.defer(7).result())
"""


def test_a_pool_of_an_app_alone_proposes_no_command_and_says_what_its_tasks_reach(home: Home) -> None:
    (home.data / "shop.py").write_text(APP)
    up = subprocess.Popen(
        [LEASEHOLD, "up", "--port", "0", "--bots", "0", "--assigners", "1", "--app", "shop:pool"],
        cwd=home.data, env=home.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert up.stdout is not None
    lines = []
    while lines[-1:] == [] or not lines[-1].startswith("Ctrl-C"):
        lines.append(up.stdout.readline())
        assert lines[-1], "it has ended"
    said = "".join(lines)
    assert "submit --wait" not in said, "no bot would run it"
    assert "tasks of shop:pool: jobs run as " in said
    assert "under an account of its own" not in said, "tasks share the processes of one account"
    up.send_signal(signal.SIGINT)
    assert up.wait(STARTS_WITHIN) == 130


def test_an_app_is_served_from_the_start_with_its_schedules_and_again_after_its_bot_was_killed(home: Home) -> None:
    (home.data / "shop.py").write_text(APP)
    for wrong, said in (
        (("--app", "shop:pul"), "error: --app: 'shop:pul' cannot be used: "),
        (("--app", "shop"), "error: app: "),
        (("--concurrency", "2"), "error: --concurrency: means nothing without --app"),
    ):
        refused = home.run("up", *wrong)
        assert (refused.returncode, refused.stderr.startswith(said)) == (2, True), refused.stderr
    assert not home.here(), "nothing was started"
    up = home.up("--app", "shop:pool", "--concurrency", "2")
    assert "1 schedule of shop:pool applied" in home.said()
    assert "clean" in home.run("schedule", "list").stdout

    def charged() -> bool:
        done = subprocess.run(
            [sys.executable, "shop.py"], cwd=home.data, env=home.environ, capture_output=True, text=True, check=False
        )
        return done.stdout == "order 7 charged\n"

    assert charged()
    os.kill(up.processes["app-1"], signal.SIGKILL)
    assert charged(), "another bot of that name serves the task"
    up.popen.send_signal(signal.SIGTERM)
    assert up.popen.wait(STARTS_WITHIN) == 0
    eventually(lambda: not home.here(), STARTS_WITHIN)
