"""The caller's side of the command line, run in the test's own process."""

from typing import Any

import click

from bots.commands import COMMANDS
from tests.scripted import Answer, Asked

JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
OTHER = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0002"
AT = "2026-01-01T00:00:0"


@click.group()
@click.option("--data")
def program(data: str | None) -> None:
    """What stands around the commands."""


for _command in COMMANDS:
    program.add_command(_command)


def call(*arguments: str) -> None:
    program.main(list(arguments), prog_name="leasehold", standalone_mode=False)


def accepting(asked: Asked) -> Answer:
    """A gateway's answer to jobs: each is new, and they are all the same one."""
    return Answer({"jobs": [{"id": JOB, "created": True} for _ in asked.body["jobs"]]})


def final(job: str, state: str, **result: Any) -> dict[str, Any]:
    return {"id": job, "state": state, "reason": None, "attempts": 1, "finished_at": f"{AT}9Z", "result": result}
