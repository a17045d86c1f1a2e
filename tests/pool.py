"""Arranging a pool in a test's own database: jobs, bots and assigners through the real functions."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from assigner.cycle import PriorityAgeAssigner
from assigner.tuning import AssignerSettings
from assigner.upkeep import Upkeep, UpkeepSettings
from bots import sessions
from bots.fetch import FetchSettings
from bots.leases import Desk, Waiting
from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync
from schema import clock, moves
from schema.engine import Database
from schema.limits import normal_properties
from schema.timing import Timing
from tests.desks import synced


@dataclass
class Bot:
    """A bot as the desk sees it: keeps its session and numbers its calls."""

    desk: Desk
    session: Session
    seq: int = 0
    holding: dict[tuple[str, int], str] = field(default_factory=dict)

    def message(self, *reports: LeaseReport, **fields: Any) -> Sync:
        """The next call, with these reports."""
        self.seq += 1
        return Sync(
            bot=self.session.bot,
            epoch=self.session.epoch,
            secret=self.session.secret,
            seq=self.seq,
            leases=list(reports),
            **fields,
        )

    def sync(self, *reports: LeaseReport, **fields: Any) -> dict[str, Any]:
        """Call once and return the decoded answer."""
        answer = synced(self.desk, self.message(*reports, **fields))
        assert not isinstance(answer, Waiting), "the call was held back"
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def take(self) -> list[dict[str, Any]]:
        """Call until acknowledged: every lease that is offered is reported active."""
        offered = self.sync()["leases"]
        if not offered:
            return []
        answer = self.sync(*[active(work) for work in offered])
        return list(answer["leases"])


def active(work: dict[str, Any]) -> LeaseReport:
    """The bot runs it."""
    return LeaseReport(job=work["job"], fence=work["fence"], state="active")


def completed(work: dict[str, Any], verdict: str = "succeeded", **fields: Any) -> LeaseReport:
    """The bot is done with it."""
    outcome = Outcome(verdict=verdict, **fields)  # type: ignore[arg-type]
    return LeaseReport(job=work["job"], fence=work["fence"], state="completed", outcome=outcome)


class Pool:
    """Everything one test needs of a pool, on one database."""

    def __init__(self, database: Database, timing: Timing, chance: random.Random) -> None:
        self.database, self.timing, self.chance = database, timing, chance

    def submit(self, count: int = 1, **fields: Any) -> list[str]:
        """Queue jobs; returns their public ids."""
        properties = normal_properties("properties", fields.pop("properties", {}))
        request = {"instance": "default", "payload": {"command": ["true"]}, **fields, "properties": properties}
        requests = [request for _ in range(count)]
        found = self.database.run(lambda connection: moves.submit(connection, requests, actor="test"))
        return [job.public_id for job in found]

    def running(self, **fields: Any) -> tuple[str, Bot, dict[str, Any]]:
        """A job that a bot runs: its public id, its bot and its lease."""
        (job,) = self.submit(**fields)
        bot = self.bot()
        self.assigner().run_once()
        (work,) = bot.take()
        return job, bot, work

    def desk(self, **fetch: Any) -> Desk:
        """A desk with these fetch settings."""
        return Desk(self.database, timing=self.timing, fetch=FetchSettings(**fetch), now=clock.monotonic)

    def bot(self, name: str = "bot-1", *, desk: Desk | None = None, **fields: Any) -> Bot:
        """A bot with an open session."""
        session = sessions.open_session(self.database, OpenSession(bot=name, **fields), timing=self.timing)
        return Bot(desk or self.desk(), session)

    def restarted(self, bot: Bot) -> Bot:
        """The same bot with a new session, which knows that nothing of the older one runs any more."""
        dead = sessions.digest(bot.session.secret).hex()
        return self.bot(bot.session.bot, dead_session=dead)

    def assigner(self, **settings: Any) -> PriorityAgeAssigner:
        """An assigner, to be run once at a time."""
        return PriorityAgeAssigner(
            self.database,
            AssignerSettings(**settings),
            timing=self.timing,
            chance=self.chance,
            name="assigner:test",
            now=clock.monotonic,
        )

    def upkeep(self, **settings: Any) -> Upkeep:
        """Upkeep, to be run once at a time."""
        return Upkeep(
            self.database, UpkeepSettings(**settings), timing=self.timing, name="upkeep:test", now=clock.monotonic
        )

    def job(self, public_id: str) -> Any:
        """The job's row."""
        return self.row("SELECT * FROM jobs WHERE public_id = CAST(:id AS uuid)", id=public_id)

    def row(self, query: str, **values: Any) -> Any:
        """One row of a query."""
        return self.database.run(lambda connection: connection.execute(text(query), values).one())

    def rows(self, query: str, **values: Any) -> list[Any]:
        """All rows of a query."""
        return self.database.run(lambda connection: list(connection.execute(text(query), values)))

    def change(self, statement: str, **values: Any) -> None:
        """Arrange what only time or a fault would bring about."""
        self.database.run(lambda connection: connection.execute(text(statement), values))

    def history(self, public_id: str) -> list[str]:
        """The moves of a job, oldest first."""
        return [
            row.move
            for row in self.rows(
                "SELECT e.move FROM job_events e JOIN jobs j ON j.id = e.job_id"
                " WHERE j.public_id = CAST(:id AS uuid) ORDER BY e.id",
                id=public_id,
            )
        ]
