"""What a bot's report means for the leases it holds: pure, so that every case can be seen in one place."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from bots.protocol import Chunk, LeaseReport, Outcome
from schema.errors import BadInput
from schema.moves import Ending, Start, Verdict
from schema.outputs import Written
from schema.states import LeaseState

#: Verdicts after which proactive fetching replaces the job: the bot has done work.
COMPLETED = frozenset({Verdict.SUCCEEDED, Verdict.FAILED, Verdict.ERROR})


@dataclass
class Account:
    """The consequences of one sync: leases that began, leases that ended, and output."""

    started: list[Start] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    output: list[Written] = field(default_factory=list)


def compare(
    held: Sequence[Row[Any]],
    reported: Sequence[LeaseReport],
    *,
    bot_id: int,
    epoch: int,
    actor: str,
    leaves: bool = False,
) -> Account:
    """Compare the live leases of a bot with its report. Reports of other fences are not the bot's any more and
    mean nothing; the answer will not list them, and the bot stops them.

    A held lease that is not reported: pending ones are on their way; cancelling ones have been stopped; active ones
    the bot has lost, unless it `leaves`, which gives everything back. Raises BadInput for a report that contradicts
    itself.
    """
    said = {(report.job, report.fence): report for report in reported}
    account = Account()
    for lease in held:
        report = said.get((str(lease.public_id), lease.fence))
        verdict, details = None, dict[str, Any]()
        if report is not None and report.output:
            account.output += written(bot_id, epoch, report.job, report.fence, report.output)
        if report is not None and report.state == "completed":
            if report.outcome is None:
                raise BadInput(f"leases.{report.job}.outcome", "is required when the state is 'completed'")
            verdict, details = Verdict(report.outcome.verdict), _details(report.outcome)
        elif report is not None and report.state == "active" and lease.state == LeaseState.PENDING:
            account.started.append(Start(lease.job_id, lease.fence, bot_id, epoch, actor))
        elif report is None and lease.state == LeaseState.CANCELLING:
            verdict, details = Verdict.STOPPED, {"reason": "its bot does not have it any more"}
        elif report is None and lease.state == LeaseState.ACTIVE and not leaves:
            verdict, details = Verdict.LOST, {"reason": "its bot does not know it any more"}
        if verdict is None and leaves:
            verdict, details = Verdict.RELEASED, {"reason": "its bot left"}
        if verdict is not None:
            account.endings.append(Ending(lease.job_id, lease.fence, bot_id, epoch, verdict, details))
    return account


def written(bot_id: int, epoch: int, job: str, fence: int, chunks: Sequence[Chunk]) -> list[Written]:
    """Decode chunks of output. Raises BadInput where they are not base64."""
    try:
        return [
            Written(bot_id, epoch, job, fence, chunk.start, base64.b64decode(chunk.data, validate=True))
            for chunk in chunks
        ]
    except (binascii.Error, ValueError):
        raise BadInput("output.data", "is not base64") from None


def _details(outcome: Outcome) -> dict[str, Any]:
    details = outcome.model_dump(exclude_none=True, exclude={"verdict"})
    if not details.get("output_truncated"):
        details.pop("output_truncated", None)
    return details
