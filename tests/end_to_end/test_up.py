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

import httpx
import psycopg
import pytest

from schema.postgres import embedded
from tests.support.patience import eventually
from tests.support.servers import LEASEHOLD, processes_of

#: Seconds a pool gets to start on a machine that runs other tests as well.
STARTS_WITHIN = 120.0


@dataclass
class Up:
    """A running `leasehold up`: where it answers, its processes, and what it has told."""

    popen: subprocess.Popen[str]
    url: str
    processes: dict[str, int]
    told: str

    def end(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(STARTS_WITHIN)


class Home:
    """A data directory of its own, and what is started in it. `program`: that of the fork server."""

    def __init__(self, data: Path, program: Path) -> None:
        self.data, self.program = data, program
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self.environ = {**kept, "LEASEHOLD_DATA": str(data), "LEASEHOLD_TIMING_TTL": "6", "LEASEHOLD_TIMING_SYNC": "1"}
        self.environ["LEASEHOLD_BOT_DRAIN_SECONDS"] = "1"

    def up(self, *, program: Path | str = LEASEHOLD) -> Up:
        """Start a pool with a bot that runs commands; its output is JSON."""
        popen = self._started("--json", "--bots", "1", program=program)
        assert popen.stdout is not None
        line = popen.stdout.readline()
        assert line, f"`leasehold up` ended with {popen.wait()}"
        found = json.loads(line)
        return Up(popen, found["url"], found["processes"], line)

    def up_for_people(self, *options: str) -> Up:
        """Start a pool without such a bot, of forked processes; its output is for people."""
        popen = self._started("--bots", "0", *options, program=self.program)
        assert popen.stdout is not None
        told = ""
        while "\nCtrl-C" not in told:
            line = popen.stdout.readline()
            assert line, f"`leasehold up` ended with {popen.wait()}"
            told += line
        processes = {name: int(pid) for name, pid in re.findall(r"^  (\S+) +process (\d+)$", told, re.M)}
        return Up(popen, re.findall(r"is up at (\S+),", told)[0], processes, told)

    def _started(self, *options: str, program: Path | str = LEASEHOLD) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [program, "up", "--port", "0", "--assigners", "1", *options],
            cwd=self.data, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=(self.data / "said").open("w"), text=True,
        )  # fmt: skip

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
        return processes_of(self.data)


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


@pytest.fixture
def home(leasehold: Path) -> Iterator[Home]:
    made = Home(embedded.scratch("leasehold-up-"), leasehold)
    yield made
    for pid in made.here():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not made.here())
    shutil.rmtree(made.data)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_start_that_is_interrupted_says_no_more_than_that(home: Home, number: signal.Signals, code: int) -> None:
    (home.data / "slow_app.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n")
    started = home._started("--app", "slow_app:pool", program=home.program)
    eventually(lambda: (home.data / "begun").exists())
    started.send_signal(number)
    assert started.wait(STARTS_WITHIN) == code
    assert home.said() == ["stopped before the pool was up; nothing runs, and `leasehold up` begins the start again"]
    assert not (home.data / "pg").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_pool_runs_jobs_stops_on_ctrl_c_goes_on_later_and_dies_with_its_parent(home: Home) -> None:
    up = home.up(program=home.program)
    assert set(up.processes) == {"assigner-1", "gateway", "bot-1"}
    gateway = f"the gateway answers at {up.url}; starting 1 bot"
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
        2, f"error: a pool already runs in {home.data}; stop it, or give another directory: "
        "leasehold --data DIRECTORY up\n",
    )  # fmt: skip

    # Ctrl-C in the middle of a job: it goes back to the queue, and the next `up` runs it again.
    ran = home.data / "ran"
    ran.touch()
    ran.chmod(0o666)  # for whatever account the job has
    script = f"echo run >> {ran}; test $(wc -l < {ran}) -gt 1 || exec sleep 600"
    long = home.run("submit", "--", "sh", "-c", script).stdout.strip()
    eventually(ran.read_text, STARTS_WITHIN)
    assert up.end(signal.SIGINT) == 130
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
    # A gateway that is started again is where bots and callers know it, also if its port was any free one.
    os.kill(up.processes["gateway"], signal.SIGKILL)
    url = ("--url", up.url)
    eventually(lambda: home.run("status", *url).returncode == 0, what="the gateway runs again")
    done = home.run("submit", "--wait", *url, "--", "true")
    assert done.returncode == 0, done

    up.popen.kill()
    up.popen.wait()
    pids = up.processes.values()
    eventually(lambda: not set(pids) & set(home.here()), what="the children have ended")
    eventually(lambda: home.here() == [], what="PostgreSQL has been stopped by its last user")
    stopped = home.run("db", "url")
    assert (stopped.returncode, stopped.stdout) == (3, ""), stopped


