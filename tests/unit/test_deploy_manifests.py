"""deploy/Dockerfile, compose.yaml and kubernetes/ as they lie there: valid by schema, and they fit the farm.

KEDA's ScaledObject has no schema in kubernetes-validate; its shape is asserted here by hand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from deploy.command_line import GROUPS
from orchestrator.settings import PLANS, Budgets, Settings, unknown_variables
from orchestrator.vocabulary import SLOTS_PER_WORKER
from tests.support.manifests import (
    compose,
    container,
    dockerfile_environment,
    dockerfile_stages,
    interpolated,
    kubernetes,
    objects,
    one,
    seconds,
)
from tests.support.prometheus import DEPLOY

BIN = Path(sys.executable).parent
TARGETS = ("orchestrator", "worker", "trainer")
SECRETS = ("REDIS_URL", "E2B_API_KEY", "FARM_METRICS_TOKEN")
CLOSING_SECONDS = Budgets().cleanup_seconds + Budgets().message_seconds
"""What a worker takes after its drain time: closing what still runs, and its server's last message."""


def run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def commands() -> set[str]:
    return {group.__name__.rpartition(".")[2] for group in GROUPS}


def settings_of(variables: Mapping[str, str]) -> Settings:
    """The farm's settings of these variables, and of no others."""
    given: dict[str, Any] = {name.removeprefix("FARM_").lower(): value for name, value in variables.items()}
    return Settings(_env_file=None, **given)  # type: ignore[call-arg]


def test_hadolint_finds_nothing() -> None:
    run(BIN / "hadolint", DEPLOY / "Dockerfile")


def test_each_room_has_an_image_that_is_not_root_and_holds_what_was_pinned() -> None:
    stages, text = dockerfile_stages(), (DEPLOY / "Dockerfile").read_text()
    assert {name: stages[name] for name in TARGETS} == dict.fromkeys(TARGETS, "base")
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users == ["10001:10001"]
    installs = [line for line in re.split(r"(?<!\\)\n", text) if "pip install" in line and line.startswith("RUN")]
    assert len(installs) == 2
    assert all("--constraint deploy/constraints.txt" in line for line in installs)
    assert (
        set(re.findall(r'^CMD \["([\w-]+)"', text, re.MULTILINE)) == {"orchestrator", "worker", "train"} <= commands()
    )
    assert unknown_variables(dockerfile_environment()) == []
    assert not set(dockerfile_environment()) & set(SECRETS)


def test_the_build_sees_the_sources_and_no_secret() -> None:
    allowed = [line.removeprefix("!") for line in _lines("Dockerfile.dockerignore") if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for line in copied for name in line.split()} == set(allowed)
    assert all((DEPLOY.parent / name).exists() for name in allowed)
    assert {"*", "**/.env*"} <= set(_lines("Dockerfile.dockerignore"))


