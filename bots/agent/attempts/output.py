"""The output of a command: its first and its last bytes are kept, and sent in pieces."""

import base64
import threading
from dataclasses import dataclass

from bots.protocol import Chunk
from schema import validation

#: Bytes in one chunk. A message takes 64 chunks, so the kept output of a job always fits into one message.
CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Pending:
    """Output that the gateway does not have yet: `chunks` from the first unsent byte to offset `end`."""

    chunks: list[Chunk]
    end: int


#: Bytes of the line that says how many bytes of output were left out.
_LONGEST_GAP = 64


class Output:
    """Keeps the first and the last bytes of output, `cap` together, and counts all. One thread writes; any may read.

    The first half can be sent at once. What follows it is known when the command has ended, for only then is it clear
    which bytes are the last: they come after a line that says how many were left out.
    """

    def __init__(self, cap: int = validation.MAX_OUTPUT_BYTES) -> None:
        self._cap, self._half = cap, cap // 2
        self._lock = threading.Lock()
        self._kept = bytearray()
        #: The newest bytes after the first half, up to twice as many as are kept.
        self._last = bytearray()
        self._written = 0
        self._sent = 0

    def write(self, data: bytes) -> None:
        """Add the next bytes from the command."""
        with self._lock:
            self._written += len(data)
            first = max(0, self._half - len(self._kept))
            self._kept += data[:first]
            self._last += data[first:]
            if len(self._last) > 2 * self._half:
                del self._last[: -self._half]

    def end(self) -> None:
        """Let what was written last follow the first half. The command writes nothing more."""
        with self._lock:
            if self._written > self._cap:
                # The line is at most so long.
                del self._last[: len(self._last) - (self._half - _LONGEST_GAP)]
                left_out = self._written - len(self._kept) - len(self._last)
                self._kept += f"\n[{left_out:,} bytes left out]\n".encode()
            self._kept += self._last
            self._last.clear()

    @property
    def written(self) -> int:
        """The number of bytes the command has written, including those beyond the cap."""
        return self._written

    @property
    def truncated(self) -> bool:
        """True if some bytes were not kept."""
        return self._written > self._cap

    @property
    def unsent(self) -> int:
        """The number of kept bytes that the gateway does not have."""
        with self._lock:
            return len(self._kept) - self._sent

    def pending(self, most: int) -> Pending:
        """Return the output to send next, at most `most` bytes. It is returned again until `sent` is called."""
        with self._lock:
            end = min(len(self._kept), self._sent + most)
            chunks = [
                Chunk(start=start, data=base64.b64encode(self._kept[start : min(start + CHUNK_BYTES, end)]).decode())
                for start in range(self._sent, end, CHUNK_BYTES)
            ]
            return Pending(chunks=chunks, end=end)

    def sent(self, end: int) -> None:
        """Record that the gateway has all output before offset `end`."""
        with self._lock:
            self._sent = max(self._sent, end)
