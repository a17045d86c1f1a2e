"""How values travel between Python and PostgreSQL where the driver's general way costs more than the statement."""

from typing import Any

import psycopg
from psycopg.abc import DumperKey
from psycopg.adapt import PyFormat
from psycopg.types.array import BaseListDumper, ListDumper
from psycopg.types.string import TextLoader


class IntegersDumper(ListDumper):
    """Lists of nothing but integers as one text, whose type the statement tells by a cast; others as ever."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:
        return self.cls if _integers(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> BaseListDumper:
        return self if _integers(obj) else super().upgrade(obj, format)

    def dump(self, obj: list[Any]) -> Any:
        if self.sub_dumper is None and _integers(obj):
            return b"{%s}" % ",".join(map(str, obj)).encode()
        return super().dump(obj)


def _integers(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


def adapt(connection: "psycopg.Connection[Any]") -> None:
    """Lists of integers go without being looked at one by one; ids come as the text that they are shown as."""
    connection.adapters.register_dumper(list, IntegersDumper)
    connection.adapters.register_loader("uuid", TextLoader)
