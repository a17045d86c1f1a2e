"""What type checkers tell of tasks: the types of values, and mistakes in calls, batches and options."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "tests/support/apps/typed_tasks.py"


@pytest.mark.long
def test_mypy_finds_each_mistake_and_no_other(tmp_path: Path) -> None:
    arguments = [
        "--strict",
        "--no-error-summary",
        "--config-file=",
        f"--cache-dir={ROOT}/.mypy_cache/typed_tasks",
        str(SAMPLES),
    ]
    environ = {**os.environ, "MYPYPATH": str(ROOT / "bots/sdk")}
    command = [sys.executable, "-m", "mypy", *arguments, "--show-column-numbers", "--explicit-package-bases"]
    said = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False).stdout
    found = [line for line in said.splitlines() if ": error: " in line]
    compare({int(line.split(":")[1]) for line in found}, said)


@pytest.mark.long
def test_pyright_finds_each_mistake_and_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error", "--pythonpath", sys.executable]
    said = subprocess.run([*command, str(SAMPLES)], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    compare({each["range"]["start"]["line"] + 1 for each in json.loads(said)["generalDiagnostics"]}, said)


def compare(found: set[int], said: str) -> None:
    lines = enumerate(SAMPLES.read_text().splitlines(), start=1)
    assert found == {number for number, line in lines if line.endswith("# wrong")}, said
