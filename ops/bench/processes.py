"""What the kernel says of a process. Linux only."""

import os
from pathlib import Path

from schema.errors import LeaseholdError

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def seconds(process: int) -> float:
    """Processor time it has used."""
    return sum(_numbers(process)[10:12]) / _TICKS


def seconds_of_all(process: int) -> float:
    """Processor time that it and its children have used, also those that have ended."""
    return sum(_numbers(process)[10:14]) / _TICKS + sum(seconds(child) for child in children(process))


def mebibytes(process: int) -> float:
    """Resident memory."""
    return round(int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE / 2**20, 1)


def children(process: int) -> list[int]:
    """Its children, alive or not collected yet."""
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def named(last: str) -> int:
    """The child of this process whose command ends in that word. Raises LeaseholdError."""
    for child in children(os.getpid()):
        if Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1] == last.encode():
            return child
    raise LeaseholdError(f"there is no process '{last}'")


def _numbers(process: int) -> list[int]:
    """The fields of its `stat` that follow the state, so that `utime` is at 10, field 14 of proc(5)."""
    text = Path(f"/proc/{process}/stat").read_text()
    return [int(each) for each in text[text.rindex(")") + 4 :].split()]
