"""The demo of the farm door: a program of 12 C files is built twice through it, while a bot and the door are killed.

Every object is compared with the one that the same compiler makes here.
"""

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from leasehold.errors import LeaseholdError

from bots.farm.client import Client, Work
from bots.farm.storage.upstream import Digest
from schema import clock, readable

#: C files of the program, beside its main one; and clients that ask for the same action at the same time.
FILES, TOGETHER = 11, 4
#: Seconds that each compilation takes at least, so that some of them run when a bot and the door are killed.
PAUSE = 0.5
COMPILER = "gcc"
HEADER = b"#pragma once\n"


@dataclass(frozen=True)
class Report:
    """What the demo has seen. Times are in seconds.

    joined: submissions that shared a job. same: objects that are those of the local compiler.
    """

    actions: int
    first_build: float
    second_build: float
    cached: int
    joined: int
    killed: Sequence[str]
    same: int
    says: str

    @property
    def good(self) -> bool:
        """True if every object is right, and the second build came from the cache."""
        return self.same == self.actions - 1 and self.cached == self.actions and self.joined == TOGETHER - 1


def run(address: str, kill: Callable[[str], None], *, victims: Sequence[str], as_json: bool) -> Report:
    """Build twice and print what became of it. Raises LeaseholdError unless everything is as it has to be.

    kill: kills a process of the pool by its name, which is started again. victims: the names.
    """
    if shutil.which(COMPILER) is None:
        raise LeaseholdError(f"the demo compiles C with {COMPILER}, which is not on this machine")
    chance = random.SystemRandom().getrandbits(32)
    sources = {f"part{n}.c": _part(n) for n in range(FILES)} | {"main.c": _main(chance)}
    with tempfile.TemporaryDirectory(prefix="leasehold-farm-") as place, Client(address) as client:
        local = _local(Path(place), sources)
        began = clock.monotonic()
        objects, program, cached, killed = _build(client, sources, kill, victims)
        assert cached == 0
        first, began = clock.monotonic() - began, clock.monotonic()
        _, again, cached, _ = _build(client, sources, kill, ())
        second = clock.monotonic() - began
        joined = _joined(client, sources, chance)
        path = Path(place) / "remote"
        path.write_bytes(program)
        path.chmod(0o700)
        said = subprocess.run([path], capture_output=True, text=True, check=True).stdout.strip()
    found = Report(
        actions=len(sources) + 1,
        first_build=round(first, 2),
        second_build=round(second, 2),
        cached=cached,
        joined=joined,
        killed=killed,
        same=sum(objects[name] == local[name] for name in sources),
        says=said,
    )
    readable.print_json(asdict(found)) if as_json else click.echo(_described(found))
    if not found.good or program != again:
        raise LeaseholdError("the build through the door is not as it has to be: see above")
    return found


def _described(found: Report) -> str:
    killed = ", ".join(found.killed)
    return "\n".join(
        (
            f"first build    {found.actions} actions in {found.first_build} s; killed meanwhile: {killed}",
            f"second build   {found.second_build} s, {found.cached} of {found.actions} actions from the cache",
            f"{TOGETHER} clients      asked for one action at the same time: {found.joined} of them joined it",
            f"compared       {found.same} of {found.actions - 1} objects are those that {COMPILER} makes here",
            f"the program    says: {found.says}",
        )
    )


def _part(number: int) -> bytes:
    return f'#include "parts.h"\nint part{number}(int x) {{ return x * {number + 2} + {number}; }}\n'.encode()


def _main(chance: int) -> bytes:
    declared = "".join(f"int part{n}(int);\n" for n in range(FILES))
    calls = " + ".join(f"part{n}({chance % 1000})" for n in range(FILES))
    return f'#include <stdio.h>\n{declared}int main(void) {{ printf("%d\\n", {calls}); return 0; }}\n'.encode()


def _compiling(name: str, source: bytes) -> Work:
    compiler = shutil.which(COMPILER)
    words = f"sleep {PAUSE} && exec {compiler} -c {name} -o {name}.o"
    return Work(["/bin/sh", "-c", words], {name: source, "parts.h": HEADER}, [f"{name}.o"])


def _local(place: Path, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Compile here, in the same way."""
    (place / "parts.h").write_bytes(HEADER)
    for name, source in sources.items():
        (place / name).write_bytes(source)
        subprocess.run([COMPILER, "-c", name, "-o", f"{name}.o"], cwd=place, check=True)
    return {name: (place / f"{name}.o").read_bytes() for name in sources}


def _build(
    client: Client, sources: Mapping[str, bytes], kill: Callable[[str], None], victims: Sequence[str]
) -> tuple[dict[str, bytes], bytes, int, list[str]]:
    """Compile all files at once, and link. Returns objects, the program, actions from the cache, and who was killed."""
    objects: dict[str, bytes] = {}
    left, cached = list(victims), 0
    with ThreadPoolExecutor(len(sources)) as crew:
        calls = {crew.submit(client.run, _compiling(name, source)): name for name, source in sources.items()}
        for done in as_completed(calls):
            answer = _succeeded(done.result())
            cached += answer.cached_result
            objects[calls[done]] = _output(client, answer)
            if left:
                kill(left.pop(0))
    inputs = {f"{name}.o": data for name, data in objects.items()}
    linking = Work([str(shutil.which(COMPILER)), *sorted(inputs), "-o", "program"], inputs, ["program"])
    answer = _succeeded(client.run(linking))
    return (
        objects,
        _output(client, answer),
        cached + answer.cached_result,
        [each for each in victims if each not in left],
    )


def _joined(client: Client, sources: Mapping[str, bytes], chance: int) -> int:
    """Ask for one new action several times at once; return how many of them share the job of another."""
    work = _compiling("main.c", sources["main.c"])._replace(salt=str(chance).encode())
    with ThreadPoolExecutor(TOGETHER) as crew:
        answers = [_succeeded(each.result()) for each in [crew.submit(client.run, work) for _ in range(TOGETHER)]]
    return len(answers) - len({each.message for each in answers})


def _succeeded(answer: Any) -> Any:
    if answer.status.code or answer.result.exit_code:
        raise LeaseholdError(
            f"an action has failed: {answer.status.message or answer.result.exit_code} ({answer.message})"
        )
    return answer


def _output(client: Client, answer: Any) -> bytes:
    (file,) = answer.result.output_files
    return client.download(Digest(file.digest.hash, file.digest.size_bytes))