@pytest.mark.timeout(600)
@pytest.mark.long
def test_console_and_app_are_processes_of_the_pool_that_are_started_again_when_they_are_killed(home: Home) -> None:
    pytest.importorskip("nicegui", reason="the console needs the extra leasehold[console]")
    (home.data / "shop.py").write_text(APP)
    for wrong, said in (
        (("--app", "shop:pul"), "error: --app: 'shop:pul' cannot be used: "),
        (("--app", "shop"), "error: --app: "),
        (("--concurrency", "2"), "error: --concurrency: means nothing without --app"),
        (("--reload",), "error: --reload: means nothing without --app"),
    ):
        refused = home.run("up", *wrong)
        assert (refused.returncode, refused.stderr.startswith(said)) == (2, True), refused.stderr
    assert not home.here(), "nothing was started"
    up = home.up_for_people("--console", "0", "--app", "shop:pool", "--concurrency", "2", "--reload")
    assert set(up.processes) == {"assigner-1", "gateway", "app-1", "console"}
    (console,) = re.findall(r"Its console is at (\S+);", up.told)
    assert home.said()[-1] == f"the console answers at {console}"
    assert "submit --wait" not in up.told, "no bot would run it"
    assert up.told.count("\nTasks run as ") == 1
    assert "under an account of its own" not in up.told, "tasks share the processes of one account"
    assert "1 schedule of shop:pool applied" in home.said()
    assert "clean" in home.run("schedule", "list").stdout

    def charged(how: str = "charged") -> bool:
        done = subprocess.run(
            [sys.executable, "shop.py"], cwd=home.data, env=home.environ, capture_output=True, text=True, check=False
        )
        return done.stdout == f"order 7 {how}\n"

    with httpx.Client(base_url=console, headers={"Origin": console}, trust_env=False) as http:

        def logged_in() -> bool:
            token = (home.data / "operator.token").read_text()
            with suppress(httpx.TransportError):
                answer = http.post("/login", data={"token": token})
                return (answer.status_code, answer.headers["location"]) == (303, "/")
            return False

        assert logged_in()
        assert charged()
        for name in ("console", "app-1"):
            os.kill(up.processes[name], signal.SIGKILL)
        assert charged(), "another bot of that name serves the task"
        eventually(lambda: "console runs again" in home.said(), STARTS_WITHIN)
        eventually(logged_in, STARTS_WITHIN)
    (home.data / "shop.py").write_text(f"import nothing_there\n{APP}")
    refusal = "shop.py changed, and shop:pool cannot be imported; its bot stays as it is: ModuleNotFoundError"
    eventually(lambda: any(line.startswith(refusal) for line in home.said()), STARTS_WITHIN)
    (home.data / "shop.py").write_text(APP.replace("charged", "paid in full"))
    eventually(lambda: "app-1 runs again" in home.said()[-1:], STARTS_WITHIN)
    assert charged("paid in full")
    assert "shop.py changed; starting the bot of shop:pool again" in home.said()
    assert not any(line.startswith("gateway") for line in home.said()), "nothing else was started again"
    port = console.rpartition(":")[2]
    second = home.run("--data", str(home.data / "second"), "up", "--console", port)
    assert second.returncode == 2
    assert second.stderr.startswith(f"error: --console: cannot listen on 127.0.0.1:{port}: ")
    assert len(second.stderr.splitlines()) == 1
    assert not (home.data / "second").exists()
    assert up.end(signal.SIGTERM) == 0
    eventually(lambda: not home.here(), STARTS_WITHIN)
