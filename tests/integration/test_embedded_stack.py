"""The one-machine stack: what it starts, how it is found, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from pydantic import SecretStr

from deploy.embedded import LocalSandboxes, Stack, running_stack
from orchestrator.errors import AuthenticationFailed, ProviderError, RedisUnavailable, SettingsError
from orchestrator.settings import Settings
from tests.support.processes import exists
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def key(settings: Settings) -> str:
    assert settings.e2b_api_key is not None
    return settings.e2b_api_key.get_secret_value()


def test_everything_is_started_found_and_gone_again(tmp_path: Path) -> None:
    given = Settings(state_dir=tmp_path / "state")
    assert running_stack(given) is None
    with Stack(given) as stack:
        assert stack.redis is not None
        assert stack.sandboxes is not None
        pids = (stack.redis.pid, stack.sandboxes.pid)
        assert E2BProvider(key(stack.settings), api_url=stack.settings.e2b_api_url).list({}) == []
        stack.check()
        assert running_stack(given) == stack.settings
        description = given.state_dir / "stack.json"
        assert description.stat().st_mode & 0o077 == 0
    assert all(pid is not None and not exists(pid) for pid in pids)
    assert running_stack(given) is None
    assert {path.name for path in given.state_dir.iterdir()} == {"redis", "sandboxes.log"}


def test_a_temporary_stack_leaves_nothing(tmp_path: Path) -> None:
    with Stack(Settings(state_dir=tmp_path / "state"), temporary=True) as stack:
        directory = stack.settings.state_dir
        assert directory.is_dir()
    assert not directory.exists()
    assert not (tmp_path / "state").exists()


def test_what_is_configured_is_used_and_not_started(redis_url: str, tmp_path: Path) -> None:
    given = Settings(redis_url=redis_url, e2b_api_key=SecretStr("e2b_cloud"), state_dir=tmp_path / "state")
    with Stack(given) as stack:
        assert (stack.redis, stack.sandboxes) == (None, None)
        assert stack.settings.redis_url == redis_url
        assert key(stack.settings) == "e2b_cloud"
        assert stack.settings.e2b_api_url is None
    assert not given.state_dir.exists()


def test_a_cloud_key_is_never_written_down(tmp_path: Path) -> None:
    given = Settings(e2b_api_key=SecretStr("e2b_cloud"), state_dir=tmp_path / "state")
    with Stack(given):
        assert json.loads((given.state_dir / "stack.json").read_text())["e2b_api_key"] is None
        found = running_stack(given)
        assert found is not None
        assert key(found) == "e2b_cloud"
        for path in given.state_dir.rglob("*"):
            assert not path.is_file() or b"e2b_cloud" not in path.read_bytes()


def test_a_url_without_a_key_is_a_settings_error(tmp_path: Path) -> None:
    given = Settings(e2b_api_url="http://127.0.0.1:1", state_dir=tmp_path / "state")
    with pytest.raises(SettingsError, match="E2B_API_KEY"):
        Stack(given).start()


def test_a_second_stack_in_the_same_directory_is_refused_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.embedded.redis_server._LOCK_SECONDS", 0.1)  # nobody is about to leave it
    given = Settings(state_dir=tmp_path / "state")
    with Stack(given) as first:
        with pytest.raises(RedisUnavailable, match="another"):
            Stack(given).start()
        first.check()
        assert running_stack(given) == first.settings


def test_a_part_that_ended_by_itself_is_noticed(tmp_path: Path) -> None:
    with Stack(Settings(state_dir=tmp_path / "state")) as stack:
        assert stack.sandboxes is not None
        assert stack.sandboxes.pid is not None
        os.kill(stack.sandboxes.pid, signal.SIGKILL)
        wait_until(lambda: stack.sandboxes and stack.sandboxes.pid is None, description="the service has ended")
        with pytest.raises(ProviderError, match="local sandbox service"):
            stack.check()


def test_the_local_key_is_required_and_in_no_command_line(tmp_path: Path) -> None:
    with LocalSandboxes(tmp_path / "state", api_key="local-secret") as service:
        with pytest.raises(AuthenticationFailed):
            E2BProvider("wrong", api_url=service.url).list({})
        proc = Path(f"/proc/{service.pid}")
        assert b"local-secret" not in (proc / "cmdline").read_bytes()
        assert b"local-secret" not in (proc / "environ").read_bytes()


def test_a_service_whose_port_is_taken_says_so(tmp_path: Path) -> None:
    with LocalSandboxes(tmp_path / "state", api_key="local-secret") as first:
        port = int(first.url.rpartition(":")[2])
        second = LocalSandboxes(tmp_path / "other", api_key="local-secret", port=port)
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} cannot be listened on .* choose another port"):
            second.start()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["sandboxes.log"]


def test_the_stack_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
        import pathlib, time
        from deploy.embedded import Stack
        from orchestrator.settings import Settings
        with Stack(Settings(state_dir=pathlib.Path({str(tmp_path / "state")!r}))) as stack:
            print(stack.redis.pid, stack.sandboxes.pid, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(exists, pids)), description="both children have followed")
    given = Settings(state_dir=tmp_path / "state")
    assert running_stack(given) is None
    with Stack(given) as stack:
        assert running_stack(given) == stack.settings
    assert {path.name for path in given.state_dir.iterdir()} == {"redis", "sandboxes.log"}


def test_what_a_killed_temporary_stack_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = """
        import time
        from deploy.embedded import Stack
        from orchestrator.settings import Settings
        stack = Stack(Settings(), temporary=True)
        stack.start()
        print(stack.settings.state_dir, flush=True)
        time.sleep(600)
    """
    home = tmp_path / "tmp"
    (home / "farm-of-somebody").mkdir(parents=True)
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "TMPDIR": str(home)}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) for _ in range(2)
    ]
    try:
        first, second = started
        killed, living = (Path(process.stdout.readline().strip()) for process in (first, second) if process.stdout)
        first.kill()
        first.wait()
        assert killed.is_dir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(home))
            with Stack(Settings(), temporary=True):
                pass
        assert not killed.exists()
        assert living.is_dir()
        assert (home / "farm-of-somebody").is_dir()
    finally:
        for process in started:
            process.kill()
            process.communicate()
