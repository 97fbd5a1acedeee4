"""`rollout-farm sandboxes faults`, against a running service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_embedded_cli import run
from tests.support.e2b_local import API_KEY, LocalService
from tests.support.faults import ServiceFaults

pytest_plugins = ["tests.support.e2b_local"]


@pytest.fixture
def reached(service: LocalService) -> Iterator[dict[str, str]]:
    """The settings of a user of this module's service; its faults are cleared afterwards."""
    yield {"FARM_E2B_API_URL": service.url, "E2B_API_KEY": API_KEY}
    ServiceFaults(service.url, API_KEY).clear()


def test_faults_are_set_by_words_shown_and_cleared(tmp_path: Path, reached: dict[str, str]) -> None:
    words = ("create_rate=5", "latency.create=uniform:0.1:0.5", "only.role=verifier", "retry_after=false")
    done = run(tmp_path, "sandboxes", "faults", "set", *words, **reached)
    expected = {
        "create_rate": 5.0,
        "latency": {"create": "uniform:0.1:0.5"},
        "only": {"role": "verifier"},
        "retry_after": False,
    }
    assert (done.returncode, json.loads(done.stdout)["faults"]) == (0, expected), done.stderr
    shown = run(tmp_path, "sandboxes", "faults", "show", **reached)
    assert json.loads(shown.stdout) == {"faults": expected, "hits": {}}
    cleared = run(tmp_path, "sandboxes", "faults", "clear", **reached)
    assert (cleared.returncode, json.loads(cleared.stdout)) == (0, {"faults": {}, "hits": {}})


def test_faults_are_set_by_json_at_an_url(tmp_path: Path, service: LocalService, reached: dict[str, str]) -> None:
    text = json.dumps({"unavailable": {"delete": "25%"}, "seed": 7})
    del reached["FARM_E2B_API_URL"]
    done = run(tmp_path, "sandboxes", "faults", "set", text, "--url", service.url, **reached)
    assert json.loads(done.stdout)["faults"] == json.loads(text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create_rte=5",), "create_rte: there is no such fault"),
        (("create_rate",), "say NAME=VALUE"),
        (("lost=3",), "lost: say of which operation, such as lost.create=3"),
        (("latency=constant:1",), "latency: say of which operation, such as latency.create=constant:1"),
        (("only=policy",), "only: say of which metadata, such as only.role=policy"),
        (("lost.create=x",), "lost.create: expected a count such as 3"),
        (("{oops",), "not one JSON object"),
        (("{}", "{}"), "not one JSON object"),
    ],
)
def test_a_wrong_fault_is_a_usage_error_that_names_it(
    tmp_path: Path, reached: dict[str, str], words: tuple[str, ...], told: str
) -> None:
    done = run(tmp_path, "sandboxes", "faults", "set", *words, **{**reached, "COLUMNS": "400"})
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"FARM_E2B_API_URL": "http://127.0.0.1:1"}, 5, "nothing answers at http://127.0.0.1:1"),
        ({"E2B_API_KEY": "wrong"}, 5, "refuses the key"),
        ({"FARM_E2B_API_URL": ""}, 3, "no local sandbox service is known"),
        ({"E2B_API_KEY": None}, 3, "E2B_API_KEY is not set"),
    ],
)
def test_a_service_out_of_reach_is_one_line_that_says_what_to_do(
    tmp_path: Path, reached: dict[str, str], changes: dict[str, str | None], code: int, told: str
) -> None:
    given = {name: value for name, value in {**reached, **changes}.items() if value is not None}
    done = run(tmp_path, "sandboxes", "faults", "show", **given)
    assert done.returncode == code
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
