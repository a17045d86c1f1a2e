"""A private PgBouncer in transaction mode before a server, for measurements and tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import make_url

from schema import clock
from schema.postgres import embedded
from schema.postgres.engine import libpq_url

PROGRAM = "pgbouncer"
#: Environment variable with the directory of the socket of the PgBouncer that the workers of a benchmark go through.
DIRECTORY_VARIABLE = "LEASEHOLD_BENCH_PGBOUNCER"
#: Only part of the socket's name.
PORT = 6432
#: Seconds within which it must have started.
START_TIMEOUT = 30.0

_SETTINGS = """\
[databases]
* = {server}

[pgbouncer]
unix_socket_dir = {directory}
listen_port = {port}
logfile = {directory}/pgbouncer.log
auth_type = any
pool_mode = {mode}
default_pool_size = {servers}
max_client_conn = 1000
server_tls_sslmode = prefer
{more}
"""


def is_installed() -> bool:
    """True if the program can be started."""
    return shutil.which(PROGRAM, path=_path()) is not None


@contextmanager
def pooled(
    server_url: str, *, servers: int, mode: str = "transaction", role: str | None = None, more: str = ""
) -> Iterator[str]:
    """Run PgBouncer before the server inside the block; gives the URL of the same database through it.

    servers: connections to the server that it keeps for each database.
    role: the role at the server; by default that of `server_url`.
    more: further lines of its configuration.
    """
    directory = embedded.scratch("leasehold-pgbouncer-")
    account = embedded.account_for(directory / "none")
    account.own(directory)
    target = conninfo_to_dict(libpq_url(server_url)) | ({"user": role} if role else {})
    server = " ".join(f"{name}={target[name]}" for name in ("host", "port", "user", "password") if name in target)
    settings = directory / "pgbouncer.ini"
    settings.write_text(
        _SETTINGS.format(server=server, directory=directory, port=PORT, mode=mode, servers=servers, more=more)
    )
    account.own(settings)
    program = shutil.which(PROGRAM, path=_path())
    if program is None:
        raise SystemExit(f"error: {PROGRAM} is not installed")
    child = subprocess.Popen([program, "-q", str(settings)], stderr=subprocess.DEVNULL, **account.arguments())
    try:
        url = through(str(directory), server_url)
        _await(url, child)
        yield url
    finally:
        child.terminate()
        child.wait()
        shutil.rmtree(directory, ignore_errors=True)


def directory_of(url: str) -> str:
    """Where the socket of the PgBouncer of this URL is."""
    return str(conninfo_to_dict(url)["host"])


def through(directory: str, url: str) -> str:
    """The URL of the database of `url` through the PgBouncer whose socket is in `directory`."""
    given = make_url(libpq_url(url))
    to = given.set(host=None, port=None, password=None, query={"host": directory, "port": str(PORT)})
    return to.render_as_string(hide_password=False)


def _await(url: str, child: "subprocess.Popen[bytes]") -> None:
    end = clock.monotonic() + START_TIMEOUT
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError as error:
            if child.poll() is not None or clock.monotonic() > end:
                raise SystemExit(f"error: {PROGRAM} does not start: {error}") from None
        clock.sleep(0.02)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
