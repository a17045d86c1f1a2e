"""The templates for a replicated database: their own programs accept them, and their times fit each other."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from ops.chaos.report import Report, table
from ops.ha import cluster
from ops.ha.cluster import TEMPLATES, Cluster, filled
from ops.ha.pool import longest_wait
from ops.ha.run import Outage, counted
from schema.postgres import embedded

PATH = os.environ["PATH"] + ":/usr/sbin"


def program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster whose configurations are written and that does not run."""
    me = embedded.ServerAccount(name="me", uid=os.geteuid(), gid=os.getegid(), switch=False)
    monkeypatch.setattr(embedded, "account_for", lambda _: me)
    monkeypatch.setattr(cluster, "server_programs", lambda: Path("/usr/lib/postgresql/15/bin"))
    made = Cluster(tmp_path)
    for member in made.members:
        member.prepare(made.values)
    return made


def test_every_variable_of_a_template_has_a_value(prepared: Cluster) -> None:
    for member in prepared.members:
        for name in ("patroni.yml", "etcd.env"):
            lines = (member.directory / name).read_text().splitlines()
            assert not [line for line in lines if "${" in line and not line.lstrip().startswith("#")]
    assert "${" not in filled("haproxy.cfg", prepared.values)


def test_patroni_accepts_its_configuration(prepared: Cluster) -> None:
    path = prepared.members[0].directory / "patroni.yml"
    said = subprocess.run([program("patroni"), "--validate-config", path], capture_output=True, text=True, check=False)
    # It also tries the addresses, of which none is there, and wants pg_hba in a place that is read only once.
    known = re.compile(
        r"restapi|bootstrap.pg_hba|postgresql\.(listen|connect_address|bin_dir)|etcd\.host|not listening|didn't pass"
    )
    assert [line for line in (said.stdout + said.stderr).splitlines() if line and not known.search(line)] == []


def test_haproxy_accepts_its_configuration(prepared: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(filled("haproxy.cfg", prepared.values))
    said = subprocess.run([program("haproxy"), "-c", "-f", path], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr


def test_the_primary_gives_up_before_another_one_may_take_over() -> None:
    text = (TEMPLATES / "patroni.yml").read_text()
    times = {name: int(value) for name, value in re.findall(r"^    (ttl|loop_wait|retry_timeout): (\d+)$", text, re.M)}
    assert times["loop_wait"] + 2 * times["retry_timeout"] <= times["ttl"]


def test_the_lock_is_renewed_by_an_interface_that_compares_its_holder() -> None:
    """Through version 3 Patroni 3.0 takes the lock from a new primary after a partition; acknowledged jobs are lost."""
    assert re.search(r"^etcd:$", (TEMPLATES / "patroni.yml").read_text(), re.M)
    assert 'ETCD_ENABLE_V2="true"' in (TEMPLATES / "etcd.env").read_text()


def test_the_longest_wait_also_counts_the_time_before_the_first_answer_and_after_the_last(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text("ask steady-1 9.5\nack steady-1 j1 10.0\nack steady-2 j2 12.0\nack inside-db1-1 j3 19.0\n")
    assert longest_wait(journal, 9.0, 30.0) == 18.0
    assert longest_wait(journal, 5.0, 13.0) == 5.0
    assert longest_wait(journal, 9.0, 12.5) == 2.0


def test_the_table_shows_the_longest_time_without_an_acknowledged_submit() -> None:
    outages = [Outage("kill", "db1", 0.0, 90.0, None, waited) for waited in (20.5, 31.25)]
    assert table([Report(1, injections=[*outages])]).splitlines()[-1].split()[-2:] == ["25.88", "31.25"]


def test_faults_are_counted_and_an_unknown_one_is_refused() -> None:
    assert counted("kill=3,partition=1") == {"kill": 3, "partition": 1}
    for given in ("kills=1", "kill=-1", "kill", "kill=1,", ""):
        with pytest.raises(click.BadParameter, match="is not FAULT=NUMBER"):
            counted(given)
