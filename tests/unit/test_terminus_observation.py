"""From a command's bytes to what a policy reads."""

from __future__ import annotations

import pytest

from orchestrator.provider import CommandResult
from workers.terminus.observation import Observation, observe


def seen(
    stdout: bytes, stderr: bytes = b"", *, code: int | None = 0, limit: int = 100, truncated: bool = False
) -> Observation:
    result = CommandResult(exit_code=code, stdout=stdout, stderr=stderr, timed_out=code is None, stdout_cut=truncated)
    return observe(result, limit_bytes=limit, command_seconds=10)


@pytest.mark.parametrize(
    ("stdout", "stderr", "text"),
    [
        (b"", b"", ""),
        (b" a\n\n", b"", " a\n\n"),
        (b"", b"\terr ", "\terr "),
        (b"out", b"err", "out\nerr"),
        (b"out\n", b"err\n", "out\nerr\n"),
    ],
)
def test_output_is_joined_with_nothing_added_or_stripped(stdout: bytes, stderr: bytes, text: str) -> None:
    assert seen(stdout, stderr).text == text


@pytest.mark.parametrize(
    ("code", "truncated", "notice"),
    [
        (3, False, "[exit code 3]"),
        (None, False, "[timed out: killed after 10 s]"),
        (0, True, "[output truncated]"),
        (1, True, "[output truncated]\n[exit code 1]"),
    ],
)
def test_what_happened_is_said_on_lines_of_its_own(code: int | None, truncated: bool, notice: str) -> None:
    assert seen(b"out", code=code, truncated=truncated).text == f"out\n{notice}"
    assert seen(b"out\n", code=code, truncated=truncated).text == f"out\n{notice}"
    assert seen(b"", code=code, truncated=truncated).text == notice


@pytest.mark.parametrize("data", [b"\xff", b"a\x00b", b"\x89PNG\r\n\x1a\n", "é".encode()[:1]])
def test_what_is_no_text_is_flagged_and_replaced(data: bytes) -> None:
    observed = seen(data)
    assert observed.binary
    assert "[binary output" in observed.text
    observed.text.encode()


@pytest.mark.parametrize("data", ["é€😀".encode(), b"\x1b[31mred\x1b[0m\r\n\a\t", b""])
def test_text_with_colours_and_accents_is_no_binary(data: bytes) -> None:
    observed = seen(data)
    assert not observed.binary
    assert observed.text == data.decode()


def test_a_character_split_by_the_cut_is_no_binary() -> None:
    observed = seen("é".encode() * 10, limit=5)
    assert (observed.binary, observed.truncated) == (False, True)
    assert observed.text == "éé\n[output truncated]"


def test_a_cut_inside_both_streams_leaves_whole_characters() -> None:
    observed = seen("€".encode()[:2], "é".encode()[:1], truncated=True)
    assert (observed.binary, observed.text) == (False, "[output truncated]")


@pytest.mark.parametrize(
    ("out", "err", "shared"),
    [(8, 0, (8, 0)), (9, 0, (8, 0)), (0, 9, (0, 8)), (9, 9, (6, 2)), (7, 9, (6, 2)), (3, 9, (3, 5)), (9, 1, (7, 1))],
)
def test_unused_room_of_one_stream_goes_to_the_other(out: int, err: int, shared: tuple[int, int]) -> None:
    observed = seen(b"o" * out, b"e" * err, limit=8)
    assert (observed.text.count("o", 0, shared[0]), observed.text[: sum(shared) + 1].count("e")) == shared
    assert observed.truncated == (out + err > 8)


def test_output_of_exactly_the_limit_is_not_cut_by_the_joint() -> None:
    observed = seen(b"o" * 5, b"e" * 5, limit=10)
    assert (observed.truncated, observed.text) == (False, "ooooo\neeeee")