def _lines(name: str) -> list[str]:
    return [line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#")]


def test_compose_keeps_its_schema() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_compose_builds_and_mounts_what_is_there() -> None:
    services = compose()["services"]
    assert {"redis", "orchestrator", "worker", "prometheus", "grafana"} <= set(services)
    for name in TARGETS:
        build = services[name]["build"]
        assert (build["context"], build["dockerfile"], build["target"]) == ("..", "deploy/Dockerfile", name)
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose()["volumes"], source
        for secret in service.get("secrets", []):
            assert secret in compose()["secrets"]


def test_compose_publishes_nothing_beyond_this_host() -> None:
    ports = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_has_no_secret_of_its_own_and_asks_for_each() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    given = {"REDIS_PASSWORD": "a1", "E2B_API_KEY": "b2", "FARM_METRICS_TOKEN": "c3", "GRAFANA_PASSWORD": "d4"}
    assert {secret["environment"] for secret in compose()["secrets"].values()} <= given.keys()
    services = yaml.safe_load(interpolated(text, given))["services"]
    for name in given:
        with pytest.raises(KeyError, match=name):
            interpolated(text, {other: value for other, value in given.items() if other != name})
    variables = {name: services[name]["environment"] for name in TARGETS}
    assert {name: sorted(set(found) & set(SECRETS)) for name, found in variables.items()} == {
        "orchestrator": ["E2B_API_KEY", "FARM_METRICS_TOKEN", "REDIS_URL"],
        "worker": ["E2B_API_KEY", "REDIS_URL"],
        "trainer": ["REDIS_URL"],
    }
    for found in variables.values():
        assert found["REDIS_URL"] == "redis://:a1@redis:6379/0"
        assert unknown_variables(found) == []
        settings_of(found)


def test_compose_and_prometheus_mean_the_same_orchestrator() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    port = dockerfile_environment()["FARM_METRICS_PORT"]
    assert job["static_configs"] == [{"targets": [f"orchestrator:{port}"]}]
    assert compose()["services"]["orchestrator"]["ports"][0].endswith(f":{port}")
    secret = Path(job["authorization"]["credentials_file"])
    assert (str(secret.parent), secret.name) == ("/run/secrets", compose()["services"]["prometheus"]["secrets"][0])
    assert compose()["secrets"][secret.name] == {"environment": "FARM_METRICS_TOKEN"}


def test_a_worker_of_compose_may_drain_before_it_is_killed() -> None:
    worker = compose()["services"]["worker"]
    drain = float(worker["environment"]["FARM_DRAIN_SECONDS"])
    assert seconds(worker["stop_grace_period"]) > drain + CLOSING_SECONDS


@pytest.mark.parametrize("found", [o for o in objects() if "keda" not in o["apiVersion"]], ids=lambda o: o["kind"])
def test_kubernetes_objects_keep_their_schema(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_object_would_be_noticed() -> None:
    wrong = json.loads(json.dumps(one("Deployment", "worker")).replace('"terminationGracePeriodSeconds"', '"grace"'))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_names_every_file_and_image() -> None:
    (found,) = kubernetes("kustomization.yaml")
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(found["resources"]) == files
    images = {f"{row['name']}:{row['newTag']}" for row in found["images"]}
    assert images == {container(name)["image"] for name in ("orchestrator", "worker")}
    assert images == {compose()["services"][name]["image"] for name in ("orchestrator", "worker")}


@pytest.mark.parametrize("name", ["orchestrator", "worker"])
def test_a_pod_has_its_secrets_by_reference_and_no_rights(name: str) -> None:
    deployment, one_container = one("Deployment", name)["spec"], container(name)
    wanted = {"REDIS_URL", "E2B_API_KEY"} | ({"FARM_METRICS_TOKEN"} if name == "orchestrator" else set())
    assert {variable["name"] for variable in one_container["env"]} == wanted
    assert all(set(variable) == {"name", "valueFrom"} for variable in one_container["env"])
    assert all(list(variable["valueFrom"]) == ["secretKeyRef"] for variable in one_container["env"])
    assert one_container["envFrom"] == [
        {"configMapRef": {"name": one("ConfigMap", "rollout-farm")["metadata"]["name"]}}
    ]
    assert one_container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert {"cpu", "memory"} == set(one_container["resources"]["requests"])
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert one("PodDisruptionBudget", name)["spec"]["selector"] == deployment["selector"]


def test_the_settings_of_kubernetes_are_settings_of_the_farm() -> None:
    given = one("ConfigMap", "rollout-farm")["data"]
    assert unknown_variables(given) == []
    settings = settings_of(given)
    grace = one("Deployment", "worker")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    longest = settings.budgets.deadline_seconds + settings.budgets.message_seconds
    assert settings.drain_seconds >= longest, "an autoscaler would cut episodes short"
    assert grace > settings.drain_seconds + CLOSING_SECONDS


def test_probes_ask_what_the_orchestrator_serves() -> None:
    probes = {name: probe for name, probe in container("orchestrator").items() if name.endswith("Probe")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"livenessProbe": "/healthz", "readinessProbe": "/readyz", "startupProbe": "/healthz"}
    (port,) = container("orchestrator")["ports"]
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    assert str(port["containerPort"]) == dockerfile_environment()["FARM_METRICS_PORT"]
    (service,) = one("Service", "orchestrator")["spec"]["ports"]
    assert (service["port"], service["targetPort"]) == (port["containerPort"], port["name"])
    labels = one("Deployment", "orchestrator")["spec"]["template"]["metadata"]["labels"]
    assert one("Service", "orchestrator")["spec"]["selector"] == labels


def test_a_worker_is_ready_by_its_heartbeat_and_no_outage_restarts_it() -> None:
    probes = [name for name in container("worker") if name.endswith("Probe")]
    assert probes == ["readinessProbe"]
    wanted = ["rollout-farm", "status", "--here"]
    assert container("worker")["readinessProbe"]["exec"]["command"] == wanted
    assert compose()["services"]["worker"]["healthcheck"]["test"] == ["CMD", *wanted]


def test_the_scaled_object_has_the_shape_that_keda_documents() -> None:
    found = one("ScaledObject", "worker")
    assert found["apiVersion"] == "keda.sh/v1alpha1"
    spec = found["spec"]
    known = {
        "scaleTargetRef",
        "pollingInterval",
        "minReplicaCount",
        "maxReplicaCount",
        "fallback",
        "advanced",
        "triggers",
    }
    assert set(spec) == known
    assert spec["scaleTargetRef"] == {"name": one("Deployment", "worker")["metadata"]["name"]}
    assert "replicas" not in one("Deployment", "worker")["spec"], "two would set the number of workers"
    assert 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    assert set(spec["fallback"]) == {"failureThreshold", "replicas", "behavior"}
    (trigger,) = spec["triggers"]
    assert (set(trigger), trigger["type"]) == ({"type", "metadata"}, "prometheus")
    assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes texts only"
    assert trigger["metadata"]["threshold"] == str(SLOTS_PER_WORKER)
    plan = one("ConfigMap", "rollout-farm")["data"]["FARM_PLAN"]
    assert SLOTS_PER_WORKER * spec["maxReplicaCount"] == PLANS[plan][0]
