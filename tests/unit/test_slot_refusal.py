"""Which jobs a slot refuses, by the fields of their hash alone."""

from __future__ import annotations

import pytest

from orchestrator.queue import EXECUTABLE_EXTRAS, JOB_FUNCTION, refusal


def test_our_function_alone_is_accepted() -> None:
    assert refusal({"instance": None, "data": b"x", "timeout": b"10"}, JOB_FUNCTION) is None


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "os.system",
        "workers.jobs",
        "workers.jobs.os.system",
        "workers.jobs.run_episode.__call__",
        "workers.jobs.run_episode ",
        "Workers.jobs.run_episode",
        "workers.jobs.bind",
    ],
)
def test_any_other_name_is_refused_whatever_it_begins_with(name: str | None) -> None:
    reason = refusal({}, name)
    assert reason is not None
    assert JOB_FUNCTION in reason


@pytest.mark.parametrize("extra", EXECUTABLE_EXTRAS)
def test_our_function_with_anything_else_to_execute_is_refused(extra: str) -> None:
    reason = refusal({extra: b"1"}, JOB_FUNCTION)
    assert reason is not None
    assert extra in reason


@pytest.mark.parametrize("extra", EXECUTABLE_EXTRAS)
def test_an_empty_field_is_nothing_to_execute(extra: str) -> None:
    assert refusal({extra: b""}, JOB_FUNCTION) is None


def test_every_field_by_which_rq_runs_more_is_known() -> None:
    assert {"instance", "success_callback_name", "failure_callback_name", "stopped_callback_name"} <= set(
        EXECUTABLE_EXTRAS
    )
    assert {"webhooks", "repeats_left", "retries_left"} <= set(EXECUTABLE_EXTRAS)
