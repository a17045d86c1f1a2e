"""How the doctor judges what it reads, also what no test can make of a server."""

from dataclasses import replace

import pytest

from schema.doctoring import indexes, settings, snapshots, vacuuming, ways
from schema.doctoring.findings import Check, Verdict
from schema.doctoring.settings import Connections, Idler
from schema.doctoring.snapshots import Holder
from schema.doctoring.vacuuming import Settings, Table
from schema.storage import STORAGE

SESSION = Holder("session", 7, "psql", "ann", "idle in transaction", "pool", 30.0, 10)
SLOT = Holder("slot", None, "it's old", None, "inactive", None, None, 10)
PREPARED = Holder("prepared", None, "gid'1", "ann", None, "pool", 30.0, 10)
STANDBY = Holder("standby", 9, "replica", "rep", "streaming", None, None, 10)
FINE = Check("snapshots", Verdict.OK, "nobody holds a snapshot")


@pytest.mark.parametrize(
    ("holder", "verdict", "remedy"),
    [
        (replace(SESSION, seconds=59.9), Verdict.OK, None),
        (replace(SESSION, seconds=60.0), Verdict.WARNING, "end session 7: SELECT pg_terminate_backend(7)"),
        (replace(SESSION, seconds=600.0), Verdict.BAD, "end session 7: SELECT pg_terminate_backend(7)"),
        (replace(PREPARED, seconds=61.0), Verdict.WARNING,
         "in database pool: COMMIT PREPARED or ROLLBACK PREPARED 'gid''1'"),
        (replace(SLOT, transactions=9_999), Verdict.OK, None),
        (replace(SLOT, transactions=10_000), Verdict.WARNING,
         "if nobody needs the slot: SELECT pg_drop_replication_slot('it''s old')"),
        (replace(SLOT, transactions=1_000_000, state="active", pid=5), Verdict.BAD,
         "end the long query of whoever uses slot 'it''s old' (pid 5)"),
        (replace(STANDBY, transactions=20_000), Verdict.WARNING,
         "end the long query on standby replica, or set hot_standby_feedback = off there"),
    ],
)  # fmt: skip
def test_whoever_holds_an_old_snapshot_is_named_with_the_way_to_end_it(
    holder: Holder, verdict: Verdict, remedy: str | None
) -> None:
    found = snapshots.judge([holder])
    assert (found.verdict, found.remedy) == (verdict, remedy)
    assert snapshots.told(holder) in found.found


def test_the_gravest_holder_is_named_first_and_the_young_ones_are_not_to_be_ended() -> None:
    old = replace(SESSION, pid=8, seconds=700.0)
    found = snapshots.judge([SESSION, replace(SLOT, transactions=50_000), old])
    assert found.verdict is Verdict.BAD
    assert found.found.index("session 8") < found.found.index("slot")
    assert "session 7" not in found.found + str(found.remedy)
    assert found.figures["oldest_transactions"] == 50_000


def test_a_session_of_unknown_age_is_not_to_be_ended_beside_one_that_is_old() -> None:
    hidden = replace(SESSION, pid=8, state=None, seconds=None, transactions=10**6)
    assert snapshots.judge([hidden, SESSION]).verdict is Verdict.UNKNOWN
    found = snapshots.judge([hidden, replace(SESSION, seconds=90.0)])
    assert (found.verdict, found.remedy) == (Verdict.WARNING, "end session 7: SELECT pg_terminate_backend(7)")


def test_a_name_from_the_server_cannot_write_to_the_terminal() -> None:
    found = snapshots.judge([replace(SESSION, name="\x1b[2J", owner="a\nb", seconds=100.0)])
    assert found.found.isprintable()


@pytest.mark.parametrize(
    ("offset", "uncertainty", "verdict"),
    [
        (0.2, 0.001, Verdict.OK),
        (-1.2, 0.001, Verdict.WARNING),
        (3600.0, 0.001, Verdict.WARNING),
        (2.0, 1.5, Verdict.OK),
    ],
)
def test_clocks_that_differ_by_more_than_a_second_are_a_warning(
    offset: float, uncertainty: float, verdict: Verdict
) -> None:
    found = ways.judge_clocks(offset, uncertainty)
    assert found.verdict is verdict
    assert found.figures["offset_ms"] == offset * 1000


def test_a_slow_wake_up_is_a_warning() -> None:
    assert ways.judge_wakeup(0.002).verdict is Verdict.OK
    assert ways.judge_wakeup(0.8).verdict is Verdict.WARNING


