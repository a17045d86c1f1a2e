"""The configuration file: what it may hold, and what is said about a wrong one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
from leasehold.errors import BadInput
from prometheus_client import REGISTRY
from pydantic import BaseModel, ConfigDict, Field

from assigner.config import loading
from assigner.config.loading import ConfigModel, Reloader, load
from assigner.settings import PoolSettings
from schema.postgres.engine import DatabaseSettings
from schema.timing import Timing


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["capacity", "success"] = "capacity"
    weights: dict[str, float] = {}
    sample_size: int = Field(default=10, ge=1)


class Worker(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    batch: int = Field(default=100, ge=1, le=1000)
    busy_sleep_factor: float = 0.01
    name: str | None = None
    paths: tuple[Path, ...] = ()
    strategy: Inner = Inner()


class Sections(ConfigModel):
    database: DatabaseSettings = DatabaseSettings()
    timing: Timing = Timing()
    assigners: tuple[Worker, ...] = Field(default=(Worker(),), min_length=1)


def loaded(tmp_path: Path, text: str, environ: Mapping[str, str] | None = None) -> Sections:
    path = tmp_path / "leasehold.toml"
    path.write_text(text)
    return load(path, Sections, environ or {})


def refused(tmp_path: Path, text: str, environ: Mapping[str, str] | None = None) -> str:
    """What is said, without the directory."""
    with pytest.raises(BadInput) as caught:
        loaded(tmp_path, text, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path}/leasehold.toml:")


def test_no_file_and_an_empty_file_give_the_defaults(tmp_path: Path) -> None:
    assert load(None, Sections, {}) == Sections() == loaded(tmp_path, "") == loaded(tmp_path, "\ufeff")


def test_a_file_sets_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    found = loaded(tmp_path, '[timing]\nttl = 60\n[[assigners]]\nbatch = 7\npaths = ["/bin"]\n[[assigners]]\n')
    assert found.timing == Timing(ttl=60.0)
    assert found.assigners == (Worker(batch=7, paths=(Path("/bin"),)), Worker())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[timing]\nsync = 1\ntll = 30\n", "3: timing.tll: is not a setting; did you mean 'ttl'?"),
        ("[timing]\nxyzzy = 30\n", "2: timing.xyzzy: is not a setting"),
        ("\n[timings]\nsync = 1\n", "2: timings: is not a setting; did you mean 'timing'?"),
        ('[timing]\nttl = "30"\n', '2: timing.ttl: must be a valid number, not "30"'),
        ("[timing]\nttl = true\n", "2: timing.ttl: must be a valid number, not true"),
        ("[timing]\nsync = -1\n", "2: timing.sync: must be greater than 0, not -1"),
        ("[timing]\nsync = nan\n", "2: timing.sync: must be a finite number, not NaN"),
        ("[timing]\nsync = 1979-05-27\n", "2: timing.sync: must not be a date or a time"),
        ("[timing]\n\nsync = 20\n", "3: timing: ttl (30.0) must be more than twice sync (20.0)"),
        ("[[assigners]]\n[[assigners]]\nbatch = 0\n", "3: assigners[1].batch: must be greater than or equal to 1"),
        ("[[assigners]]\nbatch = 1.5\n", "2: assigners[0].batch: must be a valid integer, not 1.5"),
        (
            "[[assigners]]\n[assigners.strategy]\nkind = 'nothing'\n",
            "3: assigners[0].strategy.kind: must be 'capacity' or 'success', not \"nothing\"",
        ),
        (
            "[[assigners]]\nstrategy = { weights = { success = 1.0, load = 'much' } }\n",
            '2: assigners[0].strategy.weights.load: must be a valid number, not "much"',
        ),
        (
            'x = """\n[timing]\n"""\n[timing]\nbad = [\n 1,\n]\n',
            "1: x: is not a setting; also ",
        ),
        ("[timing]\nttl = \n", "2: is not TOML: Invalid value"),
        ("[timing]\nttl = 1\nttl = 2\n", "3: is not TOML: Cannot overwrite a value"),
        ("timing = 3\n", "1: timing: must be an object"),
        ("assigners = []\n", "1: assigners: must have at least 1 item"),
    ],
)  # fmt: skip
def test_a_wrong_file_gives_one_line_with_place_key_and_reason(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text).startswith(said)


def test_every_problem_is_named_and_a_misspelt_key_only_once(tmp_path: Path) -> None:
    """The key that a misspelt one was meant to be is not called missing as well."""
    path = tmp_path / "leasehold.toml"
    path.write_text(
        '[[windows]]\nname = "night"\nstrat = 20\nzoen = "UTC"\n[[windows]]\nname = 5\nstart = 25\nend = 3\n'
    )
    with pytest.raises(BadInput) as caught:
        load(path, PoolSettings, {})
    assert str(caught.value).replace(f"{path}:", "") == (
        "1: windows[0].end: is missing; "
        "also 3: windows[0].strat: is not a setting; did you mean 'start'?; "
        "also 4: windows[0].zoen: is not a setting; did you mean 'zone'?; "
        "also 6: windows[1].name: must be a valid string, not 5; "
        "also 7: windows[1].start: must be less than or equal to 23, not 25"
    )
    path.write_text("".join(f"key{n} = 1\n" for n in range(100)))
    with pytest.raises(BadInput, match=r"\(and 80 more\)$"):
        load(path, PoolSettings, {})


def test_a_file_that_is_no_text_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leasehold.toml"
    path.write_bytes(b"[timing]\n# \xff\n")
    with pytest.raises(BadInput, match=r"leasehold.toml:2: is not UTF-8"):
        load(path, Sections, {})
    with pytest.raises(BadInput, match=r"none.toml: cannot be read: No such file"):
        load(tmp_path / "none.toml", Sections, {})


def test_variables_override_the_file(tmp_path: Path) -> None:
    environ = {
        "LEASEHOLD_TIMING_TTL": "90",
        "LEASEHOLD_DATABASE_URL": "postgresql://a:b@c/d",
        "LEASEHOLD_DATABASE_LISTEN_URL": '"postgresql://quoted"',
        "LEASEHOLD_ASSIGNERS_0_BATCH": "9",
        "LEASEHOLD_ASSIGNERS_0_BUSY_SLEEP_FACTOR": "0.5",
        "LEASEHOLD_ASSIGNERS_0_NAME": "12",
        "LEASEHOLD_ASSIGNERS_0_STRATEGY": "{ kind = 'success', sample_size = 3 }",
        "LEASEHOLD_ASSIGNERS_0_STRATEGY_SAMPLE_SIZE": "4",
        "LEASEHOLD_ASSIGNERS_1_BATCH": "2",
        "LEASEHOLD_DATA": "/somewhere",
        "LEASEHOLD_TOKEN": "secret",
        "HOME": "/root",
    }
    found = loaded(tmp_path, "[timing]\nttl = 40\nsync = 2\n[[assigners]]\nbatch = 1\n", environ)
    assert found.timing == Timing(ttl=90.0, sync=2.0)
    assert found.database.url.get_secret_value() == "postgresql://a:b@c/d"
    assert found.database.listen_url is not None
    assert found.database.listen_url.get_secret_value() == "postgresql://quoted"
    first, second = found.assigners
    assert (first.batch, first.busy_sleep_factor, first.name) == (9, 0.5, "12")
    assert first.strategy == Inner(kind="success", sample_size=4)
    assert second == Worker(batch=2)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LEASEHOLD_TIMING_TTLL", "3", "LEASEHOLD_TIMING_TTLL: is not a setting; did you mean 'LEASEHOLD_TIMING_TTL'?"),
        ("LEASEHOLD_TOKENS", "x", "LEASEHOLD_TOKENS: is not a setting; did you mean 'LEASEHOLD_TOKEN'?"),
        ("LEASEHOLD_TIMING_SYNC", "x", "LEASEHOLD_TIMING_SYNC: is not a TOML value"),
        ("LEASEHOLD_TIMING_SYNC", "-1", "LEASEHOLD_TIMING_SYNC: timing.sync: must be greater than 0, not -1"),
        ("LEASEHOLD_TIMING_SYNC", "20", "LEASEHOLD_TIMING_SYNC: timing: ttl (30.0) must be more than twice sync"),
        ("LEASEHOLD_TIMING_SYNC", "1\nttl = 2", "LEASEHOLD_TIMING_SYNC: is not a TOML value"),
        (
            "LEASEHOLD_TIMING_SYNC",
            "tcp://10.0.0.7:7411",
            "LEASEHOLD_TIMING_SYNC: is 'tcp://10.0.0.7:7411', which Kubernetes sets in each pod for a Service",
        ),
        ("LEASEHOLD_GATEWAI_PORT", "7411", "LEASEHOLD_GATEWAI_PORT: is not a setting"),
        ("LEASEHOLD_SERVICE_HOST", "no address", "LEASEHOLD_SERVICE_HOST: is not a setting"),
        ("LEASEHOLD_ASSIGNERS_5_BATCH", "1", "LEASEHOLD_ASSIGNERS_5_BATCH: there is no assigners[5]: the list has"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, variable: str, value: str, said: str) -> None:
    assert refused(tmp_path, "", {variable: value}).startswith(said)


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    said = refused(tmp_path, "[database]\nurl = 'postgresql://me:hunter2@host/db'\npool = 0\n")
    assert "hunter2" not in said
    assert "hunter2" not in refused(tmp_path, "[database]\nurl = ['hunter2']\n")
    found = loaded(tmp_path, "[database]\nurl = 'postgresql://me:hunter2@host/db?password=hunter2&connect_timeout=1'\n")
    shown = loading.as_toml(loading.masked(found))
    assert "hunter2" not in shown + repr(found)
    assert "postgresql://me:***@host/db?password=***&connect_timeout=1" in shown


def test_a_transaction_pooler_without_a_way_around_it_is_refused(tmp_path: Path) -> None:
    pooled = "[database]\npooler = 'transaction'\nurl = 'postgresql://me@pooler/x'\n"
    assert "needs listen_url" in refused(tmp_path, pooled)
    assert loaded(tmp_path, pooled + "listen_url = 'postgresql://me@db1,db2/x'\n").database.pooler == "transaction"


def test_what_is_shown_loads_again(tmp_path: Path) -> None:
    found = loaded(
        tmp_path, "[timing]\nttl = 61.5\n[[assigners]]\nname = 'a\"\\\\b'\nstrategy = { weights = { 'x y' = 1.0 } }\n"
    )
    assert loaded(tmp_path, loading.as_toml(loading.masked(found))) == found


def failures() -> float:
    return REGISTRY.get_sample_value("leasehold_config_reload_failures_total") or 0.0


def test_a_changed_file_replaces_the_whole_configuration(tmp_path: Path) -> None:
    path = tmp_path / "leasehold.toml"
    path.write_text("[timing]\nttl = 40\n")
    reloader = Reloader(path, Sections, {}, current=load(path, Sections, {}), poll=1.5)
    before = reloader.current
    assert (reloader.run_once(), reloader.current) == (1.5, before)
    for text in ("", "[timing]\nttl = 400\n"):
        path.write_text(text)
        assert (reloader.run_once(), reloader.current) == (loading.SETTLE, before)
    assert (reloader.run_once(), reloader.current) == (1.5, Sections(timing=Timing(ttl=400.0)))
    reloader = Reloader(path, Sections, {}, current=before)
    reloader.request()
    reloader.run_once()
    assert reloader.current == Sections(timing=Timing(ttl=400.0)), "it is asked for, although the file is the same"


def test_a_wrong_file_leaves_the_old_configuration_and_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "leasehold.toml"
    path.write_text("[timing]\nttl = 40\n")
    reloader = Reloader(path, Sections, {}, current=load(path, Sections, {}))
    before, counted = reloader.current, failures()
    path.write_text("[timing]\nttl = 'soon'\n")
    for wrong in (1, 2):
        for _ in range(3):
            reloader.run_once()
        assert (reloader.current, failures()) == (before, counted + wrong)
        path.unlink(missing_ok=True)


def test_what_kubernetes_says_of_services_whose_names_begin_alike_is_passed_over(tmp_path: Path) -> None:
    environ = {
        "LEASEHOLD_SERVICE_HOST": "10.0.0.7",
        "LEASEHOLD_SERVICE_PORT": "7411",
        "LEASEHOLD_SERVICE_PORT_HTTP": "7411",
        "LEASEHOLD_PORT": "tcp://10.0.0.7:7411",
        **{
            f"LEASEHOLD_PORT_7411_TCP{end}": value
            for end, value in (("", "tcp://10.0.0.7:7411"), ("_PROTO", "tcp"), ("_PORT", "7411"), ("_ADDR", "fd00::7"))
        },
        "LEASEHOLD_CONSOLE_SERVICE_HOST": "10.0.0.8",
        "LEASEHOLD_CONSOLE_PORT": "udp://[fd00::8]:53",
    }
    assert loaded(tmp_path, "", environ) == loaded(tmp_path, "")
