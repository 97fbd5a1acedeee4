"""A real Prometheus (Debian has it) over the farm's own configuration, and what rules and dashboards ask it.

What always holds: nothing of deploy/prometheus is changed but where the target and its token are and how often one
looks, so that what passes here is what runs elsewhere; Prometheus listens on loopback, on a port that it chose itself.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.processes import ROOT, Marked
from tests.support.programs import program
from tests.support.waiting import wait_until

DEPLOY = ROOT / "deploy"
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))


class Prometheus:
    """What a running server answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The rows of an instant query, which must be one that the server understands."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}, timeout=30)
        body = answer.json()
        assert body["status"] == "success", f"{body.get('error')}: {expression}"
        rows: list[dict[str, Any]] = body["data"]["result"]
        return rows

    def values(self, expression: str) -> list[float]:
        """The numbers of an instant query; NaN, which a graph does not show, is none."""
        found = [float(row["value"][1]) for row in self.query(expression)]
        return [value for value in found if not math.isnan(value)]

    def value(self, expression: str) -> float | None:
        """The one number of an instant query, or None when there is none."""
        found = self.values(expression)
        assert len(found) <= 1, f"{expression}: {found}"
        return found[0] if found else None

    def label_values(self, label: str, match: str) -> list[str]:
        """What Grafana's label_values(match, label) gives."""
        answer = httpx.get(f"{self.url}/api/v1/label/{label}/values", params={"match[]": match}, timeout=30)
        names: list[str] = answer.raise_for_status().json()["data"]
        return names

    def alerts(self) -> set[str]:
        """Names of the alerts whose condition holds now, whether their time is up or not."""
        rows = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).raise_for_status().json()["data"]["alerts"]
        return {row["labels"]["alertname"] for row in rows}

    def unhealthy_rules(self) -> list[str]:
        """What the server itself could not evaluate."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=30).raise_for_status().json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules
        return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]


def configuration(target: str, token_file: Path) -> dict[str, Any]:
    """deploy/prometheus/prometheus.yml with another target, and looking every second."""
    given: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    given["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    given["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in given["rule_files"]]
    (job,) = given["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    job["authorization"] = {"credentials_file": str(token_file)}
    return given


@contextmanager
def running_prometheus(directory: Path, target: str, token: str) -> Iterator[Prometheus]:
    """A server that scrapes `target` with `token`; it ends with the block."""
    token_file = directory / "metrics_token"
    token_file.write_text(token)
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration(target, token_file)))
    command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    process = Marked(
        [*command, "--web.listen-address=127.0.0.1:0"],
        environment=os.environ,
        cwd=directory,
        output=directory / "prometheus.out",
    )

    def port() -> str | None:
        assert process.process.poll() is None, process.stderr
        said = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', process.stderr)
        return said.group(1) if said and "Server is ready" in process.stderr else None

    try:
        yield Prometheus(f"http://127.0.0.1:{wait_until(port, seconds=30, description='Prometheus is ready')}")
    finally:
        process.end()


def rules() -> list[Mapping[str, Any]]:
    """Every rule of every file."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def told(expression: str) -> str:
    """An alert's condition, made to tell whether it holds (1 or 0) instead of saying nothing when it does not."""
    return re.sub(r" (==|!=|>=|<=|>|<) ", r" \1 bool ", expression)


def metrics_in(text: str) -> set[str]:
    """Names of the exporter's metrics that an expression, rule or text speaks of; not those that rules record."""
    return set(re.findall(r"(?<![:\w])farm_[a-z_]+[a-z]\b(?!:)", text))


def aggregations(expression: str) -> list[tuple[str, tuple[str, ...]]]:
    """Every `... by (labels) (...)` inside an expression, and its labels; a label that no series has is no error."""
    found = []
    for match in re.finditer(r"\w+ by \(([\w, ]+)\) \(", expression):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(expression[end], 0)
            end += 1
        found.append((expression[match.start() : end], tuple(re.split(r",\s*", match[1]))))
    return found
