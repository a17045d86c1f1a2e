"""The app of a kill run: tasks that write effects, and tell in the execution log what they do.

The effects have no unique key, so that one that happens twice is seen. Their ids and those of the beginnings of
attempts are of one sequence: under the lock of the job's row their order is that of the commits.
"""

import asyncio
import os
import time
from typing import Any

import leasehold
import psycopg

from ops.chaos import execution
from ops.chaos.tasks import once
from ops.chaos.tasks.once import BEGIN, TABLE, Superseded
from schema import clock

#: Variables of the bots: the URL of the effects' database, the bot's name, and, if set, that the fence is not checked.
URL_VARIABLE, BOT_VARIABLE, UNFENCED_VARIABLE = "CHAOS_EFFECTS", "CHAOS_BOT", "CHAOS_UNFENCED"
VARIABLES = (URL_VARIABLE, BOT_VARIABLE, UNFENCED_VARIABLE, execution.LOG_VARIABLE, execution.RUN_VARIABLE)
#: Seconds after which the server ends the transaction of a process that is stopped in it, and so frees the job's row.
IDLE_WITHIN = 20

TABLES = (
    TABLE,
    "CREATE SEQUENCE places",
    "CREATE TABLE attempts (id bigint DEFAULT nextval('places'), job uuid, fence bigint)",
    "CREATE TABLE effects (id bigint DEFAULT nextval('places'), job uuid, fence bigint, step integer, cents integer)",
    "CREATE TABLE failures (node integer, job uuid)",
)
_BEGUN = "INSERT INTO attempts (job, fence) VALUES (%s, %s)"
_EFFECT = "INSERT INTO effects (job, fence, step, cents) VALUES (%s, %s, %s, %s)"

pool = leasehold.Pool.from_env(app="effects")

if os.environ.get(UNFENCED_VARIABLE):
    once.STEP = once.STEP.replace(" AND fence = %(fence)s", "")


def say(what: str) -> None:
    """Append a line of this attempt to the execution log."""
    here = leasehold.current()
    line = f"{what} {here.job} {here.fence} {here.attempt} {os.environ[BOT_VARIABLE]} {os.getpid()}"
    with open(os.environ[execution.LOG_VARIABLE], "a") as log:
        log.write(f"{line} {clock.monotonic():.3f}\n")


def _settings() -> dict[str, Any]:
    options = f"-c idle_in_transaction_session_timeout={IDLE_WITHIN}s"
    return {"conninfo": os.environ[URL_VARIABLE], "autocommit": True, "options": options}


@pool.task(retries=99)
def pay(cents: list[int], pause: float) -> int:
    """Write one effect for each amount; `pause` seconds of work lie before each and, a tenth of it, inside."""
    say("start")
    here = leasehold.current()
    try:
        with psycopg.connect(**_settings()) as connection:
            with connection.transaction():
                done = once.begin(connection)
                connection.execute(_BEGUN, [here.job, here.fence])
            for number, amount in enumerate(cents[done:], done + 1):
                time.sleep(pause)
                say("beat")
                with once.step(connection, number):
                    time.sleep(pause / 10)
                    connection.execute(_EFFECT, [here.job, here.fence, number, amount])
    except Superseded:
        say("superseded")
        raise
    say("end")
    return sum(cents)


@pool.task(retries=99)
async def pay_beside(cents: list[int], pause: float) -> int:
    """What `pay` does, beside other calls in one process."""
    say("start")
    here = leasehold.current()
    names = {"job": here.job, "fence": here.fence}
    async with await psycopg.AsyncConnection.connect(**_settings()) as connection:

        async def done_after(statement: str, **values: int) -> int:
            row = await (await connection.execute(statement.encode(), {**names, **values})).fetchone()
            if row is None:
                say("superseded")
                raise Superseded
            done: int = row[0]
            return done

        async with connection.transaction():
            done = await done_after(BEGIN)
            await connection.execute(_BEGUN, [here.job, here.fence])
        for number, amount in enumerate(cents[done:], done + 1):
            await asyncio.sleep(pause)
            say("beat")
            async with connection.transaction():
                await done_after(once.STEP, step=number)
                await asyncio.sleep(pause / 10)
                await connection.execute(_EFFECT, [here.job, here.fence, number, amount])
    say("end")
    return sum(cents)


@pool.task
def stumble(node: int, failures: int, pause: float) -> int:
    """Work for `pause` seconds as a node of a graph; fail in each of its first `failures` jobs."""
    say("start")
    here = leasehold.current()
    time.sleep(pause)
    with psycopg.connect(**_settings()) as connection:
        (earlier,) = connection.execute(
            "SELECT count(DISTINCT job) FROM failures WHERE node = %s AND job <> %s", [node, here.job]
        ).fetchone() or (0,)
        if earlier < failures:
            connection.execute("INSERT INTO failures VALUES (%s, %s)", [node, here.job])
            raise OSError(f"node {node} stumbles")
    say("end")
    return node
