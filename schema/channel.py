"""One connection's side of wake-ups: channels heard, idle flags held, notifications received."""

from typing import Any

import psycopg
from psycopg import sql

#: Of the names of channels, before the topic.
PREFIX = "leasehold_"
RAISE = "SELECT pg_advisory_lock_shared(hashtext('leasehold.idle'), hashtext(%s))"
LOWER = "SELECT pg_advisory_unlock_shared(hashtext('leasehold.idle'), hashtext(%s))"


class Channel:
    """Belongs to one thread. Every method raises psycopg.Error when the connection is lost; flags end with it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._arrived: list[tuple[str, str]] = []
        # Notifications that come in while a statement runs go to the handler, the others are taken from libpq.
        connection.add_notify_handler(lambda notify: self._arrived.append((notify.channel, notify.payload)))

    def fileno(self) -> int:
        """Readable when there may be something to receive."""
        return self._connection.fileno()

    def hear(self, topic: str) -> None:
        """From now on notifications of `topic` arrive here."""
        self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(PREFIX + topic)))

    def raise_flag(self, topic: str) -> bool:
        """Say that somebody here sleeps on `topic`; tells whether that worked."""
        try:
            self._connection.execute(RAISE, (topic,))
        except psycopg.errors.LockNotAvailable:
            return False  # a sender is looking at it, for longer than a lock time-out
        return True

    def lower_flag(self, topic: str) -> None:
        """Say that nobody here sleeps on `topic` any more."""
        self._connection.execute(LOWER, (topic,))

    def receive(self) -> dict[str, frozenset[str]]:
        """Topic → all the keys that have arrived since the last call; does not wait.

        An empty set is about everything: one notification without keys makes the others of its topic pointless. libpq
        may hold notifications although its socket is silent, so receive before waiting for the socket.
        """
        self._connection.pgconn.consume_input()
        while (notify := self._connection.pgconn.notifies()) is not None:
            self._arrived.append((notify.relname.decode(), notify.extra.decode()))
        united: dict[str, set[str]] = {}
        for channel, payload in self._arrived:
            united.setdefault(channel.removeprefix(PREFIX), set()).update(payload.split(","))
        self._arrived.clear()
        return {topic: frozenset() if "" in keys else frozenset(keys) for topic, keys in united.items()}
