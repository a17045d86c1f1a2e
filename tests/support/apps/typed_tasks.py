"""Tasks and calls for type checkers, and never run: they must find an error in each line that ends with `# wrong`, and
in no other."""

from collections.abc import Coroutine
from typing import Any, assert_type

import leasehold

pool = leasehold.Pool.from_env()
others = leasehold.AsyncPool.from_env()


@pool.task
def none() -> bytes:
    return b""


@pool.task(label="x", retries=2, unique=lambda *given: str(given))
def two(x: int, y: str = "", *, z: int = 2) -> float:
    return 1.0


@pool.periodic("* * * * *", args=(1,))
@pool.task
async def fetch(x: int) -> str:
    return ""


@others.task(priority=2, name="n")
async def read(x: int, *, z: int = 2) -> str:
    return ""


@pool.task
def named(*, z: int) -> bytes:
    return b""


@pool.task
def many(a: int, b: int, c: int, d: int, e: int, f: int, *more: int) -> None: ...


assert_type(two(1), float)
assert_type(two.defer(1, "x").result(), float)
assert_type(fetch.using(priority=1, properties=None, key="k").defer(1).result(), str)
coroutine: Coroutine[Any, Any, str] = fetch(1)
assert_type(two.batch([(1,), (2, "x"), {"x": 2}]), list[leasehold.TaskJob[float]])
assert_type(two.batch((n, "x") for n in range(3)), list[leasehold.TaskJob[float]])
assert_type(fetch.batch([(1,)]), list[leasehold.TaskJob[str]])
assert_type(named.batch([{"z": 2}]), list[leasehold.TaskJob[bytes]])
assert_type(none.batch([(), ()]), list[leasehold.TaskJob[bytes]])
assert_type(many.batch([(1, 2, 3, 4, 5, 6)]), list[leasehold.TaskJob[None]])
assert_type(pool.gather(two.batch([(1,)])), list[float])


async def program() -> None:
    assert_type(await read(1), str)
    assert_type(await (await read.defer_async(1, z=3)).result(), str)
    assert_type(await others.gather(await read.batch_async([(1,)])), list[str])
    await read.batch_async([("x",)])  # wrong


fetch.defer("x")  # wrong
two.batch([("x",)])  # wrong
two.batch([(1, 2)])  # wrong
two.batch([(1, "x", 3)])  # wrong
fetch.batch([("x",)])  # wrong
none.batch([(1,)])  # wrong
named.batch([(1,)])  # wrong
two.using(priorty=3)  # wrong
two.using(retries="3")  # wrong
two.using(max_attempts=3)  # wrong
pool.task(retires=3)  # wrong
