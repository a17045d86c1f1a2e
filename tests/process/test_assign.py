"""One assigner process: reload, metrics, and how it ends."""

import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput, NotReady, QueueFull

from assigner.config import loading
from assigner.process import policies
from assigner.settings import PoolSettings
from schema.accounting.quotas import quotas
from schema.tenancy import instances
from schema.tenancy.cohorts import put_cohort
from schema.timing import Timing
from tests.support.http import audited
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, completed
from tests.support.servers import Processes, assigner_process
from tests.support.tenancy import Tenancy


def test_a_process_tells_of_single_nodes_when_it_is_asked_to_and_ends_when_it_is_terminated(
    pool: Pool, tmp_path: Path, database_url: str, timing: Timing
) -> None:
    (job,) = pool.submit(terms={"graph": "7"})
    pool.bot()
    config = '[ordering]\nkind = "graph"\n[log]\nlevel = "debug"\n'
    with Processes(tmp_path, database_url, timing, config=config) as processes:
        assigner = processes.assigner()
        eventually(lambda: "event=leasehold.node_dispatched" in assigner.said())
        assert f"job={job}" in assigner.said()
        assigner.signal(signal.SIGTERM)
        assert assigner.popen.wait(MINUTE) == 0
        assert "assigners stopped" in assigner.said()


def test_a_changed_configuration_is_taken_and_a_wrong_one_refused_as_a_scrape_shows(
    pool: Pool, tenancy: Tenancy, tmp_path: Path, database_url: str, timing: Timing, port: int
) -> None:
    tenancy.quota("team-a", minimum=3, maximum=8)
    tenancy.evicted("team-a", age=5)
    pool.bot(capacity=1)
    with Processes(tmp_path, database_url, timing, config="[quotas]\neviction_cooldown = 1.0\n") as processes:
        assigner = processes.start("a", "assign", "--metrics-port", str(port), "--metrics-host", "127.0.0.2")
        eventually(lambda: "assigners run" in assigner.said())

        def page(path: str = "metrics", status: int = 200) -> str:
            answer = httpx.get(f"http://127.0.0.2:{port}/{path}", trust_env=False)
            assert answer.status_code == status
            return answer.text

        assert [page("healthz"), page("readyz"), page("other", 404)] == [
            '{"status": "ok"}', '{"status": "ok"}', '{"status":"not found"}'
        ]  # fmt: skip
        pair = '{cohort="default",instance="team-a"}'
        assert f"leasehold_quota_capacity_gap_units{pair} 2.0" in page()
        assert f"leasehold_quota_effective_max_units{pair} 8.0" in page(), "the cooldown is over"
        assert "leasehold_quota_pairs_left_out 0.0" in page()

        text = processes.config.read_text().replace("[quotas]\n", "[quotas]\nmetric_pairs = 0\n")
        more = "[[assigners]]\nbatch = 7\nthreads = 3\n[gateway]\nqueue = 999\n"
        processes.config.write_text(text + more)
        eventually(lambda: "of=gateways keys=" in assigner.said())
        assert "configuration reloaded" in assigner.said()
        for told in ("of=assigners keys=assigners[0].threads\n", "of=gateways keys=gateway.queue\n"):
            assert f'"changed keys need a restart" {told}' in assigner.said()
        eventually(lambda: "leasehold_quota_pairs_left_out 1.0" in page())
        assert pair not in page()

        processes.config.write_text(text + "[[assigners]]\nbatch = 0\n")
        assigner.signal(signal.SIGHUP)
        eventually(lambda: "configuration refused" in assigner.said())
        assert "assigners[0].batch: must be greater than or equal to 1" in assigner.said()
        assert "leasehold_config_reload_failures_total 1.0" in page()
        assert assigner.alive
        assigner.signal(signal.SIGINT)
        assert assigner.popen.wait(MINUTE) == 130


