"""The demo's background work: reading the library slowly, for whoever has nothing better to do.

A scrub is what a store of files does all night: it reads every file slowly and compares what it reads with what it
should be. It takes hardly any processor, a unit of a bot for some seconds, and may be stopped at any moment: the right
work to evict when a tenant claims its minimum.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bots.modules import Module

INSTANCE = "scrub"
#: The least urgent work of the demo.
PRIORITY = 100
#: Files of one scrub, and the pause after each of them, seconds: a scrub takes some six seconds.
FILES, PAUSE = 60, 0.1

#: The program of a job: `python -c PROGRAM PAUSE PATH...` prints `DIGEST FILES`.
PROGRAM = """
import sys
from hashlib import sha256
from time import sleep

digest = sha256()
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        digest.update(file.read())
    sleep(float(sys.argv[1]))
print(digest.hexdigest(), len(sys.argv) - 2)
"""


@dataclass(frozen=True)
class Scrub:
    """One job: these files, in this order."""

    files: tuple[Module, ...]

    def request(self) -> dict[str, Any]:
        """The job as it is submitted."""
        paths = [str(file.path) for file in self.files]
        return {
            "command": [sys.executable, "-I", "-S", "-c", PROGRAM, str(PAUSE), *paths],
            "instance": INSTANCE,
            "priority": PRIORITY,
            "properties": {"os": sys.platform},
            "timeout_seconds": 120.0,
        }

    def expected_output(self) -> bytes:
        """What the job must have written, computed here."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.path.read_bytes())
        return f"{digest.hexdigest()} {len(self.files)}\n".encode()


def scrubs(files: Sequence[Module], count: int) -> list[Scrub]:
    """`count` jobs over the files, each over other ones as far as there are enough."""
    return [Scrub(tuple(files[(nth * FILES + i) % len(files)] for i in range(FILES))) for nth in range(count)]
