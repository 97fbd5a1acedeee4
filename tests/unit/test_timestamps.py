"""Points in time on a command line: so long ago, ISO, unix seconds; anything else is a clear error."""

from __future__ import annotations

import pytest

from deploy.timestamps import parse_moment, parse_span, show_moment
from orchestrator.errors import SettingsError

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW - 90),
        ("30m", NOW - 1_800),
        (" 2h ", NOW - 7_200),
        ("1.5h", NOW - 5_400),
        ("7d", NOW - 604_800),
        ("1w", NOW - 604_800),
        ("2026-11-30", 1_795_996_800.0),
        ("2026-11-30T14:00", 1_796_047_200.0),
        ("2026-11-30 14:00:00.5", 1_796_047_200.5),
        ("2026-11-30T15:00+01:00", 1_796_047_200.0),
        ("2026-11-30T14:00Z", 1_796_047_200.0),
        ("1796047200.5", 1_796_047_200.5),
    ],
)
def test_every_way_to_write_a_moment(text: str, expected: float) -> None:
    assert parse_moment(text, now=NOW, option="--since") == expected


@pytest.mark.parametrize("text", ["", "soon", "2 hours", "-1h", "h", "12", "2026-13-01", "nan", "9" * 400 + "d"])
def test_what_is_no_moment_is_named_with_its_option(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--until.*write how long ago"):
        parse_moment(text, now=NOW, option="--until")


@pytest.mark.parametrize("text", ["1796047200500", "1796047200500000", "179604720050.5"])
def test_milliseconds_are_not_taken_for_the_far_future(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--since.*leave out the last three digits"):
        parse_moment(text, now=NOW, option="--since")


def test_a_span_that_ends_before_it_begins_is_refused() -> None:
    assert parse_span(None, "2h", now=NOW) == (None, NOW - 7_200)
    assert parse_span("2h", "2h", now=NOW) == (NOW - 7_200, NOW - 7_200)
    with pytest.raises(SettingsError, match="--until 3h is before --since 2h"):
        parse_span("2h", "3h", now=NOW)


def test_a_moment_is_shown_in_utc_and_none_as_a_dash() -> None:
    assert show_moment(1_796_047_200.9) == "2026-11-30 14:00:00"
    assert show_moment(None) == "-"
