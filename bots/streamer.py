"""Sends what commands write while they run, between the syncs that report their ends."""

import threading

import httpx
import structlog

from bots.calls import Caller
from bots.holdings import Holdings
from bots.protocol import OutputReport, Session
from schema import clock
from schema.errors import LeaseholdError

_log = structlog.get_logger("leasehold.agent")


class Streamer:
    """A thread that looks for new output every `interval` seconds. What fails here travels with the report of the
    lease's end."""

    def __init__(self, session: Session, holdings: Holdings, caller: Caller, *, interval: float) -> None:
        self._session, self._holdings, self._caller, self._interval = session, holdings, caller, interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._stream, name="output", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Look no longer; returns when the thread is over, or after `patience` seconds if a call hangs, which then
        ends by its own timeout."""
        self._stopping.set()
        self._thread.join(patience)

    def _stream(self) -> None:
        while not clock.wait(self._stopping, self._interval):
            for key, output in self._holdings.streams():
                if self._stopping.is_set():
                    return
                pending = output.pending()
                report = OutputReport(
                    bot=self._session.bot,
                    epoch=self._session.epoch,
                    secret=self._session.secret,
                    job=key.job,
                    fence=key.fence,
                    output=pending.chunks,
                )
                try:
                    self._caller.once("/v1/output", report.model_dump(mode="json"))
                except (LeaseholdError, RuntimeError, httpx.HTTPError) as error:
                    # RuntimeError: the shift is over and has closed the transport.
                    _log.debug("output could not be sent", job=key.job, reason=type(error).__name__)
                else:
                    output.sent(pending.end)
