"""The socket that a gateway listens on, and its URL."""

import errno
import os
import socket
import stat
from ipaddress import ip_address
from pathlib import Path

from leasehold.errors import BadInput

from bots.gateway.settings import GatewaySettings

#: Connections that may wait until they are accepted.
BACKLOG = 4096
#: TCP keep-alive: seconds of silence before the first probe, seconds between probes, number of probes. While a call is
#: held, a bot whose machine is gone sends nothing, and the gateway must not keep its session alive. There are several
#: probes because some get lost: peers that connected in the same second are probed at the same moment, and a kernel
#: drops packets beyond its queue, which holds 1,000 on a loopback device.
PROBE_AFTER, PROBE_EVERY, PROBES = 10, 3, 8


def bind(settings: GatewaySettings) -> socket.socket:
    """Return a socket that listens at the configured address. Raises BadInput if that cannot be used."""
    if settings.unix_socket is not None:
        return _bind_path(settings.unix_socket)
    try:
        return listen(settings.host, settings.port)
    except OSError as error:
        detail = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            detail += "; another pool or gateway may run there: choose another port, 0 = any"
        raise BadInput("gateway.port", detail) from None


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens there; 0 as port: any free one. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    try:
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        # Python adds the address in a form of its own.
        raise OSError(error.errno, str(error.strerror).partition(" (while")[0]) from None
    # Connections inherit this. Without it the second write of each answer waits 40 ms for a delayed ACK. asyncio sets
    # it only on sockets that were made with an explicit protocol number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", PROBE_AFTER), ("TCP_KEEPINTVL", PROBE_EVERY), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):  # not every system has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return listener


def _bind_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadInput("gateway.unix_socket", f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def _answers(path: Path) -> bool:
    """Return True if a process listens on the socket; a file left by a killed process has no listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def url_of(settings: GatewaySettings, listener: socket.socket) -> str:
    """Return the URL at which clients of this machine reach the listener."""
    if settings.unix_socket is not None:
        return f"http+unix://{settings.unix_socket.absolute()}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    if ip_address(host).is_unspecified:
        host = socket.gethostname() if scheme == "https" else {"0.0.0.0": "127.0.0.1", "::": "::1"}[host]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
