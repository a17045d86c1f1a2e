"""What a command has written, as far as it is kept, and how far the gateway has it."""

import base64
import threading
from dataclasses import dataclass

from bots.protocol import Chunk
from schema import limits

#: Bytes in one chunk; a message takes 64 chunks, so the cap always fits into one message.
CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Pending:
    """Output the gateway does not have yet: `chunks` from the first byte not sent up to offset `end`."""

    chunks: list[Chunk]
    end: int


class Output:
    """Keeps the first `cap` bytes and counts the rest; one thread writes, others may read."""

    def __init__(self, cap: int = limits.MAX_OUTPUT_BYTES) -> None:
        self._cap = cap
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._written = 0
        self._sent = 0

    def write(self, data: bytes) -> None:
        """Take the next bytes of the command."""
        with self._lock:
            self._written += len(data)
            self._kept += data[: self._cap - len(self._kept)]

    @property
    def written(self) -> int:
        """Bytes the command has written, also those beyond the cap."""
        return self._written

    @property
    def truncated(self) -> bool:
        """Whether some of them were not kept."""
        return self._written > self._cap

    @property
    def unsent(self) -> int:
        """Bytes that are kept and that the gateway does not have."""
        with self._lock:
            return len(self._kept) - self._sent

    def pending(self) -> Pending:
        """What to send next; it stays pending until `sent` says otherwise."""
        with self._lock:
            end = len(self._kept)
            chunks = [
                Chunk(start=start, data=base64.b64encode(self._kept[start : min(start + CHUNK_BYTES, end)]).decode())
                for start in range(self._sent, end, CHUNK_BYTES)
            ]
            return Pending(chunks=chunks, end=end)

    def sent(self, end: int) -> None:
        """The gateway has everything before offset `end`."""
        with self._lock:
            self._sent = max(self._sent, end)
