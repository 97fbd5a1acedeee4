"""What Grafana's dashboards ask Prometheus: every query of every panel, with its variables filled in. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.prometheus import DEPLOY

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class PanelQuery:
    """One query as the dashboard has it."""

    dashboard: str
    panel: str
    expression: str
    legend: str

    @property
    def legend_labels(self) -> tuple[str, ...]:
        """Those that the names of its lines are made of."""
        return tuple(re.findall(r"\{\{\s*(\w+)\s*\}\}", self.legend))

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel}: {self.expression}"


def load(name: str) -> dict[str, Any]:
    """A dashboard, by its file's name."""
    board: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / name).read_text())
    return board


def panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every panel that shows something, also those inside a row that is closed."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def queries() -> list[PanelQuery]:
    """Every query of every dashboard."""
    return [
        PanelQuery(path.name, panel["title"], target["expr"], target.get("legendFormat", ""))
        for path in DASHBOARDS
        for panel in panels(load(path.name))
        for target in panel["targets"]
    ]


def filled(expression: str, variables: Mapping[str, str]) -> str:
    """`expression` with $name and ${name} filled in; a variable that nobody gave is a KeyError."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: variables[match[1] or match[2]], expression)
