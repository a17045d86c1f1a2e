"""Cohorts, queues and instances that the configuration names are so from the start of an assigner process on."""

from pathlib import Path
from typing import Any

import pytest

from assigner import config, running
from assigner.installation import PoolSettings
from schema import instances
from schema.errors import BadInput, NotReady, QueueFull
from tests.calling import audited
from tests.patience import eventually
from tests.pool import Pool, completed
from tests.processes import assigner_process

FILE = """
[[cohorts]]
name = "gpus"
labels = ["gpu"]
reclaim_min = "any"

[[cohorts]]
name = "default"
reclaim_min = "any"

[[queues]]
label = "gpu"
max_queued = 1

[[instances]]
name = "team-a"
pool = "builds"

[[instances]]
name = "team-b"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "leasehold.toml"
    found.write_text(FILE)
    return found


def told(pool: Pool) -> dict[str, Any]:
    cohorts = pool.rows("SELECT name, labels, reclaim_min FROM cohorts ORDER BY position, id")
    return {
        "cohorts": [tuple(row) for row in cohorts],
        "queues": [tuple(row) for row in pool.rows("SELECT label, max_queued FROM queue_limits ORDER BY label")],
        "instances": {row.name: row.pool for row in pool.rows("SELECT name, pool FROM instances")},
    }


DECLARED = {
    "cohorts": [("gpus", ["gpu"], "any"), ("default", [], "any")],
    "queues": [("gpu", 1)],
    "instances": {"team-a": "builds", "team-b": None},
}


def test_what_is_declared_is_so_at_the_start_and_written_once(pool: Pool, file: Path) -> None:
    for _ in range(2):
        with assigner_process(pool, file):
            assert told(pool) == DECLARED
    assert audited(pool.database) == ["cohort.set"] * 2 + ["queue.set"] + ["instance.set"] * 2
    assert {row.actor for row in pool.rows("SELECT actor FROM audit")} == {"config"}
    pool.submit(label="gpu")
    with pytest.raises(QueueFull):
        pool.submit(label="gpu")


def test_a_reload_changes_what_it_names_and_leaves_the_rest(pool: Pool, file: Path) -> None:
    with assigner_process(pool, file) as (running_process, _):
        pool.submit(label="cpu")
        file.write_text('[[cohorts]]\nname = "cpus"\nlabels = ["cpu"]\n[[queues]]\nlabel = "gpu"\n')
        running_process.reload()
        eventually(lambda: told(pool)["queues"] == [])
        assert {name for name, _, _ in told(pool)["cohorts"]} == {"gpus", "cpus", "default"}
        assert told(pool)["instances"] == DECLARED["instances"] | {"default": None}
        assert pool.row("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort").name == "cpus"


def test_an_instance_that_cannot_change_its_pool_keeps_nobody_else_from_it(pool: Pool, file: Path) -> None:
    pool.database.run(lambda c: instances.put_instance(c, "team-a", pool="old", actor="test"))
    pool.submit(instance="team-a")
    bot = pool.bot(pool="old")
    pool.assigner().run_once()
    (work,) = bot.take()
    with assigner_process(pool, file) as (running_process, logs):
        assert told(pool)["instances"] == {"team-a": "old", "team-b": None}
        (said,) = [line for line in logs if line["log_level"] == "error"]
        assert (said["instance"], "drain it first" in said["error"]) == ("team-a", True)
        bot.sync(completed(work))
        running_process.reload()
        eventually(lambda: told(pool)["instances"]["team-a"] == "builds")


def test_a_reload_that_the_database_could_not_take_is_tried_again(
    pool: Pool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare, calls = running.declare, iter(range(100))

    def away_once(*arguments: Any) -> None:
        if next(calls) == 0:
            raise NotReady("the database cannot be reached")
        declare(*arguments)

    with assigner_process(pool, file) as (_, logs):
        monkeypatch.setattr(running, "declare", away_once)
        file.write_text(FILE.replace("max_queued = 1", "max_queued = 2"))
        eventually(lambda: told(pool)["queues"] == [("gpu", 2)])
        assert [line["event"] for line in logs].count("configuration reloaded") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[cohorts]]\nname = "a"\n[[cohorts]]\nname = "a"\n', "cohorts: 'a' stands there twice"),
        ('[[queues]]\nlabel = "a"\n[[queues]]\nlabel = "a"\nmax_queued = 1\n', "queues: 'a' stands there twice"),
        ('[[instances]]\nname = "a"\npool = "x"\n[[instances]]\nname = "a"\n', "instances: 'a' stands there twice"),
        ('[[cohorts]]\nname = "default"\nlabels = ["x"]\n', "the default cohort has none"),
        (f'[[cohorts]]\nname = "a"\nlabels = ["{"ä" * 33}"]\n', "labels[0]: is 66 bytes long, at most 64"),
        ('[[queues]]\nlabel = ""\n', "queues[0].label: must have at least 1"),
        (f'[[queues]]\nlabel = "{"ä" * 33}"\n', "queues[0].label: is 66 bytes long, at most 64"),
        ('[[queues]]\nlabel = "a"\nmax_queued = -1\n', "max_queued: must be greater than or equal to 0"),
        ('[[instances]]\nname = "A"\n', "instances[0].name: "),
        ('[[cohorts]]\nname = "a"\nreclaim_min = "some"\n', "cohorts[0].reclaim_min: "),
    ],
)
def test_a_wrong_declaration_is_refused_before_anything_starts(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        config.load(file, PoolSettings, {})
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(file))
