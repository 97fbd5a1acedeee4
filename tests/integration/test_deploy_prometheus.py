"""deploy/prometheus and deploy/grafana as they lie there: valid, tested rule by rule, about metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.farm import Farm
from orchestrator.metrics import read, registry_of
from tests.support import dashboards
from tests.support.processes import ROOT
from tests.support.programs import program
from tests.support.prometheus import DEPLOY, RULES, configuration, metrics_in, rules, told

PROMETHEUS = DEPLOY / "prometheus"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def succeed(*arguments: str | Path) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def rule_tests() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    return tests


@pytest.fixture
def exported(farm: Farm) -> set[str]:
    """Names of every sample that the exporter has, and of what Prometheus itself adds."""
    from prometheus_client import generate_latest

    farm.budget.set("1")
    families = text_string_to_metric_families(generate_latest(registry_of(read(farm))).decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    succeed("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration("127.0.0.1:9400", tmp_path / "token")))
    succeed("check", "config", tmp_path / "prometheus.yml")


def test_the_rules_are_valid_and_do_what_their_tests_say() -> None:
    succeed("check", "rules", *RULES)
    succeed("test", "rules", PROMETHEUS / "rules_test.yml")


def test_each_alert_is_tested_firing_and_not_firing() -> None:
    cases = [case for test in rule_tests() for case in test.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    rests = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == rests == {rule["alert"] for rule in rules() if "alert" in rule}


def test_each_recording_rule_is_tested_with_its_values() -> None:
    cases = [case for test in rule_tests() for case in test.get("promql_expr_test", ())]
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert recorded <= {case["expr"] for case in cases if case["exp_samples"]}


@pytest.mark.parametrize(
    ("wanted", "instead"),
    [
        *(("> 0.05", "> 0.5"), (">= 0.8", ">= 0.1"), ("== 0", "== 7"), ("for: 10m", "for: 1m"), ("|worker_lost", "")),
        *(("histogram_quantile(0.95", "histogram_quantile(0.05"), ('state="busy"', 'state="idle"')),
        *(
            ("rate(job:farm_episodes_total:max5m[5m])", "rate(job:farm_episodes_total:max5m[1h])"),
            ("max by (job, queue)", "sum by (job)"),
        ),
        ("max_over_time(farm_rate_limited_total[5m])", "farm_rate_limited_total"),
    ],
)
def test_a_rule_that_was_changed_fails_its_tests(tmp_path: Path, wanted: str, instead: str) -> None:
    shutil.copytree(PROMETHEUS, tmp_path / "changed")
    texts = {path: path.read_text() for path in sorted((tmp_path / "changed" / "rules").glob("*.yml"))}
    assert any(wanted in text for text in texts.values())
    for path, text in texts.items():
        path.write_text(text.replace(wanted, instead))
    assert promtool("test", "rules", tmp_path / "changed" / "rules_test.yml").returncode == 1


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
            assert all(text.strip().endswith(".") for text in rule["annotations"].values()), rule["alert"]


def test_rules_dashboards_and_texts_speak_of_metrics_that_exist(exported: set[str]) -> None:
    families = {name.removesuffix(part) for name in exported for part in ("", "_bucket", "_count", "_sum")}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    spoken = {str(path.relative_to(ROOT)): path.read_text() for path in (*RULES, *dashboards.DASHBOARDS)}
    for name, text in spoken.items():
        assert metrics_in(text), name
        assert metrics_in(text) <= exported, name
        assert set(re.findall(r"job:farm_\w+:\w+", text)) <= recorded, name
    for path in (PROMETHEUS / "rules_test.yml", *sorted((DEPLOY / "kubernetes").glob("*.yaml")), ROOT / "README.md"):
        assert metrics_in(path.read_text()) <= families, path


def test_what_counts_up_is_looked_at_only_where_its_orchestrators_are_taken_together() -> None:
    """A series of one orchestrator alone has seen but a part of a window in which that one was replaced."""
    for path in (*RULES, *dashboards.DASHBOARDS):
        assert re.findall(r"(?:rate|increase|delta)\(\s*(farm_\w+)", path.read_text()) == [], path.name


def test_each_metric_is_on_a_dashboard(exported: set[str]) -> None:
    shown = metrics_in("".join(path.read_text() for path in (*RULES, *dashboards.DASHBOARDS)))
    parts = ("_bucket", "_count", "_sum", "_created")
    stem = re.compile(f"({'|'.join(parts)})$")
    assert {stem.sub("", name) for name in exported} - {stem.sub("", name) for name in shown} == set()


@pytest.mark.parametrize("path", dashboards.DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_has_the_shape_that_grafana_provisions(path: Path) -> None:
    board = dashboards.load(path.name)
    assert {"uid", "title", "schemaVersion", "templating", "time"} <= set(board)
    assert "id" not in board, "an id belongs to one Grafana's database"
    everything = list(board["panels"])
    assert len({panel["id"] for panel in everything}) == len(everything)
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    for panel in dashboards.panels(board):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    cells = [
        (panel["gridPos"]["y"] + y, panel["gridPos"]["x"] + x)
        for panel in everything
        for y in range(panel["gridPos"]["h"])
        for x in range(panel["gridPos"]["w"])
    ]
    assert len(set(cells)) == len(cells), "panels lie over each other"


def test_dashboards_are_found_where_they_are_provisioned() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    given = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == given
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "farm.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    uids = [dashboards.load(path.name)["uid"] for path in dashboards.DASHBOARDS]
    assert len(set(uids)) == len(uids) == 2


def test_variables_are_filled_in_and_a_stranger_is_an_error() -> None:
    given = {"job": "a", "__rate_interval": "5m"}
    assert dashboards.filled('x{job="$job"}[$__rate_interval] ${job}', given) == 'x{job="a"}[5m] a'
    with pytest.raises(KeyError):
        dashboards.filled("$other", given)


def test_a_condition_can_be_made_to_tell_whether_it_holds() -> None:
    assert told('up{job=~"a"} == 0') == 'up{job=~"a"} == bool 0'
    assert told("a > 0.2 and b >= 1") == "a > bool 0.2 and b >= bool 1"
