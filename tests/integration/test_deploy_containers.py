"""The command lines of images, compose and Kubernetes, run as a container runs them, as far as one can without it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from deploy.doctor.findings import Status
from deploy.doctor.judge import judge_redis
from deploy.embedded.redis_server import redis_binary
from orchestrator.pool import Pool
from orchestrator.vocabulary import Outcome
from tests.support.container import contained
from tests.support.farm import Field
from tests.support.manifests import compose, container, dockerfile_environment, interpolated, one
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.processes import ROOT, Marked, children, worker_environment
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm"]

COMMAND = str(Path(sys.executable).parent / "rollout-farm")
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


def socket_directory(field: Field) -> Path:
    """Where the farm's Redis listens."""
    return Path(unquote(urlsplit(field.settings.redis_url or "").path)).parent


def environment(field: Field) -> dict[str, str]:
    """Of a pod: the image's, the config map's and the secrets' variables."""
    image = {name: value for name, value in dockerfile_environment().items() if name != "PATH"}
    settings: Mapping[str, str] = one("ConfigMap", "rollout-farm")["data"]
    given = worker_environment(field.settings)
    secrets = {name: given[name] for name in ("REDIS_URL", "E2B_API_KEY", "FARM_E2B_API_URL")}
    return {"PATH": PATH, "PYTHONPATH": str(ROOT), **image, **settings, **secrets}


def test_a_worker_runs_as_first_process_and_other_user_on_a_root_that_cannot_be_written(
    field: Field, tmp_path: Path
) -> None:
    redis = [socket_directory(field)]
    probe = contained([COMMAND, *container("worker")["readinessProbe"]["exec"]["command"][1:]], writable=redis)

    def ready() -> bool:
        done = subprocess.run(probe, env=environment(field), capture_output=True, timeout=30, check=False)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0

    assert not ready()
    worker = Marked(
        contained([COMMAND, "worker"], writable=redis),
        environment=environment(field),
        cwd=tmp_path,
        output=tmp_path / "worker",
    )
    try:
        wait_until(lambda: worker.process.poll() is not None or ready(), seconds=60, description="it is ready")
        assert worker.process.poll() is None, worker.stderr
        with Pool(field.settings) as pool:
            episode = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
            assert episode.wait(40).outcome is Outcome.SOLVED
        (first,) = children(worker.pid)
        os.kill(first, signal.SIGTERM)  # as the kubelet does
        assert worker.wait(40) == 0, worker.stderr
        assert not ready()
        assert worker.stderr == ""
    finally:
        worker.end()


def test_an_orchestrator_serves_every_interface_and_wants_its_token(field: Field, tmp_path: Path) -> None:
    check: list[str] = compose()["services"]["orchestrator"]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "python"]
    # in a network of its own, where nobody else is
    script_text = f"""
        {shlex.quote(COMMAND)} orchestrator & pid=$!
        healthy() {{ http_proxy=http://127.0.0.1:9 {shlex.join(check[1:])} 2>/dev/null; }}  # past any proxy
        until healthy; do kill -0 $pid || exit 9; sleep 0.2; done
        python -c 'import urllib.request as r; r.urlopen("http://127.0.0.1:9400/metrics")' 2>&1 | tail -1
        kill -TERM $pid; wait $pid
    """
    running = Marked(
        contained(["sh", "-c", script_text], writable=[socket_directory(field)], own_network=True),
        environment={**environment(field), "FARM_METRICS_TOKEN": "secret"},
        cwd=tmp_path,
        output=tmp_path / "orchestrator",
    )
    try:
        assert running.wait(60) == 0, running.stderr
        assert "metrics at http://0.0.0.0:9400/metrics" in running.stdout
        assert "HTTP Error 401" in running.stdout
    finally:
        running.end()


def test_the_redis_of_compose_wants_its_password_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    service = compose()["services"]["redis"]
    assert service["command"] == ["valkey-server", service["configs"][0]["target"]]
    content = interpolated(compose()["configs"]["redis_conf"]["content"], {"REDIS_PASSWORD": "secret"})
    (tmp_path / "redis.conf").write_text(content.replace("dir /data", f"dir {tmp_path}"))
    socket = tmp_path / "redis.sock"
    server = Marked(
        [redis_binary(), "redis.conf", "--port", "0", "--unixsocket", str(socket)],
        environment=os.environ,
        cwd=tmp_path,
        output=tmp_path / "server",
    )
    try:
        wait_until(socket.exists, description="it listens")
        with Redis(unix_socket_path=str(socket)) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        with Redis(unix_socket_path=str(socket), password="secret", decode_responses=True) as redis:
            config = redis.config_get("append*", "maxmemory-policy")
            findings = judge_redis(redis.info(), config, [])
            assert [finding for finding in findings if finding.status is not Status.OK] == []
    finally:
        server.end()
