"""The alert rules that are shipped, as Prometheus reads them: promtool checks their form and runs their tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parent.parent.parent / "ops" / "prometheus"
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; Debian's package prometheus has it")
@pytest.mark.parametrize(
    "arguments",
    [["check", "rules", "leasehold.rules.yml"], ["test", "rules", "leasehold.rules.test.yml"]],
    ids=" ".join,
)
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(arguments: list[str]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
