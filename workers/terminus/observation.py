"""What a command's result looks like to a policy: text of bounded size, and the facts beside it. Pure functions."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from orchestrator.provider import CommandResult

_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")
"""Bytes that no text holds; bell to carriage return and escape are what terminals print."""


@dataclass(frozen=True)
class Observation:
    """One command, as the policy sees it; `exit_code` is None when the command ran out of time."""

    text: str
    exit_code: int | None
    timed_out: bool
    truncated: bool
    binary: bool


def observe(result: CommandResult, *, limit_bytes: int, command_seconds: float) -> Observation:
    """Decode and join both streams, and say visibly what was cut, replaced, timed out or failed.

    Nothing is stripped, and nothing added inside a stream; only a stdout that does not end its last line gets a
    newline before stderr. The text is at most `limit_bytes` of output and the notices.
    """
    truncated = result.truncated or len(result.stdout) + len(result.stderr) > limit_bytes
    stdout, stderr = (
        _text_bytes(stream, cut=truncated) for stream in _share(result.stdout, result.stderr, limit_bytes)
    )
    joint = b"\n" if stdout and stderr and not stdout.endswith(b"\n") else b""
    binary = _is_binary(stdout) or _is_binary(stderr)
    text = (stdout + joint + stderr).decode(errors="replace")
    notices = _notices(result, truncated=truncated, binary=binary, command_seconds=command_seconds)
    if notices and text and not text.endswith("\n"):
        text += "\n"
    return Observation(
        text=text + "\n".join(notices),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        truncated=truncated,
        binary=binary,
    )


def _notices(result: CommandResult, *, truncated: bool, binary: bool, command_seconds: float) -> list[str]:
    notices = []
    if truncated:
        notices.append("[output truncated]")
    if binary:
        notices.append("[binary output: undecodable bytes replaced]")
    if result.timed_out:
        notices.append(f"[timed out: killed after {command_seconds:g} s]")
    elif result.exit_code:
        notices.append(f"[exit code {result.exit_code}]")
    return notices


def _share(out: bytes, err: bytes, limit: int) -> tuple[bytes, bytes]:
    """Cut both streams to `limit` in total: a quarter is stderr's, the rest stdout's, unused room is passed on."""
    err = err[: max(limit // 4, limit - len(out))]
    return out[: limit - len(err)], err


def _text_bytes(stream: bytes, *, cut: bool) -> bytes:
    """`stream`, without the part of a character that a cut may have left at its end."""
    if not cut:
        return stream
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(stream)
    return stream[: len(stream) - len(decoder.getstate()[0])]


def _is_binary(stream: bytes) -> bool:
    if _CONTROL.search(stream):
        return True
    try:
        stream.decode()
    except UnicodeDecodeError:
        return True
    return False
