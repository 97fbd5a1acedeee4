"""Commands in a local sandbox, through the real SDK."""

import base64
import contextlib
import json
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, NotFoundException, Sandbox, TimeoutException
from e2b.exceptions import InvalidArgumentException, SandboxException
from e2b.sandbox.commands.command_handle import PtySize

from tests.support.e2b_local import LocalService
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.e2b_local"]


def test_output_errors_and_exit_code_come_back(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (caught.value.stdout, caught.value.stderr, caught.value.exit_code) == ("out\n", "err\n", 3)


def test_a_command_starts_at_home_with_a_clean_login_environment(service: LocalService) -> None:
    box = service.create(envs={"GLOBAL": "1"})
    seen = box.commands.run("pwd; echo $USER $HOME $GLOBAL $LOCAL; id -u", envs={"LOCAL": "2"}).stdout
    assert seen == "/home/user\nuser /home/user 1 2\n1000\n"
    assert box.commands.run("echo $LOCAL; pwd", cwd="/tmp").stdout == "\n/tmp\n"
    box.kill()


def test_a_missing_directory_or_program_is_an_invalid_argument(service: LocalService, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run("true", cwd="/nowhere")
    end = _end_of_stream(service, sandbox, {"process": {"cmd": "/bin/no-such-program"}})
    assert end["error"]["code"] == "invalid_argument"


def test_a_process_outlives_its_caller_and_can_be_joined_and_killed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo first; sleep 1000", background=True)
    handle.disconnect()
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    joined = sandbox.commands.connect(handle.pid)
    assert sandbox.commands.kill(handle.pid)
    assert handle.pid not in [process.pid for process in sandbox.commands.list()]
    with pytest.raises(CommandExitException) as caught:
        joined.wait()
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(handle.pid)


def test_input_arrives_whole_and_can_be_closed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("wc -c", background=True, stdin=True)
    for _ in range(3):
        handle.send_stdin("x" * 100_000)
    handle.close_stdin()
    assert handle.wait().stdout.strip() == "300000"


def test_input_for_an_unknown_process_is_not_found(sandbox: Sandbox) -> None:
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(99_999, "x")


def test_input_waits_for_a_slow_reader_instead_of_piling_up(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 1; wc -c", background=True, stdin=True)
    began = time.monotonic()
    sandbox.commands.send_stdin(handle.pid, "x" * 1_000_000)
    assert time.monotonic() - began > 0.3
    handle.close_stdin()
    assert handle.wait().stdout.strip() == "1000000"


def test_characters_split_across_chunks_arrive_whole_and_nothing_is_added(sandbox: Sandbox) -> None:
    script = r"printf '\xe2'; sleep 0.05; printf '\x98'; sleep 0.05; printf '\x83 end'"
    assert sandbox.commands.run(script).stdout == "☃ end"
    long = sandbox.commands.run('python3 -c \'print("☃" * 200000, end="")\'').stdout
    assert long == "☃" * 200_000


def test_binary_output_passes_through_unchanged(service: LocalService, sandbox: Sandbox) -> None:
    script = "import os,sys; os.write(1, bytes(range(256)) * 500)"
    received = bytearray()
    for event in _events(service, sandbox, {"process": {"cmd": "python3", "args": ["-c", script]}}):
        received += base64.b64decode(event.get("event", {}).get("data", {}).get("stdout", ""))
    assert received == bytes(range(256)) * 500


def test_a_deadline_ends_the_command_and_says_so(service: LocalService, sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 1000", timeout=0.3)
    request: dict[str, Any] = {"process": {"cmd": "sleep", "args": ["1000"]}}
    with _start(service, sandbox, request, {"Connect-Timeout-Ms": "1500"}):
        """The caller leaves; the command still has its time."""
    assert sandbox.commands.list() != []
    end = _end_of_stream(service, sandbox, request, {"Connect-Timeout-Ms": "200"})
    assert end["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: sandbox.commands.list() == [], description="both are gone")


def test_a_background_process_that_holds_the_output_delays_the_call_to_its_limit_only(sandbox: Sandbox) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 1000 & echo started", timeout=0.5)
    assert time.monotonic() - began < 8
    assert sandbox.commands.run("sleep 1000 > /dev/null 2>&1 & echo started").stdout == "started\n"


def test_output_before_a_kill_is_kept(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("(while :; do sleep 0.1; done) & echo before; wait", background=True)
    wait_until(lambda: next(iter(handle))[0] == "before\n", description="it printed")
    sandbox.commands.kill(handle.pid)
    with pytest.raises(CommandExitException) as caught:
        handle.wait()
    assert caught.value.stdout == "before\n"


def test_a_command_is_told_when_its_sandbox_is_killed(service: LocalService) -> None:
    box = service.create()
    handle = box.commands.run("sleep 1000", background=True)
    box.kill()
    with pytest.raises(TimeoutException, match="sandbox was killed or reached its end of life"):
        handle.wait()
    with pytest.raises(TimeoutException):
        box.commands.run("true")


def test_a_terminal_echoes_and_has_a_size(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.resize(terminal.pid, PtySize(rows=24, cols=123))
    sandbox.pty.send_stdin(terminal.pid, b"tput cols; tty; exit\n")
    shown: list[bytes] = []
    assert terminal.wait(on_pty=shown.append).exit_code == 0
    assert b"123" in b"".join(shown)
    assert b"/dev/pts/" in b"".join(shown)


def test_output_nobody_reads_stops_its_command_and_fills_no_memory(service: LocalService, sandbox: Sandbox) -> None:
    script = "i=0; while :; do head -c 1000000 /dev/zero; i=$((i+1)); echo $i > /tmp/progress; done"
    request = {"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": False}
    with _start(service, sandbox, request) as response:
        stream = response.iter_raw()
        next(stream)
        seen: list[str] = []

        def stands_still() -> bool:
            time.sleep(0.2)
            seen.append(sandbox.commands.run("cat /tmp/progress 2>/dev/null || true").stdout)
            return len(seen) > 1 and seen[-1] == seen[-2] != ""

        wait_until(stands_still, description="the command waits for its reader", seconds=20)
        assert int(seen[-1]) < 40
    # With its reader gone, the output is dropped and the command goes on.
    wait_until(lambda: not stands_still(), description="it goes on")


def test_a_request_that_is_no_json_is_an_error_and_harms_nothing(service: LocalService, sandbox: Sandbox) -> None:
    headers = {**_headers(sandbox), "Content-Type": "application/json"}
    for content in (b"{", b"[]", b"\xff", b'{"process": 1}'):
        answer = httpx.post(f"{service.url}/process.Process/SendSignal", headers=headers, content=content)
        assert answer.status_code == 400
    assert httpx.post(f"{service.url}/no.Such/Call", headers=headers, content=b"{}").status_code == 404
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def test_a_command_of_the_largest_size_runs(sandbox: Sandbox) -> None:
    text = "x" * 98_000
    assert sandbox.commands.run(f"printf %s {text} | wc -c").stdout.strip() == "98000"
    with pytest.raises(SandboxException):
        sandbox.commands.run("x" * 200_000)
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def _headers(box: Sandbox) -> dict[str, str]:
    token = box._envd_access_token
    assert token
    return {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}


def _start(
    service: LocalService, box: Sandbox, request: dict[str, Any], headers: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[httpx.Response]:
    message = json.dumps(request).encode()
    fields = {**_headers(box), "Content-Type": "application/connect+json", **(headers or {})}
    content = struct.pack(">BI", 0, len(message)) + message
    return httpx.stream("POST", f"{service.url}/process.Process/Start", headers=fields, content=content, timeout=10)


def _events(
    service: LocalService, box: Sandbox, request: dict[str, Any], headers: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    with _start(service, box, request, headers) as response:
        content = response.read()
    while content:
        length = int.from_bytes(content[1:5], "big")
        yield json.loads(content[5 : 5 + length])
        content = content[5 + length :]


def _end_of_stream(
    service: LocalService, box: Sandbox, request: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    return list(_events(service, box, request, headers))[-1]
