"""The hot statements, each on rows of a filled pool, for the tests that watch their plans."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product

from sqlalchemy import Connection

from assigner import queries, upkeep
from bots import listing, vigil
from schema import candidates, clock, fetching, forgetting, moves, ready, resources, unservable, windows
from schema.candidates import Wanted
from schema.fetching import Fetcher
from schema.front import Front
from schema.moves import Alike, Ending, Placement, Start, Verdict, sessions
from schema.ready import Order, Scope
from schema.resources import Asked
from schema.windows import Walk

#: Requirement sets: all its bots free; one in a hundred; none; three bots in the whole pool; no bot at all.
FREE, SCARCE, FULL, RARE, ABSENT = KINDS = ("free", "scarce", "full", "rare", "absent")
BATCH, SAMPLE_SIZE = 10, 5
WALKS = [Walk(0, None, None, 40), Walk(0, 1, None, 5), Walk(0, None, "one", 5)]


@dataclass(frozen=True)
class Known:
    """Rows to work on; an empty pool has none, and statements then run on ids that do not exist."""

    platforms: dict[str, int]
    bots: dict[str, int]
    jobs: list[int]
    public: list[str]
    held: list[tuple[int, int, int, int]]
    free: list[int]

    def sample(self, connection: Connection, kind: str) -> None:
        wanted = [Wanted(0, 1, self.platforms[kind], 1, SAMPLE_SIZE)]
        candidates.sample(connection, wanted, chance=random.Random(7))

    def fetch(
        self, connection: Connection, *, any_wait: bool = False, literal: bool = False, line: Front | None = None
    ) -> None:
        fetching.pick_for_bot(
            connection,
            Fetcher(self.bots[FREE], FREE, 0, None, None, BATCH, BATCH, returned=[1]),
            limit=BATCH,
            any_wait=any_wait,
            literal=literal,
            cooldown=600,
            line=line,
        )

    def end(self, connection: Connection, verdict: Verdict) -> None:
        moves.end(connection, [Ending(*each, verdict) for each in self.held], actor="test")

    def grant(self, connection: Connection) -> None:
        wishes = [Placement(job, bot, {}) for job, bot in zip(self.jobs, self.free, strict=False)]
        moves.grant(connection, wishes, assigner="test", strategy="test", ack=1)

    def fences(self) -> list[tuple[int, int]]:
        return [(job, fence) for job, fence, _, _ in self.held]


Act = Callable[[Known, Connection], object]


def _pick(order: Order) -> Act:
    return lambda _, connection: ready.pick(connection, Scope(), order=order, batch=BATCH, chance=random.Random(7))


def _pick_from_front(_: Known, connection: Connection) -> None:
    """From the very beginning, and from where the front was seen to begin."""
    line = Front(partial(next, count(0.0, 1000.0)))
    for _walk in range(2):
        ready.pick(connection, Scope(), order=Order.PRIORITY, batch=BATCH, chance=random.Random(7), line=line)


def _sample(kind: str) -> Act:
    return lambda known, connection: known.sample(connection, kind)


def _any_free(kind: str) -> Act:
    return lambda known, connection: candidates.any_free(
        connection, Wanted(0, 1, known.platforms[kind], 1, SAMPLE_SIZE)
    )


def _fit(kind: str) -> Act:
    def fit(known: Known, connection: Connection) -> None:
        asked = [Asked(Wanted(0, 1, known.platforms[kind], 1, SAMPLE_SIZE), {"cpu_milli": 1, "memory_mib": 1})]
        resources.fitting(connection, asked)
        resources.fit(connection, asked)
        resources.left(connection, asked)

    return fit


ACTS: dict[str, Act] = {
    "pick by priority": _pick(Order.PRIORITY),
    "pick by age": _pick(Order.AGE),
    "pick from the front": _pick_from_front,
    "pick in an instance": lambda _, connection: ready.pick(
        connection, Scope(instances=[1]), order=Order.PRIORITY, batch=BATCH, chance=random.Random(7)
    ),
    "unserved queues": lambda _, connection: unservable.unserved(connection, Scope(), limit=BATCH),
    "fetch": lambda known, connection: known.fetch(connection),
    "fetch from the front": lambda known, connection: known.fetch(connection, line=Front(clock.monotonic)),
    "fetch to capacity": lambda known, connection: known.fetch(connection, any_wait=True),
    "fetch literally": lambda known, connection: known.fetch(connection, literal=True),
    **{f"sample {kind}": _sample(kind) for kind in KINDS},
    **{f"any free {kind}": _any_free(kind) for kind in KINDS},
    **{f"fit on {kind}": _fit(kind) for kind in KINDS},
    "sample a window": lambda _, connection: windows.look(connection, WALKS, chance=random.Random(7)),
    "sample of pools": lambda _, connection: windows.pools(connection, [1, 2]),
    "sample of offers": lambda it, connection: windows.offered(connection, [*product(it.platforms.values(), it.free)]),
    "grant": lambda known, connection: known.grant(connection),
    "acknowledge": lambda known, connection: moves.acknowledge(
        connection, [Start(*each, "test") for each in known.held], sync=1
    ),
    "finish": lambda known, connection: known.end(connection, Verdict.SUCCEEDED),
    "lose": lambda known, connection: known.end(connection, Verdict.LOST),
    "cancel": lambda known, connection: moves.cancel(connection, known.public, instances=None, sync=1, actor="test"),
    "states": lambda known, connection: queries.states(connection, known.public, instances=None),
    "progress": lambda known, connection: connection.execute(queries.PROGRESS, {"ids": known.public}).all(),
    "ask to stop": lambda known, connection: moves.ask_stop(
        connection, known.fences(), from_state="active", reason="timeout", sync=1
    ),
    "held by the bot": lambda known, connection: connection.execute(
        listing.HELD,
        {"bot_ids": [known.held[0][2]], "held": [1], "known_bots": [], "known_jobs": [], "known_fences": []},
    ).all(),
    "held by lost bots": lambda known, connection: connection.execute(
        sessions.HELD_BY, {"bot_ids": [bot for _, _, bot, _ in known.held]}
    ).all(),
    "look for news": lambda known, connection: connection.execute(
        vigil.BOT_NEWS, {"ids": [bot for _, _, bot, _ in known.held], "epochs": [1], "draining": [False]}
    ).all(),
    "renew": lambda known, connection: moves.renew(connection, [each[2:4] for each in known.held], ttl=1e9),
    "overdue leases": lambda _, connection: connection.execute(
        upkeep.OVERDUE, {"limit": BATCH, "since": upkeep.EVER}
    ).all(),
    "time out": lambda _, connection: moves.time_out(connection, BATCH, actor="plan"),
    "stop drained": lambda _, connection: moves.stop_drained(connection, BATCH, sync=1.0, actor="plan"),
    "forget evictions": lambda _, connection: forgetting.forget_evictions(connection, age=0, limit=BATCH),
    "close the overdue": lambda _, connection: moves.close_overdue(connection, BATCH),
    "promote": lambda _, connection: moves.promote(connection, BATCH),
    "postpone": lambda known, connection: moves.postpone(
        connection, [Alike(0, 1, known.platforms[ABSENT], 1)], reason="test", base=5, cap=60, limit=BATCH
    ),
    "release": lambda known, connection: moves.release(connection, {known.bots[FREE]: 10}, limit=BATCH),
    "retention": lambda _, connection: moves.delete_finished(
        connection, succeeded=0, failed=0, cancelled=0, dead=0, limit=BATCH
    ),
}