@pytest.mark.parametrize("name", ["fsync", "full_page_writes", "synchronous_commit"])
def test_every_setting_without_which_an_acknowledged_submit_can_be_lost_is_bad_when_off(name: str) -> None:
    sound = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "remote_apply"}
    assert settings.judge_durability(sound).verdict is Verdict.OK
    found = settings.judge_durability(sound | {name: "off"})
    assert found.verdict is Verdict.BAD
    assert found.found == f"{name} is off: {settings.LOSSES[name]}"
    assert name in (found.remedy or "")


@pytest.mark.parametrize(("in_use", "verdict"), [(77, Verdict.OK), (78, Verdict.WARNING), (93, Verdict.BAD)])
def test_few_connections_that_are_left_are_a_danger(in_use: int, verdict: Verdict) -> None:
    counted = Connections(most=100, reserved=3, in_use=in_use, ours=10)
    assert settings.judge_connections(counted, []).verdict is verdict


def test_only_a_session_that_idles_for_long_is_a_warning_and_it_hides_nothing_worse() -> None:
    counted = Connections(most=100, reserved=3, in_use=10, ours=10)
    assert settings.judge_connections(counted, [Idler(5, "x", 9.0)]).verdict is Verdict.OK
    found = settings.judge_connections(counted, [Idler(5, "x", 11.0)])
    assert (found.verdict, found.figures["idle_in_transaction"]) == (Verdict.WARNING, [5])
    full = settings.judge_connections(replace(counted, in_use=97), [Idler(5, "x", 11.0)])
    assert full.verdict is Verdict.BAD


def test_small_buffers_matter_once_the_tables_are_larger() -> None:
    size = 128 * 1024**2
    assert settings.judge_memory(buffers=size, work=4 * 1024**2, size=size).verdict is Verdict.OK
    assert settings.judge_memory(buffers=size, work=4 * 1024**2, size=size + 1).verdict is Verdict.WARNING
    assert settings.judge_memory(buffers=4 * size, work=64 * 1024, size=size + 1).verdict is Verdict.WARNING


@pytest.mark.parametrize("name", ["autovacuum", "track_counts"])
def test_a_server_that_does_not_vacuum_is_bad(name: str) -> None:
    off = {"autovacuum": Settings(autovacuum=False), "track_counts": Settings(track_counts=False)}
    found = vacuuming.judge_autovacuum(off[name], [])
    assert (found.verdict, found.found) == (Verdict.BAD, f"{name} is off")


@pytest.mark.parametrize(
    ("dead", "vacuumed", "verdict"),
    [
        (6_000, None, Verdict.WARNING),
        (6_000, 700.0, Verdict.WARNING),
        (6_000, 500.0, Verdict.OK),
        (4_000, None, Verdict.OK),
    ],
)
def test_a_table_that_needs_a_vacuum_and_had_none_for_long_is_a_warning(
    dead: int, vacuumed: float | None, verdict: Verdict
) -> None:
    table = Table("jobs", {name: str(value) for name, value in STORAGE["jobs"].items()}, 100_000, dead, vacuumed)
    assert vacuuming.judge_autovacuum(Settings(), [table]).verdict is verdict
    if dead > vacuuming.MANY_DEAD:
        lazy = replace(table, live=10_000_000)
        assert vacuuming.judge_autovacuum(Settings(), [lazy]).verdict is Verdict.OK


def test_the_same_parameter_written_otherwise_is_the_same() -> None:
    options = {
        "fillfactor": "45.0",
        "autovacuum_vacuum_scale_factor": "1e-2",
        "autovacuum_vacuum_cost_delay": "4.0",
        "autovacuum_vacuum_cost_limit": "900",
    }
    assert vacuuming.judge_autovacuum(Settings(), [Table("leases", options, 0, 0, None)]).verdict is Verdict.OK


def test_dead_rows_are_a_warning_only_where_they_are_thousands_more_than_the_live_ones() -> None:
    table = Table("leases", {}, 1_000, 6_000, None)
    assert vacuuming.judge_dead_rows([table], oldest=FINE).verdict is Verdict.OK
    found = vacuuming.judge_dead_rows([replace(table, dead=6_001)], oldest=FINE)
    assert (found.verdict, found.remedy) == (Verdict.WARNING, "VACUUM leasehold.leases")


def test_an_index_that_is_being_built_is_not_to_be_touched() -> None:
    wanted = {"a": "CREATE INDEX CONCURRENTLY a"}
    found = indexes.judge(wanted, [indexes.Index("a", usable=False, building=True)], is_current=True)
    assert (found.verdict, found.remedy) == (Verdict.WARNING, "look again when they are built")
