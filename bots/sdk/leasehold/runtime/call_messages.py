"""Messages between an agent and its warm children: how a call travels to a child, and its end to the agent.

A call is marshalled, because an agent and its children run on one interpreter, and the child trusts the agent. An end
is a structure of fixed form, because the agent does not trust the child. Both take a quarter of the time of JSON.
"""

import array
import marshal
import socket
import struct
from typing import Any, NamedTuple

#: The first byte of an end; other messages are JSON objects.
_END = b"\x01"
#: Mark, number of the call, exit code, seconds, clean and quiet; the result follows.
_FORM = struct.Struct("=cQid??")
_DESCRIPTOR = array.array("i").itemsize


def receive(channel: socket.socket, size: int, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return a message of at most `size` bytes with at most `most` descriptors, which other programs do not inherit.

    Unlike `socket.recv_fds`, it heeds flags. Raises BlockingIOError with MSG_DONTWAIT, and what else `recvmsg` raises.
    """
    room = socket.CMSG_LEN(most * _DESCRIPTOR)
    message, sent, _, _ = channel.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for _, kind, data in sent:
        if kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _DESCRIPTOR])
    return message, list(found)


def call_message(call: dict[str, Any]) -> bytes:
    """Return a call as a message."""
    return marshal.dumps(call)


def read_call(message: bytes) -> dict[str, Any]:
    """Return the call of a message that an agent has sent."""
    found: dict[str, Any] = marshal.loads(message)
    return found


class CallEnd(NamedTuple):
    """What a child says of the end of a call.

    seconds: its run time. clean: it has left nothing in its directory. quiet: no output of it waits in its pipe.
    result: the JSON of its result, empty if that is in a file or if there is none.
    """

    number: int
    code: int
    seconds: float
    clean: bool
    quiet: bool
    result: bytes

    def message(self) -> bytes:
        """Return the end as a message."""
        return _FORM.pack(_END, *self[:5]) + self.result


def read_end(message: bytes) -> CallEnd | None:
    """Return the end that a child tells; None if this is another message. Raises ValueError if it is broken."""
    if not message.startswith(_END):
        return None
    if len(message) < _FORM.size:
        raise ValueError("an end of a call is cut off")
    _, number, code, seconds, clean, quiet = _FORM.unpack_from(message)
    return CallEnd(number, code, seconds, clean, quiet, message[_FORM.size :])
