"""Real processes of a pool, for tests that kill them: `python -m assigner.cli assign|gateway|bot`."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
from structlog.testing import capture_logs

from assigner import config
from assigner.children import PARENT_VARIABLE
from assigner.config import Reloader
from assigner.installation import PoolSettings
from assigner.running import AssignerProcess
from schema import tokens
from schema.engine import Database, DatabaseSettings, plain
from schema.timing import Timing
from tests.patience import MINUTE, eventually
from tests.pool import Pool

#: Seconds a process gets to start on a machine that runs other tests as well.
READY_WITHIN = 2 * MINUTE
#: Seconds between two looks whether it has. Each is a connection, whose time the starting process could use.
LOOK = 0.1
LISTENERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'leasehold-listen'
"""


@dataclass
class Process:
    """One running command; what it says goes to `log`."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to this process alone, as a crash would; its children are left to it."""
        self.popen.kill()
        self.popen.wait()

    def end(self, within: float = MINUTE) -> int:
        """SIGTERM, and the exit status."""
        self.popen.terminate()
        return self.popen.wait(within)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Processes:
    """Starts processes on the test's own database and ends whatever is left of them. A context manager.

    directory: takes configuration, tokens and logs. Unlike pytest's own it may have to be entered by others: use the
        fixture `scratch`.
    config: more TOML for the file that all of them read, beside `[timing]` and a free port for the gateway.
    """

    def __init__(self, directory: Path, database_url: str, timing: Timing, *, config: str = "") -> None:
        self.directory, self.database_url = directory, database_url
        self.running: list[Process] = []
        self.config = directory / "leasehold.toml"
        lines = [f"{name} = {value!r}" for name, value in timing.model_dump().items()]
        self.config.write_text("[timing]\n" + "\n".join(lines) + "\n\n" + config)
        self._keep_tokens()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self._environ = {
            **kept,
            "LEASEHOLD_DATABASE_URL": database_url,
            "LEASEHOLD_GATEWAY_PORT": "0",
            # The default is one place for the account, where no two tests may have a bot of one name.
            "LEASEHOLD_BOT_WORK_DIR": str(directory / "work"),
            PARENT_VARIABLE: "stdin",
        }

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        """Start `leasehold ARGUMENTS…` and do not wait for it."""
        log = self.directory / f"{name}.log"
        command = [sys.executable, "-m", "assigner.cli", "--data", str(self.directory), "--config", str(self.config)]
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**self._environ, **(environment or {})},
            )
        process = Process(name, popen, log)
        self.running.append(process)
        return process

    def assigner(self, name: str = "assigner-1") -> Process:
        """An assigner process that has begun to listen for work."""
        before = self._listeners()
        process = self.start(name, "assign", "--name", name)
        self._await(process, lambda: self._listeners() > before)
        return process

    def gateway(self, name: str = "gateway", *, port: int = 0) -> Process:
        """A gateway that answers; its address is then in `url`."""
        address = self.directory / "gateway.url"
        address.unlink(missing_ok=True)
        process = self.start(name, "gateway", environment={"LEASEHOLD_GATEWAY_PORT": str(port)})
        self._await(process, lambda: address.exists() and self._is_ready())
        return process

    def bot(self, name: str = "bot-1", *arguments: str) -> Process:
        """A bot whose session is open."""
        token = str(self.directory / "bot.token")
        process = self.start(name, "bot", "--name", name, "--url", self.url, "--token-file", token, *arguments)
        self._await(process, lambda: self._value("SELECT count(*) FROM bots WHERE name = %s AND status = 'ok'", name))
        return process

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return (self.directory / "gateway.url").read_text().strip()

    @property
    def operator_token(self) -> str:
        """A token that may do everything."""
        return (self.directory / "operator.token").read_text().strip()

    @property
    def bot_token(self) -> str:
        """A token with which any bot may call."""
        return (self.directory / "bot.token").read_text().strip()

    def stop(self) -> None:
        """Kill everything that is left, with its process group. Idempotent."""
        for process in self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
            if process.popen.stdin:
                process.popen.stdin.close()
        self.running.clear()

    def _keep_tokens(self) -> None:
        database = Database(self.database_url, DatabaseSettings(), role="test", chance=random.Random(0))
        try:
            for kind, bot in ((tokens.Kind.OPERATOR, None), (tokens.Kind.BOT, "*")):
                token = database.run(lambda connection, kind=kind, bot=bot: tokens.create(connection, kind, bot=bot))
                path = self.directory / f"{kind}.token"
                path.touch(mode=0o600)
                path.write_text(token + "\n")
        finally:
            database.close()

    def _await(self, process: Process, ready) -> None:
        def looked() -> bool:
            if not process.alive:
                raise RuntimeError(f"{process.name} ended with {process.popen.returncode}: {process.said()[-2000:]}")
            return bool(ready())

        eventually(looked, READY_WITHIN, what=f"{process.name} is ready", every=LOOK)

    def _is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", timeout=30.0, trust_env=False).status_code == 200
        return False

    def _listeners(self) -> int:
        return self._value(LISTENERS)

    def _value(self, query: str, *parameters: object) -> int:
        options = "-c search_path=leasehold,public"
        with psycopg.connect(plain(self.database_url), autocommit=True, options=options) as connection:
            row = connection.execute(query, parameters).fetchone()
            return int(row[0]) if row else 0


LEASEHOLD = Path(sys.executable).parent / "leasehold"


class Console:
    """Runs the real console script in a directory of its own."""

    def __init__(self, directory: Path, **environ: str) -> None:
        self.directory = directory
        self.data = directory / "data"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        self.environ = {**kept, "LEASEHOLD_DATA": str(self.data), **environ}

    def run(self, *arguments: str, environ: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [LEASEHOLD, *arguments],
            cwd=self.directory, env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def good(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def refused(self, *arguments: str, code: int = 2, environ: Mapping[str, str] | None = None) -> str:
        """What is said on standard error, which must be one line and all that is said."""
        done = self.run(*arguments, environ=environ)
        assert done.returncode == code, done
        assert done.stdout == ""
        assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
        return done.stderr.removeprefix("error: ").rstrip("\n")


@contextmanager
def assigner_process(pool: Pool, file: Path) -> Iterator[tuple[AssignerProcess, list[Any]]]:
    """A running assigner process with this configuration, and what it logs."""
    reloader = Reloader(file, PoolSettings, {}, current=config.load(file, PoolSettings, {}), poll=0.1)
    made = AssignerProcess(pool.database, reloader, name="host", chance=random.Random(1))
    with capture_logs() as logs:
        try:
            made.start()
            yield made, logs
        finally:
            made.stop()
