"""The command as a person runs it: in a directory of its own, with its exit code and what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from deploy.command_line import build
from deploy.exit_codes import ExitCode
from tests.support import warm
from tests.support.processes import ROOT
from workers.sandboxes.provider import E2BProvider

COMMAND = warm.FARM_COMMAND


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1", **variables}


def run(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return warm.farm().run([*COMMAND, *arguments], env=environment(**variables), cwd=directory)


@pytest.mark.parametrize(
    "words",
    [
        ("receipts",),
        ("cost",),
        ("budget",),
        ("cancel",),
        ("reconcile",),
        ("status",),
        ("doctor",),
        ("tasks",),
        ("tasks", "check"),
        ("sandboxes",),
        ("sandboxes", "serve"),
        ("sandboxes", "faults"),
        ("sandboxes", "faults", "show"),
        ("sandboxes", "faults", "set"),
        ("sandboxes", "faults", "clear"),
        ("terminus",),
    ],
)
def test_every_help_ends_with_examples(words: Sequence[str]) -> None:
    done = CliRunner().invoke(build(), [*words, "--help"])
    assert done.exit_code == 0
    assert done.output.partition("Examples:")[2].strip().startswith("$ ")


def test_the_version_is_shown(tmp_path: Path) -> None:
    assert re.fullmatch(r"rollout-farm \S+\n", run(tmp_path, "--version").stdout)


def test_an_unknown_command_is_a_usage_error(tmp_path: Path) -> None:
    assert run(tmp_path, "conquer").returncode == 2


def run_into(output: IO[str], directory: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is this file."""
    return subprocess.run(
        [*COMMAND, *words],
        cwd=directory,
        env=environment(),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "words", [("--version",), ("receipts", "--help"), ("tasks", "check", "weekly-sales"), ("tasks", "--help")]
)
def test_a_full_disk_is_one_line(tmp_path: Path, words: Sequence[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_into(full, tmp_path, words)
    wanted = "error: cannot write the output: No space left on device; make room, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (ExitCode.FAILED, wanted)


@pytest.mark.parametrize("words", [("--version",), ("receipts", "--help"), ("tasks", "check", "weekly-sales")])
def test_output_that_nobody_reads_any_more_ends_the_command_quietly(tmp_path: Path, words: Sequence[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = run_into(closed, tmp_path, words)
    assert (done.returncode, done.stderr) == (ExitCode.OUTPUT_CLOSED, "")


def test_a_limit_beyond_any_farm_is_a_usage_error(tmp_path: Path) -> None:
    done = run(tmp_path, "receipts", "--limit", "99999999999999999999")
    assert done.returncode == ExitCode.USAGE
    assert "--limit" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_one_line_and_has_its_code(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", FARM_PLAN="enterprise")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: FARM_PLAN: ")
    assert len(done.stderr.splitlines()) == 1


def test_doctor_finds_this_host_fit_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json", TMPDIR=str(tmp_path))
    report = json.loads(done.stdout)
    assert (done.returncode, report["healthy"]) == (0, True), done.stdout
    assert {"Python", "Redis", "Jails", "Capacity"} <= {finding["name"] for finding in report["findings"]}
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_and_says_what_to_mend(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "doctor",
        REDIS_URL="redis://user:hidden@127.0.0.1:1/0",
        E2B_API_KEY="e2b_hidden",
        FARM_E2B_API_URL="http://127.0.0.1:1",
    )
    assert done.returncode == 1
    assert "REDIS_URL" in done.stdout
    assert "hidden" not in done.stdout + done.stderr


def test_doctor_tells_a_wrong_key(tmp_path: Path, redis_url: str) -> None:
    with serving(tmp_path) as (url, _):
        done = run(tmp_path, "doctor", "--json", REDIS_URL=redis_url, E2B_API_KEY="no", FARM_E2B_API_URL=url)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert found["Provider"]["status"] == "fail"
    assert "does not accept the key" in found["Provider"]["detail"]
    assert "E2B_API_KEY" in found["Provider"]["mend"]


def test_tasks_check_names_file_and_line(tmp_path: Path) -> None:
    assert run(tmp_path, "tasks", "check", "weekly-sales").returncode == 0
    (tmp_path / "broken.json").write_text('{\n "id": "x",\n "prompt": ""\n}\n')
    done = run(tmp_path, "tasks", "check", "weekly-sales", "broken.json")
    assert done.returncode == 7
    assert re.search(r"^broken\.json:\d+: ", done.stderr, re.MULTILINE)


class serving:  # noqa: N801 - reads as what it does
    """`rollout-farm sandboxes serve` as a context: its URL and the key it printed."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self._directory = directory
        self._variables = variables

    def __enter__(self) -> tuple[str, str]:
        self.process = subprocess.Popen(
            [*COMMAND, "sandboxes", "serve"],
            cwd=self._directory,
            env=environment(PYTHONUNBUFFERED="1", **self._variables),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = "".join(self.process.stdout.readline() for _ in range(4))
        url = re.search(r"E2B_API_URL=(\S+)", said)
        key = re.search(r"E2B_API_KEY=(\S+)", said)
        assert url is not None, said
        return url.group(1), key.group(1) if key else ""

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        self.said = self.process.communicate(timeout=30)[0]


def test_sandboxes_serve_prints_how_to_use_it_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    service = serving(tmp_path)
    with service as (url, key):
        assert E2BProvider(key, api_url=url).list({}) == []
    assert service.process.returncode == 0
    assert [path.name for path in (tmp_path / ".farm").iterdir()] == ["sandboxes.log"]


def test_sandboxes_serve_does_not_print_a_key_of_yours(tmp_path: Path) -> None:
    with serving(tmp_path, E2B_API_KEY="my-own-key") as (url, key):
        assert key == ""
        assert E2BProvider("my-own-key", api_url=url).list({}) == []


def test_a_service_on_this_host_is_reached_whatever_proxy_the_environment_names(tmp_path: Path) -> None:
    proxy = "http://127.0.0.1:1"  # nothing listens there
    proxies = {"HTTP_PROXY": proxy, "http_proxy": proxy, "ALL_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""}
    with serving(tmp_path, E2B_API_KEY="my-own-key") as (url, _):
        done = run(tmp_path, "doctor", "--json", E2B_API_KEY="my-own-key", FARM_E2B_API_URL=url, **proxies)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (found["Provider"]["status"], found["Provider"]["detail"]) == ("ok", f"{url} accepts the key")


def test_terminus_beyond_loopback_needs_a_token(tmp_path: Path) -> None:
    done = run(tmp_path, "terminus", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 3
    assert "FARM_TERMINUS_TOKEN" in done.stderr


@pytest.mark.parametrize("words", [("terminus",), ("sandboxes", "serve")])
def test_a_port_that_is_taken_is_one_line(tmp_path: Path, words: Sequence[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, *words, "--port", str(port))
    wanted = f"error: 127.0.0.1:{port} cannot be listened on (Address already in use); choose another port\n"
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.SETTINGS, "", wanted)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "a" * 64])
def test_a_host_that_is_not_ours_is_one_line(tmp_path: Path, host: str) -> None:
    done = run(tmp_path, "terminus", "--host", host, "--port", "0", FARM_TERMINUS_TOKEN="a-secret")
    assert done.returncode == ExitCode.SETTINGS
    assert "cannot be listened on" in done.stderr
    assert done.stderr.endswith("choose an address of this host, such as 127.0.0.1\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [("status",), ("run", "weekly-sales")])
def test_an_empty_redis_url_and_key_are_unset(tmp_path: Path, words: Sequence[str]) -> None:
    (tmp_path / ".env").write_text("REDIS_URL=redis://127.0.0.1:1/0\nE2B_API_KEY=wrong\n")
    done = run(tmp_path, *words, REDIS_URL="", E2B_API_KEY="")
    if words[0] == "run":
        assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "wrong_answer"), done.stderr
    else:
        assert "REDIS_URL is not set" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_terminus_serves_alone_with_local_sandboxes_and_leaves_none(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "terminus", "--port", "0"],
        cwd=tmp_path,
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert re.match(r"Terminus at http://127\.0\.0\.1:\d+", process.stdout.readline())
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode in (0, 130)
    assert [path.name for path in (tmp_path / ".farm").iterdir()] == ["sandboxes.log"]
