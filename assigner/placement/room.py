"""What bots have left of their units, resources and GPUs, and what jobs take of it; pure functions.

A bot's GPUs are devices: a job that takes a part of a GPU takes it of one device, and whole GPUs are devices of which
nothing is in use. Everything else is an amount.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from schema.fleet.candidates import FreeBot
from schema.validation import MAX_UNITS, WHOLE_GPU, ResourceName

#: The resources that are amounts. `gpu_milli` is one where a bot declares it without GPUs.
AMOUNTS: tuple[ResourceName, ...] = ("cpu_milli", "memory_mib", "disk_mib", "gpu_milli")

Need = Mapping[ResourceName, int]
#: An amount for each of `AMOUNTS`; None of a bot: any amount.
Amounts = tuple[float | None, ...]
_ANY: Amounts = (None,) * len(AMOUNTS)


class Demand(NamedTuple):
    """What a job takes: units, amounts of resources, whole GPUs, and thousandths of one more GPU."""

    units: int
    amounts: tuple[float, ...]
    gpus: int = 0
    gpu_milli: int = 0


class Declared(NamedTuple):
    """What a bot has declared: what is left of each amount and what it has of it, and the thousandths that are left of
    each of its GPUs; None if it has declared no GPUs."""

    left: Amounts = _ANY
    most: Amounts = _ANY
    gpus: tuple[int, ...] | None = None


class Room(NamedTuple):
    """What a bot has left."""

    units: int
    amounts: Amounts = _ANY
    gpus: tuple[int, ...] | None = None


def demand_of(units: int, need: Need) -> Demand:
    """Return what a job of so many units takes that needs these resources."""
    amounts = tuple(float(need.get(name, 0)) for name in AMOUNTS)
    return Demand(units, amounts, need.get("gpus", 0), need.get("gpu_milli", 0))


def choose_gpus(gpus: Sequence[int] | None, demand: Demand) -> tuple[int, ...] | None:
    """Return the numbers of the GPUs that the job is given, the one that it shares last; None if they do not suffice.

    A part is taken of the GPU that has least left of those that have enough, so that others stay whole. Of equal ones
    the first is taken. gpus: the thousandths that are left of each; None if the bot has declared none, which gives no
    job a whole GPU.
    """
    if gpus is None:
        return None if demand.gpus else ()
    shared: tuple[int, ...] = ()
    if demand.gpu_milli:
        enough = [(left, number) for number, left in enumerate(gpus) if left >= demand.gpu_milli]
        if not enough:
            return None
        shared = (min(enough)[1],)
    if not demand.gpus:
        return shared
    whole = [number for number, left in enumerate(gpus) if left >= WHOLE_GPU and number not in shared]
    return None if len(whole) < demand.gpus else (*whole[: demand.gpus], *shared)


def fits(room: Room, demand: Demand) -> bool:
    """Return whether the job fits."""
    if room.units < demand.units:
        return False
    for left, amount in zip(room.amounts, demand.amounts, strict=True):
        if left is not None and left < amount:
            return False
    return not (demand.gpus or demand.gpu_milli) or choose_gpus(room.gpus, demand) is not None


def after(room: Room, demand: Demand) -> Room:
    """Return what is left once a job that fits has taken its part."""
    amounts = tuple(
        None if left is None else left - amount for left, amount in zip(room.amounts, demand.amounts, strict=True)
    )
    gpus = room.gpus
    if gpus is not None and (chosen := choose_gpus(gpus, demand)):
        left_of = list(gpus)
        for number, amount in zip(chosen, gpu_amounts(demand), strict=True):
            left_of[number] -= amount
        gpus = tuple(left_of)
    return Room(room.units - demand.units, amounts, gpus)


def gpu_amounts(demand: Demand) -> list[int]:
    """Return the thousandths that the job takes of each of the GPUs that `choose_gpus` returns."""
    return [WHOLE_GPU] * demand.gpus + ([demand.gpu_milli] if demand.gpu_milli else [])


def times(room: Room, demand: Demand) -> int:
    """Return how many such jobs fit."""
    most = min(
        MAX_UNITS,
        room.units // demand.units,
        *(
            int(left // amount)
            for left, amount in zip(room.amounts, demand.amounts, strict=True)
            if left is not None and amount
        ),
    )
    if not (demand.gpus or demand.gpu_milli):
        return most
    found = 0
    while found < most and fits(room, demand):
        room, found = after(room, demand), found + 1
        if room.gpus is None:
            return most
    return found


#: The most rooms for which `WaitingDemand` remembers what cannot be used.
MAX_KNOWN = 100_000


class WaitingDemand:
    """What waiting jobs take: each demand with the share of the waiting jobs that have it."""

    def __init__(self, jobs: Mapping[Demand, int]) -> None:
        total = sum(jobs.values())
        self.shares = {demand: count / total for demand, count in jobs.items()}
        self._known: dict[Room, tuple[float, float]] = {}

    def unusable(self, room: Room) -> tuple[float, float]:
        """Return how many thousandths of GPUs, and how many units, a waiting job cannot use there on average.

        A job that does not fit can use nothing. Of one that fits, GPUs that have too little left for it are out of use,
        and units that are left over when it is repeated. A job without a GPU can use no GPU.
        """
        found = self._known.get(room)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[room] = self._unusable(room)
        return found

    def _unusable(self, room: Room) -> tuple[float, float]:
        gpus, units, all_gpus = 0.0, 0.0, sum(room.gpus or ())
        for demand, share in self.shares.items():
            if not fits(room, demand):
                gpus += share * all_gpus
                units += share * room.units
                continue
            least = WHOLE_GPU if demand.gpus else demand.gpu_milli
            gpus += share * (sum(left for left in room.gpus or () if left < least) if least else all_gpus)
            units += share * (room.units % demand.units)
        return gpus, units


class RoomCopy:
    """A working copy of what bots have left."""

    def __init__(self, bots: Iterable[FreeBot], declared: Mapping[int, Declared]) -> None:
        self._declared = declared
        self._rooms = {bot.id: _room(bot, declared.get(bot.id)) for bot in bots}

    def of(self, bot_id: int) -> Room:
        """Return what the bot has left."""
        return self._rooms[bot_id]

    def left(self, bot: FreeBot) -> FreeBot:
        """Return the bot with the units that it has left."""
        return bot._replace(free_units=self._rooms[bot.id].units)

    def declared(self) -> dict[int, Declared]:
        """Return what the bots have declared, with what is left of it."""
        return {
            bot_id: each._replace(left=self._rooms[bot_id].amounts, gpus=self._rooms[bot_id].gpus)
            for bot_id, each in self._declared.items()
            if bot_id in self._rooms
        }

    def take(self, bot_id: int, demand: Demand) -> None:
        """Take what one job takes."""
        self._rooms[bot_id] = after(self._rooms[bot_id], demand)


def _room(bot: FreeBot, declared: Declared | None) -> Room:
    return Room(bot.free_units) if declared is None else Room(bot.free_units, declared.left, declared.gpus)
