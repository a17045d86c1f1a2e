"""A program `leasehold` that hands its command line to a fork server, and ends as the command there ends.

The fork server copies this file into a directory of its own, which tests put in front of PATH. It passes arguments,
directory, environment and the three standard streams on, and forwards SIGINT, SIGTERM and SIGHUP. The processes of
`leasehold up` are forked too. `leasehold demo` is run by the real console script instead.
"""

# `_signal` and `_socket` are the modules below `signal` and `socket`, which take as long to import as all else here.
import _signal  # type: ignore[import-not-found]
import _socket
import os
import sys

#: Commands that start a whole pool of real processes.
POOLS = {"demo"}
#: Global options that have a value.
VALUED = {"--data", "--config"}


def command(arguments: list[str]) -> str | None:
    """The first argument that is neither an option nor the value of a global option."""
    rest = iter(arguments)
    for argument in rest:
        if argument in VALUED:
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return None


def receive(connection: _socket.socket) -> int:
    """Read one number of four bytes."""
    found = b""
    while len(found) < 4:
        more = connection.recv(4 - len(found))
        if not more:
            sys.exit("the fork server has closed the connection")
        found += more
    return int.from_bytes(found, "little")


def forward(arguments: list[str]) -> int:
    """Run the command in a child of the fork server; returns its wait status."""
    child: list[int] = []
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if child:
            os.kill(child[0], number)
        else:
            early.append(number)

    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, pass_on)
    fields = [os.getcwdb(), str(len(arguments)).encode(), *map(os.fsencode, arguments)]
    fields += [name + b"=" + value for name, value in os.environb.items()]
    request = b"\0".join(fields)
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    connection.sendmsg([len(request).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    connection.sendall(request)
    child.append(receive(connection))
    for number in early:
        os.kill(child[0], number)
    return receive(connection)


def main() -> None:
    """Run the command, and end with its exit code or by the signal that ended it."""
    arguments = sys.argv[1:]
    if command(arguments) in POOLS:
        program = os.path.join(os.path.dirname(sys.executable), "leasehold")
        os.execv(program, [program, *arguments])
    code = os.waitstatus_to_exitcode(forward(arguments))
    if code < 0:
        _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
