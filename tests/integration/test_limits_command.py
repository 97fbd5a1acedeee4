"""`rollout-farm limits` on a real Redis: what it shows, changes and refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deploy.command_line import build
from orchestrator.errors import ConcurrencyLimited, RateLimited, SettingsError
from orchestrator.farm import Farm
from tests.support.creators import create
from tests.support.line import end, running


@pytest.fixture(autouse=True)
def _surroundings(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("COLUMNS", "200")


def shown(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(build(), ["limits", "--json", *words])
    assert done.exit_code == 0, done.output
    read: dict[str, object] = json.loads(done.output)
    return read


def text(*words: str) -> str:
    done = CliRunner().invoke(build(), ["limits", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_shows_the_settings_and_the_plans() -> None:
    seen = shown()
    assert (seen["concurrency_configured"], seen["concurrency_effective"], seen["concurrency_set_live"]) == (
        20,
        20,
        False,
    )
    assert (seen["rate_configured"], seen["rate_effective"], seen["plan"]) == (0, 0, None)
    assert seen["plans"] == {"hobby": [20, 1.0], "pro": [100, 5.0]}
    assert "20 (settings)" in text()
    assert "pro: 100 sandboxes, 5 a second" in text()


def test_what_is_set_wins_over_the_settings_until_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_PLAN", "hobby")
    assert "20 (plan hobby)" in text()
    seen = shown("--concurrency", "7", "--rate", "2.5")
    assert (seen["concurrency_configured"], seen["rate_configured"], seen["plan"]) == (7, 2.5, "hobby")
    assert "7 (set here)" in text()
    assert shown("--rate", "0.001")["rate_effective"] == 0.001
    assert shown("--rate", "0")["rate_effective"] == 0
    seen = shown("--reset")
    assert (seen["concurrency_configured"], seen["rate_configured"], seen["rate_set_live"]) == (20, 1, False)


def test_a_plan_sets_both_and_an_explicit_value_wins() -> None:
    seen = shown("--plan", "pro", "--rate", "4")
    assert (seen["concurrency_configured"], seen["rate_configured"]) == (100, 4)


def test_it_shows_who_holds_and_what_was_refused(farm: Farm) -> None:
    held = [running(farm), running(farm)]
    create(farm, held[0][0].episode_id).refused(RateLimited("slow down", 9))
    seen = shown()
    assert (seen["held"], seen["sandboxes"], seen["rate_limited"], seen["creations"]) == (2, 1, 1, 1)
    assert "all pause for" in text()
    shown("--reset")
    create(farm, held[1][0].episode_id).refused(ConcurrencyLimited("one is running"))
    assert "20 (settings), 1 in force since the provider refused more" in text()
    assert "1 for the rate, 1 for concurrency; 2 creations sent, 100.0 % refused" in text()
    end(farm, *held)


@pytest.mark.parametrize(
    "words",
    [
        ("--concurrency", "0"),
        ("--rate", "-1"),
        ("--rate", "20000"),
        ("--rate", "nan"),
        ("--rate", "1e-300"),
        ("--rate", "0.0009"),
    ],
)
def test_a_value_that_no_setting_could_have_is_refused_and_changes_nothing(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(build(), ["limits", *words])
    assert isinstance(done.exception, SettingsError)
    assert "got" in str(done.exception)
    assert not shown()["concurrency_set_live"]
    assert not shown()["rate_set_live"]


def test_an_unknown_plan_is_a_usage_error() -> None:
    done = CliRunner().invoke(build(), ["limits", "--plan", "enterprise"])
    assert done.exit_code == 2
    assert "hobby, pro" in done.output
