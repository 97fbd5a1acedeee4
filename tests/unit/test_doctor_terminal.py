"""What reaches the terminal, and what an error's exit code is."""

from __future__ import annotations

import pytest

from deploy.exit_codes import ExitCode, exit_code
from deploy.terminal import print_error, safe
from orchestrator.errors import (
    AuthenticationFailed,
    CapacityError,
    FarmError,
    InfrastructureLost,
    RedisUnavailable,
    SettingsError,
)
from orchestrator.tasks import TaskError
from orchestrator.vocabulary import Outcome


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é 漢 🙂\ttab\nline", "plain é 漢 🙂\ttab\nline"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f", "over\\x0dwritten\\x08\\x7f"),
        ("c1 \x9b2J", "c1 \\x9b2J"),
        ("turned \u202egnp.exe", "turned \\u202egnp.exe"),
        ("lone \ud800", "lone \\ud800"),
        ("nul \0", "nul \\x00"),
    ],
)
def test_nothing_that_steers_a_terminal_gets_through(raw: str, shown: str) -> None:
    assert safe(raw) == shown


def test_one_line_stays_one_line() -> None:
    assert safe("a\nb\tc", multiline=False) == "a\\nb\\tc"


def test_an_error_is_printed_as_it_is_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("[bold]no[/bold] \x1b[2J")
    assert capsys.readouterr().err == "error: [bold]no[/bold] \\x1b[2J\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), ExitCode.SETTINGS),
        (RedisUnavailable("x"), ExitCode.REDIS),
        (AuthenticationFailed("x"), ExitCode.PROVIDER),
        (CapacityError("x"), ExitCode.CAPACITY),
        (TaskError(["x"]), ExitCode.TASK),
        (InfrastructureLost(Outcome.TRANSPORT, "x"), ExitCode.ABORTED),
        (FarmError("x"), ExitCode.FAILED),
    ],
)
def test_an_error_has_its_exit_code(error: Exception, code: ExitCode) -> None:
    assert exit_code(error) is code
