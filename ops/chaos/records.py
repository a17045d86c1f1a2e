"""Append-only files of short lines that several processes write and that no crash of a writer can damage."""

import os
from collections.abc import Iterator
from pathlib import Path


class Appender:
    """Appends lines to a file. Each line is one write with O_APPEND, so that the file's order is the order of writes.

    Lines of different processes never mix, and a process that is killed has written its line or not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, *words: object) -> None:
        """Append one line of words without white space in them."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def lines(path: Path) -> Iterator[list[str]]:
    """Yield the words of each line, in the order of writing. A file that does not exist has none."""
    if path.exists():
        with path.open() as file:
            for line in file:
                yield line.split()
