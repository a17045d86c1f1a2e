"""A private PostgreSQL for the default run and the tests: `serve(data)` starts it, the last user stops it.

Kernel locks on files in the data directory carry the whole life cycle, so that a process killed at any point leaves
nothing to clean up: `start.lock` is held while somebody starts, adopts or stops the server, `users.lock` is shared by
every user for its life, and `server.lock` is inherited by the server. An owner that was killed leaves the server
running, and the next user adopts it. The server has no TCP port and trusts whoever reaches its socket, which lies in
a directory of mode 0700.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from schema import locks
from schema.cluster import PATIENCE, Cluster
from schema.errors import NotReady


class Server:
    """One user's hold on the running server. Closing it lets go, and so does the end of the process."""

    def __init__(self, cluster: Cluster, users: IO[bytes], child: "subprocess.Popen[bytes] | None") -> None:
        self._cluster, self._users, self._child = cluster, users, child
        self.url = cluster.url

    @property
    def pid(self) -> int:
        """Process id of the server. Raises NotReady if it does not run."""
        return self._cluster.pid

    def close(self) -> None:
        """Let go, and stop the server with a checkpoint if nobody else uses it. May be called again.

        Raises NotReady if the server refuses to stop.
        """
        if self._users.closed:
            return
        with locks.held(self._cluster.data / "start.lock"), self._users:
            last = locks.take(self._users)
            if last:
                self._cluster.stop()
        if last and self._child is not None:
            self._child.wait(timeout=PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(data: Path, *, durable: bool = True) -> Server:
    """Use the server of the data directory; makes and starts it if need be, in about a second.

    durable: False trades safety against power loss for speed. It counts for whoever starts the server, and is for
        tests only.
    Raises NotReady, with one line that says what to do, if the directory or PostgreSQL cannot be used. A server that
    crashed under its users is started again, at the same URL, by the next call.
    """
    data = Path(os.path.abspath(data))
    try:
        # Root's server runs as another account, which has to pass through; what is private lies in files of its own.
        data.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        with locks.held(data / "start.lock") as start:
            cluster = Cluster.find(data)
            users = (data / "users.lock").open("ab")
            try:
                locks.share(users)
                return Server(cluster, users, cluster.run(start, durable=durable))
            except BaseException:
                with users:
                    if locks.take(users):
                        cluster.stop()
                raise
    except OSError as error:
        raise NotReady(f"the data directory {data} cannot be used: {error.strerror or error}") from error


def scratch(prefix: str) -> Path:
    """A new temporary directory fit for `serve`, also for root, whose server runs as another account."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    if os.geteuid() == 0:
        directory.chmod(0o711)
    return directory
