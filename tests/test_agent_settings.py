"""An agent's settings and the name it gives itself."""

import os

import pytest

from bots.agent import AgentSettings, legal_name
from schema import limits


@pytest.mark.parametrize(
    ("host", "suffix", "name"),
    [
        ("Build_Farm.Example.ORG", "", "build_farm.example.org"),
        ("Käse host", "2", "k-se-host-2"),
        ("-._", "", "bot"),
        ("h" * 80, "worker-1", "h" * 54 + "-worker-1"),
    ],
)
def test_a_host_name_becomes_a_legal_bot_name(host: str, suffix: str, name: str) -> None:
    assert legal_name(host, suffix) == name
    assert limits.NAME.fullmatch(name)


def test_settings_have_defaults_and_refuse_what_is_unknown() -> None:
    assert AgentSettings().bot == legal_name(os.uname().nodename)
    assert AgentSettings().directory.name == f"leasehold-{os.getuid()}"
    assert AgentSettings(capacity=10_000).capacity == 10_000
    with pytest.raises(ValueError, match="capacity"):
        AgentSettings(capacity=10_001)
    with pytest.raises(ValueError, match="capacty"):
        AgentSettings.model_validate({"capacty": 2})