def test_a_port_that_is_taken_is_bad_input(tmp_path: Path, database_url: str, timing: Timing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Processes(tmp_path, database_url, timing) as processes:
        port = taken.getsockname()[1]
        assigner = processes.start("assigner-1", "assign", "--metrics-port", str(port))
        assert assigner.popen.wait(MINUTE) == 2
        assert assigner.said() == f"error: --metrics-port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        for host, why in (("192.0.2.1", "Cannot assign requested address"), ("a..b", "is no name of a host")):
            assigner = processes.start(f"at-{host}", "assign", "--metrics-port", str(port), "--metrics-host", host)
            assert assigner.popen.wait(MINUTE) == 2
            assert assigner.said() == f"error: --metrics-host: cannot listen on {host}:{port}: {why}\n"
        gateway = processes.start("gateway", "gateway", environment={"LEASEHOLD_GATEWAY_PORT": str(port)})
        assert gateway.popen.wait(MINUTE) == 2
        said = "Address already in use; another pool or gateway may run there: choose another port, 0 = any\n"
        assert gateway.said().endswith(f"error: gateway.port: cannot listen on 127.0.0.1:{port}: {said}")


# Cohorts, queues and instances that the configuration names are so from the start of an assigner process on.


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
quotas.gpus = { min = 1, max = 4 }
quotas.default = { max = 2 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "leasehold.toml"
    found.write_text(FILE)
    return found


def declared_rows(pool: Pool) -> dict[str, Any]:
    cohorts = pool.rows("SELECT name, labels, reclaim_min FROM cohorts ORDER BY position, id")
    return {
        "cohorts": [tuple(row) for row in cohorts],
        "queues": [tuple(row) for row in pool.rows("SELECT label, max_queued FROM queue_limits ORDER BY label")],
        "instances": {row.name: row.pool for row in pool.rows("SELECT name, pool FROM instances")},
        "quotas": [(each.cohort, each.instance, each.min_quota, each.max_quota) for each in pool.database.run(quotas)],
    }


DECLARED: dict[str, Any] = {
    "cohorts": [("gpus", ["gpu"], "any"), ("default", [], "any")],
    "queues": [("gpu", 1)],
    "instances": {"team-a": "builds", "team-b": None},
    "quotas": [("gpus", "team-b", 1, 4), ("default", "team-b", 0, 2)],
}


def test_what_is_declared_is_so_at_the_start_and_written_once(pool: Pool, file: Path) -> None:
    for _ in range(2):
        with assigner_process(pool, file):
            assert declared_rows(pool) == DECLARED
    assert audited(pool.database) == ["cohort.set"] * 2 + ["queue.set"] + ["instance.set"] * 2 + ["quota.set"] * 2
    assert {row.actor for row in pool.rows("SELECT actor FROM audit")} == {"config"}
    pool.submit(label="gpu")
    with pytest.raises(QueueFull):
        pool.submit(label="gpu")


def test_a_reload_changes_what_it_names_and_leaves_the_rest(pool: Pool, file: Path) -> None:
    with assigner_process(pool, file) as (running_process, _):
        pool.submit(label="cpu")
        file.write_text('[[cohorts]]\nname = "cpus"\nlabels = ["cpu"]\n[[queues]]\nlabel = "gpu"\n')
        running_process.reload()
        eventually(lambda: declared_rows(pool)["queues"] == [])
        assert {name for name, _, _ in declared_rows(pool)["cohorts"]} == {"gpus", "cpus", "default"}
        assert declared_rows(pool)["instances"] == DECLARED["instances"] | {"default": None}
        assert pool.row("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort").name == "cpus"


def test_a_quota_in_a_cohort_that_is_not_there_is_logged_and_keeps_no_other_from_being_set(
    pool: Pool, file: Path
) -> None:
    file.write_text(FILE.replace("quotas.gpus", "quotas.tpus"))
    with assigner_process(pool, file) as (running_process, logs):
        assert declared_rows(pool)["quotas"] == [("default", "team-b", 0, 2)]
        (said,) = [line for line in logs if line["log_level"] == "error"]
        assert (said["cohort"], said["instance"]) == ("tpus", "team-b")
        assert pool.rows("SELECT FROM policy_files"), "the file counts as done, so that a rollback outlasts restarts"
        pool.database.run(lambda c: put_cohort(c, "tpus", labels=["tpu"], actor="test"))
        file.write_text(file.read_text().replace("max = 2", "max = 3"))
        running_process.reload()
        eventually(lambda: ("tpus", "team-b", 1, 4) in declared_rows(pool)["quotas"])


def test_an_instance_that_cannot_change_its_pool_keeps_nobody_else_from_it(pool: Pool, file: Path) -> None:
    pool.database.run(lambda c: instances.put_instance(c, "team-a", pool="old", actor="test"))
    pool.submit(instance="team-a")
    bot = pool.bot(pool="old")
    (work,) = pool.given(bot)
    with assigner_process(pool, file) as (running_process, logs):
        assert declared_rows(pool)["instances"] == {"team-a": "old", "team-b": None}
        (said,) = [line for line in logs if line["log_level"] == "error"]
        assert (said["instance"], "drain it first" in said["error"]) == ("team-a", True)
        bot.sync(completed(work))
        running_process.reload()
        eventually(lambda: declared_rows(pool)["instances"]["team-a"] == "builds")


def test_a_reload_that_the_database_could_not_take_is_tried_again(
    pool: Pool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file, calls = policies.put_file, iter(range(100))

    def away_once(*arguments: Any, **more: Any) -> bool:
        if next(calls) == 0:
            raise NotReady("the database cannot be reached")
        return put_file(*arguments, **more)

    with assigner_process(pool, file) as (_, logs):
        monkeypatch.setattr(policies, "put_file", away_once)
        file.write_text(FILE.replace("max_queued = 1", "max_queued = 2"))
        eventually(lambda: declared_rows(pool)["queues"] == [("gpu", 2)])
        assert [line["event"] for line in logs].count("configuration reloaded") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[cohorts]]\nname = "a"\n[[cohorts]]\nname = "a"\n', "cohorts: 'a' is declared twice"),
        ('[[queues]]\nlabel = "a"\n[[queues]]\nlabel = "a"\nmax_queued = 1\n', "queues: 'a' is declared twice"),
        ('[[instances]]\nname = "a"\npool = "x"\n[[instances]]\nname = "a"\n', "instances: 'a' is declared twice"),
        ('[[cohorts]]\nname = "default"\nlabels = ["x"]\n', "the default cohort has none"),
        (f'[[cohorts]]\nname = "a"\nlabels = ["{"ä" * 33}"]\n', "labels[0]: is 66 bytes long, at most 64"),
        ('[[queues]]\nlabel = ""\n', "queues[0].label: must have at least 1"),
        (f'[[queues]]\nlabel = "{"ä" * 33}"\n', "queues[0].label: is 66 bytes long, at most 64"),
        ('[[queues]]\nlabel = "a"\nmax_queued = -1\n', "max_queued: must be greater than or equal to 0"),
        ('[[instances]]\nname = "A"\n', "instances[0].name: "),
        ('[[cohorts]]\nname = "a"\nreclaim_min = "some"\n', "cohorts[0].reclaim_min: "),
        ('[[instances]]\nname = "a"\nquotas.default = { min = 3, max = 2 }\n', "min is 3, above max, which is 2"),
        ("[[quotas]]\nmin = 1\n", "quotas: is one section, [quotas], and not a list of sections, [[quotas]]"),
        ('[instances]\nname = "a"\n', "instances: is a list of sections, [[instances]], and not one section"),
    ],
)
def test_a_wrong_declaration_is_refused_before_anything_starts(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        loading.load(file, PoolSettings, {})
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(file))
