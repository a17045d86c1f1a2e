"""The PostgreSQL server of a fault run: a private server that can be killed, stopped, filled up and brought back."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from leasehold.errors import NotReady
from sqlalchemy import make_url

from bots.agent.guardian import descendants, process_tree
from ops.chaos.proxy import Target
from schema.postgres import embedded
from schema.postgres.urls import libpq_url

#: Size of the file system of the data directory, in MiB: more than a long run writes.
DISK_MIB = 4096
#: How often to try to make it full.
TRIES = 50


class DiskUnavailable(Exception):
    """The file system of the data cannot be made full."""


class DatabaseServer:
    """The server of a data directory, with its default durability.

    As root the data lie on a file system of their own, in memory, which can be made full.
    """

    def __init__(self, directory: Path) -> None:
        self.data = directory
        directory.mkdir(mode=0o711)
        self._mounted = os.geteuid() == 0 and self._mount()
        #: Added to the environment in which the server is started from now on.
        self.extra: dict[str, str] = {}
        self._server = embedded.serve(directory)
        self.url = self._server.url

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return self._server.pid

    @property
    def socket(self) -> Target:
        """The socket that the server listens on."""
        query = make_url(self.url).query
        return Path(str(query["host"]), f".s.PGSQL.{query['port']}")

    def connect(self, **arguments: Any) -> psycopg.Connection[Any]:
        """Open a connection past every proxy, in autocommit mode, that stays able to write."""
        options = "-c search_path=leasehold,pg_temp -c default_transaction_read_only=off"
        return psycopg.connect(libpq_url(self.url), autocommit=True, options=options, connect_timeout=5, **arguments)

    def processes(self) -> list[int]:
        """The postmaster and its children."""
        pid = self.pid
        return [pid, *descendants([pid], process_tree())]

    def kill(self) -> None:
        """SIGKILL to the postmaster, as in a crash."""
        os.kill(self.pid, signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def ensure(self) -> None:
        """Bring the server up again if it is down. Raises NotReady."""
        os.environ.update(self.extra)
        try:
            before, self._server = self._server, embedded.serve(self.data)
        finally:
            for name in self.extra:
                del os.environ[name]
        before.close()

    @property
    def has_disk(self) -> bool:
        """Whether the data have a file system of their own."""
        return self._mounted

    def fill_disk(self) -> None:
        """Leave no free space: the file system becomes as small as what it holds."""
        for _ in range(TRIES):
            # The server may write between the two, and then the file system refuses to be smaller than its content.
            with suppress(subprocess.CalledProcessError):
                self._resize(f"{shutil.disk_usage(self.data).used // 1024}k")
                return
        raise DiskUnavailable("the file system does not become full")

    def free_disk(self) -> None:
        """Give the file system its size back."""
        self._resize(f"{DISK_MIB}m")

    def close(self) -> None:
        """Stop the server and unmount its data."""
        with suppress(NotReady):
            self._server.close()
        if self._mounted:
            shutil.copy(self.data / "postgres.log", self.data.with_name("postgres.log"))
            subprocess.run(["umount", "-l", str(self.data)], check=False, capture_output=True)

    def _resize(self, size: str) -> None:
        if not self._mounted:
            raise DiskUnavailable("the data have no file system of their own")
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.data)], check=True, capture_output=True)

    def _mount(self) -> bool:
        options = f"size={DISK_MIB}m,mode=0711"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.data)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
