"""The results of earlier nodes of its graph that a call of a task asks for: read from the gateway before it starts.

The standard input of such a call has a field `inputs`, a list of numbers of nodes. The task gets the state and the
result of each of them in a file beside it. Calls without the field cost a search of their text.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leasehold.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, Unauthorised
from leasehold.tasks.node_results import numbers_of
from leasehold.transport import Record
from leasehold.wire import COMMAND

from bots.agent.attempts.attempt import AttemptRun
from bots.protocol import MAX_INPUTS, Outcome, Session
from schema import clock

#: Bytes of JSON of all results that one call may take.
MAX_BYTES = 16 * 1024 * 1024
#: Seconds between two tries to read them.
_PAUSE = 1.0


def wanted(payload: Mapping[str, Any] | None) -> list[int]:
    """Return the numbers of the nodes whose results this call asks for; none if it is no call that asks."""
    command, stdin = (payload or {}).get("command"), (payload or {}).get("stdin")
    # A look at the text first: to parse all arguments would cost every call.
    if not (isinstance(command, list) and command[:1] == [COMMAND] and isinstance(stdin, str) and '"inputs"' in stdin):
        return []
    try:
        return numbers_of(json.loads(stdin)["inputs"])
    except (BadInput, ValueError, KeyError, TypeError, RecursionError):
        return []  # the task says what is wrong


class InputReader:
    """Reads the inputs of runs of one session, each in a thread of its own, and starts the runs then."""

    def __init__(self, session: Session, call: Callable[[str, Record], Record]) -> None:
        self._session, self._call = session, call

    def start(self, run: AttemptRun, numbers: Sequence[int]) -> None:
        """Start the run once its inputs are here. Returns at once. Raises RuntimeError if there is no thread for it."""
        name = f"inputs-{run.assignment.job}"
        threading.Thread(target=self._start, args=(run, numbers), name=name, daemon=True).start()

    def _start(self, run: AttemptRun, numbers: Sequence[int]) -> None:
        inputs: Record = {}
        size = 0
        try:
            for first in range(0, len(numbers), MAX_INPUTS):
                page = self._page(run, numbers[first : first + MAX_INPUTS])
                inputs |= page
                size += len(json.dumps(page))
                if size > MAX_BYTES:
                    raise BadInput("inputs", f"have more than {MAX_BYTES:,} bytes of JSON together")
            run.inputs = json.dumps(inputs).encode()
        except BadInput as refused:
            run.refused = Outcome(verdict="failed", reason=str(refused)[:400])
        except (LeaseholdError, RuntimeError) as error:
            # RuntimeError: the session is over and has closed the transport.
            reason = f"the results of its parents cannot be read: {error}"
            run.refused = Outcome(verdict="error", reason=reason[:400])
        run.start_late()

    def _page(self, run: AttemptRun, numbers: Sequence[int]) -> Record:
        session, work = self._session, run.assignment
        lease = {"job": work.job, "fence": work.fence, "nodes": list(numbers)}
        body = {"bot": session.bot, "epoch": session.epoch, "secret": session.secret, **lease}
        while True:
            try:
                found: Record = self._call("/v1/inputs", body)["results"]
                return found
            except (BadInput, Unauthorised, Forbidden, NotFound, Conflict):
                raise
            except LeaseholdError:
                if run.stopping:
                    raise
            clock.wait(run.over, _PAUSE)
