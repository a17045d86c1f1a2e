"""What Prometheus and Grafana are given: rules and dashboards ask for metrics that there are, with their labels.

promtool checks the form of the rules and runs their tests.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry

from assigner import metrics
from assigner.config import loading
from assigner.queries import alerts
from assigner.queries.alerts import Reading
from assigner.queries.status import Backlog
from bots.farm.metrics import DoorMetrics
from bots.gateway.metrics import GatewayMetrics
from schema.accounting.quota_uses import QuotaUse
from schema.fleet.success import Swarm
from schema.tenancy.processes import GatewayProcess

OPS = Path(__file__).parent.parent.parent / "ops"
RULES = OPS / "prometheus"
DASHBOARDS = sorted((OPS / "grafana").glob("*.json"))
PROMTOOL = shutil.which("promtool")

#: Labels that Prometheus adds to every series.
OF_TARGETS = {"job"}
#: A metric or a recorded rule, with its matchers; a list of labels, with the word that it follows.
SELECTOR = re.compile(r"\b(leasehold[\w:]+)(?:\{([^}]*)\})?")
LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right) ?\(([^)]*)\)")
MATCHER = re.compile(r"(\w+) ?(?:=~|!~|!=|=)")
TEMPLATE = re.compile(r"\{\{ ?\$?(?:labels\.)?(\w+) ?\}\}")
#: What a metric of each type is called in a scrape.
SERIES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@cache
def registered() -> dict[str, frozenset[str]]:
    """Series → labels of all that assigners and gateways serve."""
    assert loading.RELOADS is not None  # the import registers it
    found = dict[str, frozenset[str]]()
    for registry in (REGISTRY, GatewayMetrics().registry, DoorMetrics().registry):
        for collector in dict.fromkeys(_collectors(registry)):
            for family in collector.describe():
                labels = {*getattr(collector, "_labelnames", ())}
                labels |= {"cohort", "instance"} if collector is metrics.QUOTAS else set()
                labels -= {"cohort", "instance"} if family.name == "leasehold_quota_pairs_left_out" else set()
                extra = {"le"} if family.type == "histogram" else set()
                for end in SERIES.get(family.type, ()):
                    found[family.name + end] = frozenset(labels | (extra if end == "_bucket" else set()))
    return {name: labels for name, labels in found.items() if name.startswith("leasehold_")}


def _collectors(registry: CollectorRegistry) -> Iterator[Any]:
    return (each for name, each in registry._names_to_collectors.items() if name.startswith("leasehold_"))


@cache
def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load((RULES / "leasehold.rules.yml").read_text())["groups"]
        for rule in group["rules"]
    ]


@cache
def recorded() -> dict[str, frozenset[str]]:
    """Recorded series → labels that their expression leaves."""
    return {rule["record"]: frozenset(left(rule["expr"])) for rule in rules() if "record" in rule}


def left(expression: str) -> set[str]:
    """The labels named by the groupings of an expression, without the buckets that a quantile uses up."""
    named = {label.strip() for labels in LABELS.findall(expression) for label in labels.split(",") if label.strip()}
    return named - ({"le"} if "histogram_quantile" in expression else set())


def mistakes(expression: str) -> list[str]:
    """What this query asks for that nothing serves."""
    known, wrong, labels = registered() | recorded(), [], set(OF_TARGETS)
    for name, matchers in SELECTOR.findall(expression):
        if name not in known:
            wrong.append(f"no metric {name}")
            continue
        labels |= known[name]
        wrong += [
            f"{name} has no label {key}" for key in MATCHER.findall(matchers) if key not in known[name] | OF_TARGETS
        ]
    if not SELECTOR.search(expression):
        wrong.append("asks for no metric of the pool")
    named = {label.strip() for each in LABELS.findall(expression) for label in each.split(",") if label.strip()}
    return wrong + [f"none of its metrics has the label {label}" for label in sorted(named - labels)]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_every_rule_asks_for_metrics_that_there_are() -> None:
    wrong = {rule.get("alert") or rule["record"]: mistakes(rule["expr"]) for rule in rules()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert alerts
    assert [rule["alert"] for rule in alerts if not {"summary", "action"} <= rule["annotations"].keys()] == []


def test_every_alert_names_only_labels_that_its_expression_keeps() -> None:
    for rule in rules():
        if "alert" in rule:
            used = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
            grouped = left(rule["expr"])
            selectors = [name for name, _ in SELECTOR.findall(rule["expr"])]
            bare = (
                set() if "by (" in rule["expr"] else set().union(*((registered() | recorded())[n] for n in selectors))
            )
            assert used <= grouped | bare | OF_TARGETS, rule["alert"]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_panel_asks_for_metrics_that_there_are_and_says_what_it_shows(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert panels(dashboard)
    for panel in panels(dashboard):
        where = f"{file.name}: {panel['title']}"
        assert panel["description"], where
        for target in panel["targets"]:
            asked = target["expr"]
            assert mistakes(asked) == [], where
            assert {*re.findall(r"\$(\w+)", asked)} <= {*variables}, where
            assert {*TEMPLATE.findall(target["legendFormat"])} <= left(asked), where
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}", where
    for each in variables.values():
        if each["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", each["definition"]).groups()  # type: ignore[union-attr]
            assert label in registered()[metric], f"{file.name}: variable {each['name']}"


def test_dashboards_can_be_imported_side_by_side() -> None:
    found = [json.loads(file.read_text()) for file in DASHBOARDS]
    assert {file.stem for file in DASHBOARDS} == {"pool", "tenants", "bots", "database", "farm"}
    assert len({each["uid"] for each in found}) == len({each["title"] for each in found}) == len(found)
    for each in found:
        assert len({panel["id"] for panel in each["panels"]}) == len(each["panels"])
        assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in each["panels"]) <= 24


def test_every_metric_is_on_a_dashboard_or_named_as_one_that_is_not() -> None:
    shown = {name for file in DASHBOARDS for panel in panels(json.loads(file.read_text()))
             for target in panel["targets"] for name, _ in SELECTOR.findall(target["expr"])}  # fmt: skip
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in registered()}
    left_out = {
        # They tell how a strategy or a setting works, not whether the pool does.
        "leasehold_assignment_score", "leasehold_jobs_preferring_total", "leasehold_gated_picks_empty_total",
        "leasehold_request_body_bytes", "leasehold_sessions_renewed_total", "leasehold_config_reloads_total",
        # An alert has it.
        "leasehold_config_reload_failures_total", "leasehold_upkeep_duty_failures", "leasehold_retention_late_seconds",
        "leasehold_notification_queue_usage", "leasehold_loop_run_seconds",
    }  # fmt: skip
    assert families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == left_out


def test_tenants_keep_their_name_in_a_scrape() -> None:
    configuration = yaml.safe_load((RULES / "prometheus.yml").read_text())
    assert all(job["honor_labels"] for job in configuration["scrape_configs"])


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; Debian's package prometheus has it")
@pytest.mark.parametrize(
    "arguments",
    ["check rules leasehold.rules.yml", "test rules leasehold.rules.test.yml", "check config prometheus.yml"],
)
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments.split()], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; Debian's package prometheus has it")
def test_prometheus_takes_every_query_of_a_dashboard(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    asked = [target["expr"] for file in DASHBOARDS for panel in panels(json.loads(file.read_text()))
             for target in panel["targets"]]  # fmt: skip
    recording = [{"record": f"asked:{nth}", "expr": expr.replace("$", "")} for nth, expr in enumerate(asked)]
    (file := tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": recording}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


#: Rules that only Prometheus has, because they go by counters in the memory of processes, or by its own metrics.
ONLY_PROMETHEUS = {
    "LeaseholdNoGateway",
    "LeaseholdQuotasWithoutMetrics", "LeaseholdQuotasUnread", "LeaseholdWebhookGivesUp", "LeaseholdLoopFails",
    "LeaseholdCountersDrift", "LeaseholdUpkeepDutyFails", "LeaseholdLoopStands", "LeaseholdRetentionIsLate",
    "LeaseholdForecastsAreOff", "LeaseholdForecastsOfInstanceAreOff",
}  # fmt: skip


def test_the_gateway_has_the_rules_of_prometheus_with_their_severity_threshold_and_advice() -> None:
    ours = {rule.name: rule for rule in alerts.RULES}
    theirs = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert theirs.keys() - ours.keys() == ONLY_PROMETHEUS
    assert ours.keys() <= theirs.keys()
    for name, rule in ours.items():
        told = theirs[name]
        assert rule.severity == told["labels"]["severity"], name
        assert rule.action == " ".join(told["annotations"]["action"].split()), name
        # Of metrics that are summed up in a recorded rule, the threshold stands in the alert as well.
        assert re.search(rf"(>=?|<|==) {rule.threshold:g}\b", told["expr"]), name


QUIET = Reading(
    swarms=[], backlog=Backlog({"queued": 0, "parked": 0}, oldest=0.0, unmatchable=0), waiting_before=None, quotas=[],
    blocked_forever=0, upkeep_age=1.0, schedules_failing=0, schedules_held_up=0, notifications=0.0, gateways=[],
    refused=[],
)  # fmt: skip
SWARM = Swarm("gpus", 9, 5, 4, 0, 0, 20, 0.99, 0.5, 0.12, 0.11, None)
USE = QuotaUse("gpus", "ours", 4, 10, 4, 10, free=3, lent=0, uncounted=0, evictions=0, unmet=0)
AT = datetime(2026, 1, 1, tzinfo=UTC)
GATEWAY = GatewayProcess("g1", "http://g1", "running", AT, AT, None, {"queue": 0, "wakeups_connected": 1})


def quota(**changed: Any) -> dict[str, Any]:
    return {"quotas": [USE, replace(USE, **changed)]}


def gateway(**figures: float) -> dict[str, Any]:
    return {"gateways": [GATEWAY, replace(GATEWAY, name="g2", figures={**GATEWAY.figures, **figures})]}


def backlog(queued: int = 0, parked: int = 0, **more: Any) -> dict[str, Any]:
    return {"backlog": Backlog({"queued": queued, "parked": parked}, **{"oldest": 0.0, "unmatchable": 0, **more})}


#: Rule → what makes it an alert, and what does not yet.
CASES: dict[str, tuple[Any, Any]] = {
    "WorkIsConcentrated": ({"swarms": [SWARM, replace(SWARM, concentration=0.4)]}, {"swarms": [SWARM]}),
    "BotsAreFull": ({"swarms": [replace(SWARM, avg_load=0.96)]}, {"swarms": [replace(SWARM, avg_load=None)]}),
    "BotsFailOften": ({"swarms": [replace(SWARM, avg_success_rate=0.69)]}, {"swarms": [SWARM]}),
    "BotsOnProbation": ({"swarms": [replace(SWARM, on_probation=1)]}, {"swarms": [SWARM]}),
    "JobsWaitLong": (backlog(1, oldest=3601.0), backlog(1, oldest=3600.0)),
    "BacklogGrows": ({**backlog(1501), "waiting_before": 1000}, {**backlog(1500), "waiting_before": 1000}),
    "JobsThatNobodyCanRun": (backlog(1, unmatchable=1), backlog(1)),
    "JobsAreParked": (backlog(parked=1), backlog(1000)),
    "MinimumCannotBeMet": (quota(usage=0, unmet=4), quota(usage=1)),
    "MinimumIsNotMet": (quota(usage=2, unmet=2), quota(usage=2)),
    "InstanceAtMaximum": (quota(usage=10), quota(usage=9)),
    "EvictionsRepeat": (quota(evictions=10), quota(evictions=9)),
    "GatewaysFail": (gateway(requests=100, failed=6), gateway(requests=100, failed=5)),
    "GatewayIsBehind": (gateway(queue=101), gateway(queue=100)),
    "WakeUpsAreLost": (gateway(wakeups_connected=0), gateway()),
    "ConnectionsAreRefused": (gateway(connections_refused=101), gateway(connections_refused=100)),
    "ConfigurationIsRefused": ({"refused": [("a1", "assigners: is no list")]}, {}),
    "NodesAreBlockedForEver": ({"blocked_forever": 1}, {}),
    "UpkeepStands": ({"upkeep_age": None}, {"upkeep_age": 60.0}),
    "SchedulesFail": ({"schedules_failing": 1}, {}),
    "SchedulesAreHeldUp": ({"schedules_held_up": 1}, {}),
    "NotificationsFillUp": ({"notifications": 0.51}, {"notifications": 0.5}),
}


def test_an_alert_comes_above_its_threshold_and_not_at_it() -> None:
    assert {f"Leasehold{name}" for name in CASES} == {rule.name for rule in alerts.RULES}
    for name, (wrong, well) in CASES.items():
        assert [each.name for each in alerts.judge(replace(QUIET, **wrong))] == [f"Leasehold{name}"]
        assert alerts.judge(replace(QUIET, **well)) == [], name


def test_of_one_rule_at_most_twenty_alerts_are_listed_and_the_others_counted() -> None:
    refused = [(f"a{number}", "assigners: is no list") for number in range(25)]
    found = alerts.judge(replace(QUIET, refused=refused))
    assert (len(found), found[-1].summary) == (21, "The same is so of 5 more.")
