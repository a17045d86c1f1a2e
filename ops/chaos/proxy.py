"""A TCP proxy between two parts of the pool that holds, drops or strands what passes through it. It needs no root.

Each link listens on a port of its own. The part behind it is reached by the first of its targets that accepts a
connection, tried in random order, so that a link in front of two gateways is a load balancer too.
"""

import asyncio
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import uvloop

T = TypeVar("T")

#: Where a target listens: a port of this machine, or the path of a socket.
Target = int | Path
#: Bytes that wait in one direction before the proxy stops to read.
_BUFFER = 1 << 20


class _Side(asyncio.Protocol):
    """One of the two connections of a pair. What it reads goes to `other`."""

    def __init__(self, link: "Link", *, towards_target: bool) -> None:
        self.link, self.towards_target = link, towards_target
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self.stranded = False
        self._waiting: list[bytes] = []
        self._full = False
        self._reading = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_BUFFER)
        if self.towards_target:
            self.link.accepted(self)

    def data_received(self, data: bytes) -> None:
        # What was under way when the reading was paused arrives all the same.
        self._waiting.append(data)
        self._deliver()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None
        if not self.stranded and self.other is not None and self.other.transport is not None:
            self.other.transport.close()
        self.link.sides.discard(self)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.set_full(True)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.set_full(False)

    def set_full(self, full: bool) -> None:
        self._full = full
        self.update()

    def update(self) -> None:
        """Read, or do not, as the link and the buffer of the other side demand."""
        self._deliver()
        wanted = not self._held and not self._full
        if self.transport is None or wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    @property
    def _held(self) -> bool:
        link = self.link
        return self.other is None or (link.held_to_target if self.towards_target else link.held_from_target)

    def _deliver(self) -> None:
        if self._held or self.stranded or self.other is None or self.other.transport is None:
            return
        for data in self._waiting:
            self.other.transport.write(data)
        self._waiting.clear()

    def abort(self) -> None:
        """Reset the connection."""
        if self.transport is not None:
            # Closed without waiting for unsent data, a connection is reset and not ended.
            with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


class Link:
    """One listening port and what lies behind it. Every method may be called from any thread.

    `held_to_target`, `held_from_target`: nothing passes in this direction; it arrives when the link is healed.
    """

    def __init__(self, proxy: "Proxy", name: str, targets: Callable[[], Sequence[Target]]) -> None:
        self.name, self._proxy, self._targets = name, proxy, targets
        self.held_to_target = self.held_from_target = self.refusing = False
        self.sides: set[_Side] = set()
        self.port = 0

    def hold(self, *, to_target: bool = True, from_target: bool = True) -> None:
        """Deliver nothing in these directions until `heal`. Connections stay, and new ones are accepted."""

        def do() -> None:
            self.held_to_target, self.held_from_target = to_target, from_target
            self._update()

        self._proxy.call(do)

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `heal`."""

        def do() -> None:
            self.refusing = True
            self._reset()

        self._proxy.call(do)

    def reset(self) -> None:
        """Reset every connection once; new ones work."""
        self._proxy.call(self._reset)

    def strand(self, *, target: bool) -> None:
        """Leave every connection half-open: one side is reset, and the other, the target or not, hears nothing."""

        def do() -> None:
            for side in list(self.sides):
                side.stranded = True
                # A side reads from the client if it writes towards the target.
                if side.towards_target == target:
                    side.abort()

        self._proxy.call(do)

    def heal(self) -> None:
        """Let everything pass again. Half-open connections are reset."""

        def do() -> None:
            self.held_to_target = self.held_from_target = self.refusing = False
            for side in list(self.sides):
                if side.stranded:
                    side.abort()
            self._update()

        self._proxy.call(do)

    def accepted(self, side: _Side) -> None:
        """Connect a new client with a target, in the proxy's thread."""
        if self.refusing:
            side.abort()
            return
        self.sides.add(side)
        side.update()
        self._proxy.spawn(self._connect(side))

    def _update(self) -> None:
        for side in list(self.sides):
            side.update()

    def _reset(self) -> None:
        for side in list(self.sides):
            side.abort()

    async def _connect(self, client: _Side) -> None:
        targets = list(self._targets())
        self._proxy.chance.shuffle(targets)
        loop = asyncio.get_running_loop()
        for target in targets:
            far = _Side(self, towards_target=False)
            try:
                if isinstance(target, Path):
                    await loop.create_unix_connection(lambda far=far: far, str(target))  # type: ignore[misc]
                else:
                    await loop.create_connection(lambda far=far: far, "127.0.0.1", target)  # type: ignore[misc]
            except OSError:
                continue
            if client.transport is None:
                far.abort()
                return
            client.other, far.other = far, client
            self.sides.add(far)
            far.update()
            client.update()
            return
        client.abort()


class Proxy:
    """All links of a pool, served by one thread."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._thread.start()

    def link(self, name: str, targets: Callable[[], Sequence[Target]]) -> Link:
        """Listen on a free port for connections to the targets, which are asked for at each connection."""
        link = Link(self, name, targets)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        link.port = listener.getsockname()[1]

        async def listen() -> None:
            await self._loop.create_server(lambda: _Side(link, towards_target=True), sock=listener)

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result()
        return link

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the proxy's thread and return its result."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def spawn(self, work: Any) -> None:
        """Start a task, in the proxy's thread."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop serving; the operating system closes what is left when the process ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
