"""Running commands in a real jail: exact results, bytes as written, and no way to hang, flood or starve the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.provider import CommandResult, Provider
from tests.support.e2b_local import sandbox_request

pytest_plugins = ["tests.support.e2b_local"]

LIMIT = 64 * 1024
GIGABYTE = 1_000_000_000

Run = Callable[..., CommandResult]


@contextmanager
def runner(provider: Provider) -> Iterator[Run]:
    sandbox = provider.create(sandbox_request(lifetime_seconds=300))

    def run(command: str, *, timeout_seconds: float = 10, response_seconds: float = 30) -> CommandResult:
        return sandbox.run(
            command,
            timeout_seconds=timeout_seconds,
            output_limit_bytes=LIMIT,
            response_seconds=response_seconds,
        )

    yield run
    provider.delete(sandbox.sandbox_id)


@pytest.fixture(scope="module")
def run(provider: Provider) -> Iterator[Run]:
    """In a sandbox that the module's tests share."""
    with runner(provider) as run:
        yield run


@pytest.fixture
def run_alone(provider: Provider) -> Iterator[Run]:
    """In a sandbox of the test's own, which it may spoil."""
    with runner(provider) as run:
        yield run


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("false", 1),
        ("exit 3", 3),
        ("exit 124", 124),
        ("exit 137", 137),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("no-such-command-here", 127),
        ("if", 2),
    ],
)
def test_the_exit_code_is_the_leaders_own(run: Run, command: str, code: int) -> None:
    result = run(command)
    assert (result.exit_code, result.timed_out) == (code, False)


def test_stdout_and_stderr_arrive_apart_and_as_written(run: Run) -> None:
    result = run("printf ' a\\n\\n b'; printf 'oops\\r\\n' >&2")
    assert (result.stdout, result.stderr, result.truncated) == (b" a\n\n b", b"oops\r\n", False)


def test_every_byte_value_survives(run: Run) -> None:
    result = run('for i in $(seq 0 255); do printf "\\\\x$(printf %02x $i)"; done')
    assert result.stdout == bytes(range(256))


def test_utf8_written_in_pieces_arrives_whole_with_nothing_between(run: Run) -> None:
    result = run("for i in 1 2 3; do printf '\\xe2'; sleep 0.05; printf '\\x82'; sleep 0.05; printf '\\xac'; done")
    assert result.stdout.decode() == "€€€"


def test_a_command_that_runs_out_of_time_is_killed_and_says_so(run: Run) -> None:
    began = time.monotonic()
    result = run("echo before; trap '' TERM INT; while :; do :; done", timeout_seconds=1.5)
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == b"before\n"
    assert time.monotonic() - began < 5


def test_children_of_a_timed_out_command_are_killed_with_it(run: Run) -> None:
    assert run("(sleep 0.8; touch /tmp/survivor) & sleep 30", timeout_seconds=0.3).timed_out
    assert run("sleep 1; ls /tmp/survivor").exit_code == 2


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_gigabyte_of_output_is_cut_at_the_source_and_the_program_finishes(run: Run, stream: str) -> None:
    began = time.monotonic()
    result = run(f"head -c {GIGABYTE} /dev/zero >&{stream}; echo $? > /tmp/status")
    assert result.truncated
    assert max(len(result.stdout), len(result.stderr)) == LIMIT
    assert result.exit_code == 0
    assert time.monotonic() - began < 9
    assert run("cat /tmp/status").stdout == b"0\n"


def test_each_stream_is_cut_by_itself(run: Run) -> None:
    result = run(f"head -c {LIMIT} /dev/zero; head -c {LIMIT + 1} /dev/zero >&2")
    assert (len(result.stdout), len(result.stderr)) == (LIMIT, LIMIT)
    assert (result.stdout_cut, result.stderr_cut) == (False, True)


def test_output_of_exactly_the_limit_is_not_cut(run: Run) -> None:
    result = run(f"head -c {LIMIT} /dev/zero")
    assert (len(result.stdout), result.truncated) == (LIMIT, False)


@pytest.mark.parametrize("background", ["sleep 60", "setsid sleep 60", "while :; do echo x; sleep 0.01; done", "yes"])
def test_a_background_process_that_holds_stdout_does_not_hold_the_call(run: Run, background: str) -> None:
    began = time.monotonic()
    result = run(f"echo started; ({background}) & exit 5")
    took = time.monotonic() - began
    run("kill $(pgrep -f 'sleep 60') $(pgrep -x yes); true")
    assert b"started\n" in result.stdout
    assert result.exit_code == 5
    assert took < 6  # 0.2 s of grace; the rest is the machine's, and a held call would be cut at 10


def test_a_background_writer_outlives_its_command_without_sigpipe(run: Run) -> None:
    run("(sleep 0.5; echo late; echo late; touch /tmp/wrote) & true")
    assert run("for i in $(seq 50); do [ -e /tmp/wrote ] && exit 0; sleep 0.1; done; exit 1").exit_code == 0


def test_a_long_command_full_of_quotes_arrives_unchanged(run: Run) -> None:
    text = 'it\'s "quoted" $HOME `x` \\ é\n'
    filler = (text * (96 * 1024 // len(text.encode())))[: 90 * 1024 // 2]
    command = "cat <<'END' | wc -c\n" + filler + "\nEND"
    assert len(command.encode()) > 45 * 1024
    assert int(run(command).stdout) == len(filler.encode()) + 1
    padded = "printf %s '" + "x" * (96 * 1024 - 20) + "' | wc -c"
    assert len(padded) > 95 * 1024
    assert int(run(padded).stdout) == 96 * 1024 - 20


def test_a_command_that_looks_like_an_option_is_a_command(run: Run) -> None:
    assert run("-x").exit_code == 127


def test_the_command_sees_an_empty_stdin_its_home_and_nothing_of_ours(run: Run) -> None:
    result = run("cat; env; echo $HOME; ls /proc/self/fd")
    assert b"FARM_COMMAND" not in result.stdout
    assert b"\n/home/user\n" in result.stdout
    assert result.stdout.endswith(b"\n/home/user\n0\n1\n2\n3\n"), "3 is what ls itself reads"


def test_a_hostile_profile_is_bounded_by_the_commands_own_limit(run_alone: Run) -> None:
    run_alone("echo 'sleep 60' > ~/.bash_profile")
    result = run_alone("true", timeout_seconds=0.5)
    assert result.timed_out


def test_killing_the_reporter_is_the_commands_own_end(run_alone: Run) -> None:
    result = run_alone("kill -9 $(ps -o ppid= -p $PPID); sleep 0.2; echo unheard")
    assert (result.exit_code, result.timed_out) == (137, False)


def test_what_the_agent_gives_up_is_the_commands_own_timeout(run: Run) -> None:
    began = time.monotonic()
    assert run("sleep 20", timeout_seconds=30, response_seconds=0.5).timed_out
    assert time.monotonic() - began < 5


def test_a_command_that_stops_whoever_would_answer_times_out(run_alone: Run) -> None:
    result = run_alone("kill -STOP -1", timeout_seconds=0.5, response_seconds=1.5)
    assert (result.exit_code, result.timed_out) == (None, True)
