"""Receives a message with descriptors; unlike `socket.recv_fds`, it heeds flags."""

import array
import socket


def receive(channel: socket.socket, size: int, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return a message of at most `size` bytes with at most `most` descriptors, which other programs do not inherit.

    Raises BlockingIOError with MSG_DONTWAIT, and what else `recvmsg` raises.
    """
    found = array.array("i")
    message, sent, _, _ = channel.recvmsg(size, socket.CMSG_LEN(most * found.itemsize), flags | socket.MSG_CMSG_CLOEXEC)
    for _, kind, data in sent:
        if kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return message, list(found)
