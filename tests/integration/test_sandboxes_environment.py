"""Whatever variables a task or an image sets: the command gets them as given, and its result arrives whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.provider import CommandResult, Provider, Sandbox
from tests.support.e2b_local import sandbox_request
from workers.sandboxes import shell

pytest_plugins = ["tests.support.e2b_local"]

_NOT_A_TASKS = {"FARM_COMMAND", "POSIXLY_CORRECT"}
"""Refused in a task's `envs`."""
_BASHS_OWN = {"IFS", "PATH", "LC_ALL", "PIPESTATUS", "_"}
"""What bash or the profile sets whatever is given, and what would change how this test's own command runs."""

_NOISY_START = """\
echo noise; echo noise >&2; set -e; trap 'echo noise' EXIT; out=mine _farm_out=mine
readonly TMOUT=1 c=mine
printf() { echo noise; }; timeout() { echo noise; }; read() { false; }; exec() { false; }
"""
_PLAIN_START = "greeting=hello\n"


@contextmanager
def sandbox_with(provider: Provider, envs: dict[str, str]) -> Iterator[Sandbox]:
    sandbox = provider.create(sandbox_request(lifetime_seconds=300, envs=envs))
    try:
        yield sandbox
    finally:
        provider.delete(sandbox.sandbox_id)


def run(sandbox: Sandbox, command: str) -> CommandResult:
    return sandbox.run(command, timeout_seconds=10, output_limit_bytes=1000, response_seconds=30)


HOSTILE = {
    "our program's words": {
        word: f"given {word}"
        for word in re.findall(r"[A-Za-z_]\w*", shell.program(timeout_seconds=1, limit_bytes=1))
        if not word.startswith("_farm_") and word not in _NOT_A_TASKS | _BASHS_OWN
    },
    "the names of before": dict.fromkeys(("c", "out", "err", "began", "over", "code", "took", "ended", "first"), "x"),
    "a time to live": {"TMOUT": "1"},
    "a home": {"HOME": "/tmp/elsewhere"},
    "paths": {"CDPATH": "/", "GLOBIGNORE": "*", "FIGNORE": ".o"},
    "no deep functions": {"FUNCNEST": "1"},
    "traces": {"PS4": "+ $(echo noise)", "BASH_XTRACEFD": "1"},
    "an older bash": {"BASH_COMPAT": "4.2"},
    "other tools": {"_POSIX2_VERSION": "199209", "TIME_STYLE": "iso", "COLUMNS": "1", "BLOCKSIZE": "1"},
    "functions": {  # of an image: a task's variable cannot be called so
        f"BASH_FUNC_{name}%%": "() { echo noise; }"
        for name in ("command", "hash", "kill", "printf", "read", "wait", "cat", "od", "timeout", "bash", "take")
    },
}


@pytest.mark.parametrize("envs", HOSTILE.values(), ids=HOSTILE)
def test_a_variable_changes_neither_the_result_nor_itself(provider: Provider, envs: dict[str, str]) -> None:
    """One of these names, `out` say, once had another value in the command than the task gave it."""
    names = [name for name in envs if name.isidentifier()]
    shown = "".join(f'echo "${name}"; ' for name in names)
    with sandbox_with(provider, envs) as sandbox:
        result = run(sandbox, f"/bin/sleep 1.2; {shown}echo out; echo err >&2; exit 3")
        assert result.stdout.decode() == "".join(f"{envs[name]}\n" for name in names) + "out\n"
        assert (result.stderr, result.exit_code, result.timed_out, result.truncated) == (b"err\n", 3, False, False)
        silent = run(sandbox, "exit 4")
        assert (silent.stdout, silent.stderr, silent.exit_code) == (b"", b"", 4)


def test_a_path_without_the_systems_tools_is_the_commands_own_affair(provider: Provider) -> None:
    with sandbox_with(provider, {"PATH": "/home/user/bin"}) as sandbox:
        result = run(sandbox, "echo out; echo err >&2; exit 3")
        assert (result.stdout, result.exit_code) == (b"out\n", 3)
        assert result.stderr.endswith(b"err\n")


@pytest.mark.parametrize("locale", [{"LC_ALL": "no_SUCH.UTF-8"}, {"LANG": "no_SUCH.UTF-8"}])
def test_a_locale_that_the_image_lacks_hides_no_output(provider: Provider, locale: dict[str, str]) -> None:
    """Bash warns of it ahead of all that our program prints."""
    with sandbox_with(provider, locale) as sandbox:
        result = run(sandbox, "echo out; echo err >&2")
        assert (result.stdout, result.exit_code) == (b"out\n", 0)
        assert result.stderr.endswith(b"err\n")


def test_a_start_up_file_acts_in_the_commands_shell_only(provider: Provider) -> None:
    with sandbox_with(provider, {"BASH_ENV": "/home/user/start"}) as sandbox:
        sandbox.write("/home/user/start", _PLAIN_START.encode(), timeout_seconds=10)
        assert run(sandbox, "echo $greeting").stdout == b"hello\n"
        sandbox.write("/home/user/start", _NOISY_START.encode(), timeout_seconds=10)
        result = run(sandbox, "sleep 1.2; echo out; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"noise\nout\nnoise\n", b"noise\n", 3)
        sandbox.write("/home/user/start", b"sleep 60", timeout_seconds=10)
        late = sandbox.run("true", timeout_seconds=0.5, output_limit_bytes=1000, response_seconds=30)
        assert late.timed_out, "it runs within the command's own limit"
