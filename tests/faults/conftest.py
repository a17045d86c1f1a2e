"""What tests of faults share: pools of `ops.chaos` whose processes are forked."""

from pathlib import Path

import pytest

from ops.chaos import members
from tests.support.fork_server.server import forking


@pytest.fixture
def forked_members(leasehold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of this version, which faults end and start again: to import all takes most of their work."""
    monkeypatch.setattr(members, "subprocess", forking(leasehold.parent))
