"""What deploy/Dockerfile, deploy/compose.yaml and deploy/kubernetes say, read as data. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.support.prometheus import DEPLOY

_UNITS = {"s": 1, "m": 60}


def dockerfile_environment() -> dict[str, str]:
    """Every variable that the Dockerfile sets for what runs, over all stages; none of them depends on another."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV ")]
    return {name: value for line in lines for name, value in re.findall(r"(\w+)=(\S+)", line)}


def dockerfile_stages() -> dict[str, str]:
    """Stage -> what it is made from."""
    text = (DEPLOY / "Dockerfile").read_text()
    return {name: source for source, name in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}


def compose() -> dict[str, Any]:
    """The compose file as it stands, variables not filled in."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """`text` as Compose fills it in: ${NAME}, ${NAME:-default}, ${NAME:?why}; a KeyError for one that is wanted."""

    def fill(match: re.Match[str]) -> str:
        name, how, rest = match.group(1), match.group(2), match.group(3)
        return variables.get(name) or rest if how == ":-" else variables[name]

    return re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", fill, text)


def seconds(duration: str) -> int:
    """A duration of Compose or Prometheus, such as 240s or 2m."""
    return int(duration[:-1]) * _UNITS[duration[-1]]


def kubernetes(name: str) -> list[dict[str, Any]]:
    """The documents of one file."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def objects() -> Iterator[dict[str, Any]]:
    """Every object of every file but the kustomization."""
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from kubernetes(path.name)


def one(kind: str, name: str) -> dict[str, Any]:
    """The object of this kind and name."""
    (found,) = [found for found in objects() if (found["kind"], found["metadata"]["name"]) == (kind, name)]
    return found


def container(deployment: str) -> dict[str, Any]:
    """The one container of a deployment."""
    (found,) = one("Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return dict(found)
