"""`rollout-farm budget`, `Pool(budget_usd=)` and `run --budget`: how a limit is set, shown and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from deploy.command_line import build
from deploy.exit_codes import ExitCode
from orchestrator.errors import FarmError, SettingsError
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import TASK, TinySlot, a_receipt, admit, leased


@pytest.fixture(autouse=True)
def _surroundings(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("COLUMNS", "200")


def shown(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(build(), ["budget", "--json", *words])
    assert done.exit_code == 0, done.output
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def test_there_is_no_limit_until_one_is_set_and_after_it_is_cleared() -> None:
    untouched = {"run_id": None, "limit_usd": None, "spent_usd": "0", "reserved_usd": "0", "left_usd": None}
    assert shown() == untouched
    assert shown("--set", "2.50") == {**untouched, "limit_usd": "2.5", "left_usd": "2.5"}
    assert shown("--farm")["limit_usd"] == "2.5"
    assert shown("--clear") == untouched


def test_a_runs_budget_is_its_own_and_can_be_set_before_it_begins(farm: Farm) -> None:
    assert shown("--run", "run-test", "--set", "1")["limit_usd"] == "1"
    assert shown()["limit_usd"] is None
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    read = shown("--run", "run-test")
    assert (read["reserved_usd"], read["left_usd"]) == ("0.02211275", "0.97788725")
    text = CliRunner().invoke(build(), ["budget", "--run", "run-test"]).output
    assert text == "run run-test: 0.000000 USD spent, 0.022113 reserved, 0.977887 left of 1\n"
    farm.ledger.commit(a_receipt(spec), lease.token)


@pytest.mark.parametrize(
    "words", [("--set", "much"), ("--set", "-1"), ("--set", "1", "--clear"), ("--farm", "--run", "run-a")]
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(build(), ["budget", *words])
    assert isinstance(done.exception, SettingsError)
    assert shown()["limit_usd"] is None


NO_IDS = ["", "a b:*", "\x1b[31m", "x" * 5000, "Run-1", "run-1\n"]


@pytest.mark.parametrize("run", NO_IDS)
def test_what_no_run_can_be_called_is_refused_and_caps_nothing(farm: Farm, redis: Redis, run: str) -> None:
    done = CliRunner().invoke(build(), ["budget", "--run", run, "--set", "1"])
    assert done.exit_code == ExitCode.USAGE
    assert "--run" in done.output
    assert "a-z, 0-9" in done.output
    assert "\x1b" not in done.output
    assert len(done.output) < 1000
    assert list(redis.scan_iter(Keys.BUDGET + "*")) == []


@pytest.mark.parametrize("option", ["--run", "--group"])
@pytest.mark.parametrize("command", ["cancel", "cost", "receipts"])
def test_every_command_refuses_what_no_run_or_group_can_be_called(command: str, option: str) -> None:
    done = CliRunner().invoke(build(), [command, option, ""])
    assert (done.exit_code, option in done.output) == (ExitCode.USAGE, True)


def test_a_limit_for_a_run_that_has_not_begun_is_set_and_says_so(farm: Farm) -> None:
    done = CliRunner().invoke(build(), ["budget", "--run", "run-next", "--set", "1"])
    assert done.exit_code == 0
    assert "no such run yet" in done.stderr
    assert "no such run yet" not in done.stdout
    spec, lease = leased(farm)
    begun = CliRunner().invoke(build(), ["budget", "--run", spec.run_id, "--set", "1"])
    assert (begun.exit_code, begun.stderr) == (0, "")
    farm.ledger.commit(a_receipt(spec), lease.token)


def test_an_unknown_run_is_an_error_that_says_what_to_do(farm: Farm) -> None:
    done = CliRunner().invoke(build(), ["budget", "--run", "run-none"])
    assert isinstance(done.exception, FarmError)
    assert "rollout-farm cost --by run" in str(done.exception)


def test_a_pools_budget_stops_its_run_and_no_other(settings: Settings, slot: TinySlot) -> None:
    with Pool(settings, run_id="run-poor", budget_usd="0.01") as pool, Pool(settings, run_id="run-rich") as rich:
        poor = pool.submit(TASK)
        with rich.submit(TASK) as other:
            assert poor.wait(20).outcome is Outcome.BUDGET_EXHAUSTED
            other.reset()
            other.submit()
        assert pool.balance().limit_picousd == 10**10
        assert rich.balance().limit_picousd is None
        pool.redis.close()
        rich.redis.close()


def test_the_same_run_goes_on_under_its_limit_unless_another_is_given(settings: Settings) -> None:
    for budget, limit in ((1, 10**12), (None, 10**12), (2, 2 * 10**12)):
        with Pool(settings, run_id="run-again", budget_usd=budget) as pool:
            assert pool.balance().limit_picousd == limit
            pool.redis.close()


def test_run_refuses_an_amount_that_is_none_before_it_starts_anything() -> None:
    done = CliRunner().invoke(build(), ["run", "weekly-sales", "--budget", "lots"])
    assert isinstance(done.exception, SettingsError)
    assert "--budget" in str(done.exception)
