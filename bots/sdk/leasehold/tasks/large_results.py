"""Values of tasks that are too large to be stored with their jobs: a hook that keeps them elsewhere, and its files."""

import errno
import os
import re
from pathlib import Path
from typing import Any, Protocol

from leasehold.errors import BadInput, NotFound

#: What a file of a kept value is called: the job and the fence of the attempt that left it.
_NAME = re.compile(r"[0-9a-f-]{36}-\d{1,20}\.json")


class LargeResults(Protocol):
    """Keeps the values of tasks that are larger than what a pool stores, and finds them again.

    A pool has the same one where tasks run and where their values are read.
    """

    def keep(self, name: str, document: bytes) -> Any:
        """Keep a document and return a reference to it: a JSON value that is stored in its place.

        name: differs for every attempt of every job. Called in the process of the task before it counts as done; what
        it raises is the error of the task.
        """

    def fetch(self, reference: Any) -> bytes:
        """Return the document that `keep` has returned this reference for.

        The reference comes from the result of a job. Whoever wrote the job's command may have made it up: refuse what
        `keep` would not return.
        """


class ResultFiles:
    """Keeps large values as files of one directory, which the bots and the programs that read values share.

    Nobody removes a file: delete those whose jobs the pool has deleted, by their age.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def keep(self, name: str, document: bytes) -> str:
        """Write a file that is complete and on the disk once it is there. Makes the directory. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        place = self.directory / f"{name}.json"
        unfinished = place.with_suffix(".new")
        with unfinished.open("wb") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(place)
        # Its name is on the disk only with the directory. Some network file systems cannot be asked for that.
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(directory)
        return place.name

    def fetch(self, reference: Any) -> bytes:
        """Read a file. Raises NotFound if it is not there, and BadInput for what `keep` has not returned."""
        if not isinstance(reference, str) or not _NAME.fullmatch(reference):
            raise BadInput("result", "names no file of a large result")
        try:
            return (self.directory / reference).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"the large result {reference} is not in {self.directory}") from None
