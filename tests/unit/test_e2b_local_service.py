"""The local sandbox service's own parts: settings, capability, keys, forms, event loop."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from deploy.embedded.children import require_linux
from orchestrator.errors import SettingsError
from workers.e2b_local.agent.http import Failure, unquote
from workers.e2b_local.agent.loop import READ, Loop
from workers.e2b_local.agent.multipart import Multipart
from workers.e2b_local.capability import JailUnavailable, check_jail, find_bwrap, open_jail, probe
from workers.e2b_local.idempotency import Idempotency, KeyMismatch
from workers.e2b_local.jail import Limits
from workers.e2b_local.service import RootInUse, ServiceConfig, create_app

LIMITS = Limits(memory_mb=256, process_limit=16, file_limit_mb=1, home_mb=1, tmp_mb=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_a_host_that_is_not_the_loopback_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loopback only"):
        ServiceConfig(api_key="k", root=tmp_path, host=host)


def test_an_empty_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="api_key"):
        ServiceConfig(api_key="", root=tmp_path)


def test_two_services_cannot_share_a_root(tmp_path: Path) -> None:
    app = create_app(ServiceConfig(api_key="k", root=tmp_path))
    with pytest.raises(RootInUse, match="another root"):
        create_app(ServiceConfig(api_key="k", root=tmp_path))
    asyncio.run(app.close())
    asyncio.run(create_app(ServiceConfig(api_key="k", root=tmp_path)).close())
    assert list(tmp_path.iterdir()) == []


def test_a_system_bwrap_is_preferred_to_the_wheels(tmp_path: Path) -> None:
    system = tmp_path / "bwrap"
    system.write_text("#!/bin/sh\n")
    system.chmod(0o755)
    assert find_bwrap(str(tmp_path)) == system
    assert find_bwrap(str(tmp_path / "none")) != system


def test_this_host_can_build_jails() -> None:
    assert check_jail() is None


def test_a_system_that_forbids_namespaces_is_told_to_use_a_key(tmp_path: Path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    tmp_path.chmod(0o755)
    jail = open_jail(tmp_path / "jail", LIMITS, bwrap=bwrap)
    with pytest.raises(JailUnavailable, match="E2B key"):
        probe(jail)


def test_a_jail_that_cannot_be_started_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A host that is short of processes meets this again and again."""
    tmp_path.chmod(0o755)
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\n")
    bwrap.chmod(0o755)
    jail = open_jail(tmp_path / "jail", LIMITS, bwrap=bwrap)
    bwrap.write_text("no program at all")
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="Exec format error"):
        jail.run("none", ["true"])
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_python_that_cannot_run_the_agent_is_named(tmp_path: Path) -> None:
    with pytest.raises(JailUnavailable, match="install python3"):
        open_jail(tmp_path / "jail", LIMITS, python=Path("/bin/false"))


def test_a_system_without_jails_is_told_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(JailUnavailable, match=r"needs Linux, this is darwin: use an E2B key"):
        open_jail(tmp_path / "jail", LIMITS, platform="darwin")
    assert list(tmp_path.iterdir()) == []


def test_an_embedded_server_needs_linux_and_says_what_to_do_elsewhere() -> None:
    with pytest.raises(SettingsError, match=r"the embedded Redis needs Linux and this is win32; set REDIS_URL"):
        require_linux("the embedded Redis", "set REDIS_URL", platform="win32")
    require_linux("the embedded Redis", "set REDIS_URL", platform="linux")


def test_a_failed_creation_frees_its_key() -> None:
    answers: list[Any] = [RuntimeError("no"), {"id": 1}]

    async def create() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    async def scenario() -> None:
        keys = Idempotency()
        with pytest.raises(RuntimeError):
            await keys.once("k", {}, create)
        assert await keys.once("k", {}, create) == {"id": 1}
        assert await keys.once("k", {}, create) == {"id": 1}
        with pytest.raises(KeyMismatch):
            await keys.once("k", {"other": 1}, create)

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_a_form_is_understood_however_it_is_cut(size: int) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="/a%22b"\r\n\r\nline\r\n--Cogus\r\n--\r\n--B\r\n'
        b'Content-Disposition: form-data; name="other"\r\n\r\nignored\r\n--B\r\n'
        b'Content-Disposition: form-data; name="file"; filename="/empty"\r\n\r\n\r\n--B--\r\n'
    )
    files: dict[str, bytes] = {}

    def open_part(name: str, filename: str) -> bool:
        if name == "file":
            files[filename] = b""
        return name == "file"

    def write(data: bytes) -> None:
        files[next(reversed(files))] += data

    form = Multipart("multipart/form-data; boundary=B", open_part, write)
    for start in range(0, len(body), size):
        form.feed(body[start : start + size])
    assert files == {'/a"b': b"line\r\n--Cogus\r\n--", "/empty": b""}


def test_a_form_without_a_boundary_is_refused() -> None:
    with pytest.raises(Failure, match="boundary"):
        Multipart("multipart/form-data", lambda *_: True, lambda _: None)


def test_percent_decoding_keeps_what_it_cannot_decode() -> None:
    assert unquote("a%20b%C3%BC%zz%") == "a bü%zz%"


def test_timers_run_in_order_and_not_once_cancelled() -> None:
    class Stop(Exception):
        pass

    loop, ran = Loop(), list[str]()

    def stop() -> None:
        raise Stop

    loop.call_later(0.02, lambda: ran.append("second"))
    loop.call_later(0.01, lambda: ran.append("first"))
    loop.call_later(0.015, lambda: ran.append("never")).cancel()
    loop.call_later(0.03, stop)
    with pytest.raises(Stop):
        loop.run()
    assert ran == ["first", "second"]


def test_a_callback_may_stop_another_that_is_ready_too() -> None:
    class Stop(Exception):
        pass

    loop, calls = Loop(), list[int]()
    pipes = [os.pipe(), os.pipe()]

    def ready(number: int) -> None:
        calls.append(number)
        for read, _ in pipes:
            loop.watch(read, 0, lambda _: None)

    def stop() -> None:
        raise Stop

    for number, (read, write) in enumerate(pipes):
        os.write(write, b"x")
        loop.watch(read, READ, lambda _, number=number: ready(number))  # type: ignore[misc]
    loop.call_later(0.02, stop)
    with pytest.raises(Stop):
        loop.run()
    assert len(calls) == 1
    for fd in (fd for pipe in pipes for fd in pipe):
        os.close(fd)
