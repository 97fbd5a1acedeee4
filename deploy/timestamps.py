"""Points in time as people give them on a command line: so long ago, an ISO 8601 time, or unix seconds. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from orchestrator.errors import SettingsError

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}


def parse_moment(text: str, *, now: float, option: str) -> float:
    """Unix seconds of `90s`, `2h`, `7d` (that long before `now`), `2026-11-30T14:00` (UTC unless it says otherwise) or
    `1796047200.5`; raises SettingsError that names the option.
    """
    text = text.strip()
    if re.fullmatch(r"\d{12,}(\.\d+)?", text):  # as seconds, the year 5138 or later
        raise SettingsError(
            f"{option} {text!r}: these are not seconds; for milliseconds leave out the last three digits"
        )
    if ago := re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*([smhdw])", text):
        return now - float(ago[1]) * _UNITS[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):  # shorter ones are dates (20261130) or slips
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(
            f"{option} {text!r}: write how long ago (90s, 30m, 2h, 7d), an ISO time (2026-11-30T14:00, in UTC), "
            "or unix seconds"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def parse_span(since: str | None, until: str | None, *, now: float) -> tuple[float | None, float | None]:
    """Both ends of `--since` and `--until`, None where not given; raises SettingsError when nothing can lie between."""
    begin, end = (
        None if text is None else parse_moment(text, now=now, option=option)
        for text, option in ((since, "--since"), (until, "--until"))
    )
    if begin is not None and end is not None and end < begin:
        raise SettingsError(f"--until {until} is before --since {since}: nothing can lie between")
    return begin, end


def show_moment(seconds: float | None) -> str:
    """Unix seconds as UTC, to the second; - when there are none."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
