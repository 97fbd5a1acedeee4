"""What a command's result looks like to a policy: text of bounded size, and the facts beside it. Pure functions."""

from __future__ import annotations

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
    joint = b"\n" if result.stdout and result.stderr and not result.stdout.endswith(b"\n") else b""
    raw = result.stdout + joint + result.stderr
    cut = _cut(raw, limit_bytes) if len(raw) > limit_bytes else raw
    truncated = result.truncated or len(cut) < len(raw)
    binary = _is_binary(cut, whole=not truncated)
    notices = _notices(result, truncated=truncated, binary=binary, command_seconds=command_seconds)
    text = cut.decode(errors="replace")
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


def _cut(raw: bytes, limit: int) -> bytes:
    return raw[:limit]


def _is_binary(raw: bytes, *, whole: bool) -> bool:
    if _CONTROL.search(raw):
        return True
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        # A cut may have split the last character; that alone is not binary.
        return whole or error.reason != "unexpected end of data"
    return False
