"""A farm door on the test's database, real storage for it, and bots whose answers the test decides."""

import asyncio
import base64
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from assigner.api.submission import submit_completed
from assigner.explain.answer import why_it_waited
from assigner.settings import PoolSettings
from bots.farm.client import Client, Keys, Storage
from bots.farm.protos import remote_execution_pb2
from bots.farm.server import Door
from bots.farm.settings import FarmSettings, timing_of_workers
from bots.farm.storage.own_storage import running
from bots.farm.storage.programs import STORAGE, program
from schema import clock
from schema.postgres.notify import Wakeups
from tests.support.farm.certificates import Authority
from tests.support.patience import MINUTE
from tests.support.pool import Bot, Pool, completed

FARM_BOT: dict[str, Any] = {"properties": {"leasehold.farm": "action"}, "exclusive": ["leasehold.farm"]}
CASD = program(STORAGE)


@contextmanager
def storage() -> Iterator[str]:
    """Run real storage, and give its address."""
    with tempfile.TemporaryDirectory(prefix="leasehold-farm-") as directory, running(Path(directory)) as own:
        with Storage(own.address) as calls:
            calls.upload([b"ready"])
        yield own.address


class Farm:
    """A door on a free port. After `stop`, `start` opens another at the same port, which knows nothing of the first."""

    def __init__(self, pool: Pool, cas: str, **settings: Any) -> None:
        self.pool = pool
        self.settings = FarmSettings(**{"port": 0, "cas": cas, "anonymous": "default", **settings})
        self.start()

    def start(self) -> None:
        loop, ready, said = asyncio.new_event_loop(), threading.Event(), list[str]()
        until, wakeups = loop.create_future(), Wakeups(self.pool.database)
        wakeups.start()
        submit = partial(submit_completed, self.pool.database, PoolSettings().estimates.estimate)
        door = Door(
            self.pool.database,
            self.settings,
            timing=self.pool.timing,
            wakeups=wakeups,
            submit=submit,
            why=why_it_waited,
            sync_service=Pool(self.pool.database, timing_of_workers(self.pool.timing), self.pool.chance).sync_service(),
        )
        serve = partial(door.serve, lambda address: (said.append(address), ready.set()), until=until)

        def run() -> None:
            try:
                loop.run_until_complete(serve())
            finally:
                loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        patience = clock.monotonic() + MINUTE
        while not ready.wait(0.05):
            if not thread.is_alive() or clock.monotonic() > patience:
                wakeups.stop()
                raise AssertionError("the door did not come up")

        def stop() -> None:
            loop.call_soon_threadsafe(until.set_result, None)
            thread.join(MINUTE)
            wakeups.stop()
            assert not thread.is_alive(), "the door did not stop"

        self.stop, (self.address,) = stop, said
        self.settings = self.settings.model_copy(update={"port": int(said[0].rpartition(":")[2])})

    def client(self, *, instance: str = "", **keys: Any) -> Client:
        """keys: as of `Keys`."""
        return Client(self.address, Keys(**keys), instance=instance)

    def bot(self, name: str = "w1", *, capacity: int = 10) -> Bot:
        """A bot that runs actions as the test says."""
        return self.pool.bot(name, capacity=capacity, **FARM_BOT)

    def given(self, bot: Bot) -> list[dict[str, Any]]:
        """The actions that the bot has been given, and now runs."""
        self.pool.assigner().run_once()
        return bot.take()


def left(code: int = 0, *, exit_code: int = 0, **more: Any) -> str:
    """What `leasehold-action` leaves of an action that has ended with this exit code."""
    result = remote_execution_pb2.ActionResult(exit_code=exit_code, **more)
    return json.dumps({"code": code, "result": base64.b64encode(result.SerializeToString()).decode()})


def finish(bot: Bot, *works: dict[str, Any], verdict: str = "succeeded", **fields: Any) -> None:
    """Let the bot report the end of all actions that it runs."""
    final = {"final": True} if verdict == "failed" else {}
    bot.sync(*[completed(each, verdict, **final, **fields) for each in works])


def executes(directory: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run the command of an action's job as an agent does; its exit code and what it has left."""
    from bots.farm.execution.run_action import main

    monkeypatch.setenv("LEASEHOLD_RESULT", str(directory / "result"))
    code = main(command[1:])
    return code, (directory / "result").read_text()


def reachable(pool: Pool, cas: str, authority: Authority, port: int, **settings: Any) -> Farm:
    """A door on all addresses of this machine. Its port is known before it listens, because jobs are told it."""
    files = {f"tls_{name}": path for name, path in authority.pair("door").items()}
    reach = f"grpcs://127.0.0.1:{port}"
    given = {"host": "0.0.0.0", "port": port, "anonymous": None, "bots_reach": reach, **files, **settings}
    return Farm(pool, cas, **given)
