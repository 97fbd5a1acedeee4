"""Reading the reply of the in-sandbox program: what arrives, what is shared, and what a forger can make of it."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.sandboxes import shell

MEBIBYTE = 2**20
MARK = b"\2farm\3".hex(" ")


def spelled(data: bytes) -> str:
    return f" {MARK} {data.hex(' ')}\n"


def test_a_reply_is_its_bytes_and_its_exit_code() -> None:
    result = shell.parse(f"{spelled(b'out')}:3:1000", spelled(b"err"), timeout_seconds=1, limit_bytes=10)
    assert (result.stdout, result.stderr, result.exit_code) == (b"out", b"err", 3)
    assert not result.timed_out
    assert not result.truncated


@pytest.mark.parametrize(("took", "timed_out", "code"), [(99, False, 137), (100, True, None)])
def test_a_kill_is_a_timeout_only_after_the_time(took: int, timed_out: bool, code: int | None) -> None:
    result = shell.parse(f":137:{took}", "", timeout_seconds=1, limit_bytes=10)
    assert (result.timed_out, result.exit_code) == (timed_out, code)


def test_no_time_is_taken_by_a_clock_that_may_be_set() -> None:
    """A step back made a duration negative, and the reply of a right answer unreadable."""
    program = shell.program(timeout_seconds=1, limit_bytes=10)
    assert program.count("</proc/uptime") == 2
    assert not {"EPOCHREALTIME", "EPOCHSECONDS", "SECONDS", "date"} & set(re.findall(r"\w+", program))


def test_another_exit_code_is_never_a_timeout() -> None:
    result = shell.parse(":0:500", "", timeout_seconds=1, limit_bytes=10)
    assert (result.timed_out, result.exit_code) == (False, 0)


def test_without_the_trailer_the_program_was_killed() -> None:
    result = shell.parse(spelled(b"part"), "", timeout_seconds=1, limit_bytes=10)
    assert (result.stdout, result.exit_code) == (b"part", shell.KILLED)


NOISE = "/bin/bash: warning: setlocale: LC_ALL: cannot change locale (de_DE.UTF-8)\n 61 62\n:0:1\n"


@pytest.mark.parametrize("data", [b"", b"out"])
def test_what_is_printed_before_the_program_is_dropped(data: bytes) -> None:
    shown = spelled(data) if data else ""
    result = shell.parse(f"{NOISE}{shown}:0:1", f"{NOISE}{shown}", timeout_seconds=1, limit_bytes=10)
    assert (result.stdout, result.stderr, result.exit_code) == (data, data, 0)


def test_what_only_looks_like_a_reply_is_none() -> None:
    result = shell.parse(NOISE, NOISE, timeout_seconds=1, limit_bytes=10)
    assert (result.stdout, result.stderr, result.exit_code) == (b"", b"", shell.KILLED)


@pytest.mark.parametrize("forged", ["not hexadecimal", "6", "61 6", "\x00", "61 zz 62", ":999:1", "é"])
def test_a_forged_reply_is_never_an_exception(forged: str) -> None:
    result = shell.parse(MARK + forged, MARK + forged, timeout_seconds=1, limit_bytes=10)
    assert result.stdout in (b"", b"a")


@pytest.mark.parametrize(("out", "err"), [(8, 8), (9, 0), (0, 9), (9, 9)])
def test_each_stream_has_the_limit_for_itself(out: int, err: int) -> None:
    """Of a verifier's run stdout is what counts, however much stderr there is."""
    stdout = f"{spelled(b'o' * out)}:0:1"
    result = shell.parse(stdout, spelled(b"e" * err), timeout_seconds=1, limit_bytes=8)
    assert (len(result.stdout), len(result.stderr)) == (min(out, 8), min(err, 8))
    assert (result.stdout_cut, result.stderr_cut, result.truncated) == (out > 8, err > 8, max(out, err) > 8)


def test_an_honest_reply_of_the_limit_fits_its_bound() -> None:
    limit = 65536
    lines = "".join(f" {bytes(4096).hex(' ')}\n" for _ in range(limit // 4096)) + " 00\n"
    assert len(NOISE + MARK + lines + MARK + ":255:10000000") <= shell.reply_bytes(limit)


@pytest.mark.parametrize("line", [4096, 4 * MEBIBYTE])
@pytest.mark.parametrize("end", ["", " 6", " zz"])
def test_reading_a_long_reply_takes_little_memory(line: int, end: str) -> None:
    """Two episodes share a server: one with much output once took 3 GB and its thread alone for seven seconds."""
    size = 4 * MEBIBYTE
    stdout = f" {MARK}" + f" {bytes(line).hex(' ')}\n" * (size // line - 1) + f" {bytes(line).hex(' ')}{end}"
    tracemalloc.start()
    try:
        result = shell.parse(stdout, "", timeout_seconds=1, limit_bytes=size)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.stdout == bytes(size)
    assert most < 32 * MEBIBYTE


SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
FORGED = st.lists(st.sampled_from([MARK, *"06af: \n٣²x", *SPACES])).map("".join) | st.text()


@given(stdout=FORGED, stderr=FORGED)
def test_nothing_that_a_forger_sends_is_an_exception(stdout: str, stderr: str) -> None:
    """Unicode has other spaces and other digits than those that bytes.fromhex() and int() read."""
    result = shell.parse(stdout, stderr, timeout_seconds=1, limit_bytes=10)
    assert max(len(result.stdout), len(result.stderr)) <= 10
