"""What a worker refuses to run: everything but one function, by its whole name, with nothing else to execute."""

from __future__ import annotations

import pytest

from orchestrator.queue import EXECUTABLE_EXTRAS, JOB_FUNCTION, refusal


def test_an_episode_is_not_refused() -> None:
    assert refusal({"status": b"queued", "timeout": b"100"}, JOB_FUNCTION) is None


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "workers.jobs.os.system",
        "workers.jobs.run_episode.__call__",
        "workers.jobs.run_episode.__globals__",
        "workers.jobs.bind",
        "workers.jobs.run_episode ",
        " workers.jobs.run_episode",
        "Workers.jobs.run_episode",
        "workers.jobs",
        "run_episode",
        "",
        None,
    ],
)
def test_any_other_function_is_refused(name: str | None) -> None:
    reason = refusal({}, name)
    assert reason is not None
    assert JOB_FUNCTION in reason


@pytest.mark.parametrize("name", EXECUTABLE_EXTRAS)
def test_anything_else_that_rq_would_execute_is_refused(name: str) -> None:
    reason = refusal({name: b"os.system"}, JOB_FUNCTION)
    assert reason is not None
    assert name in reason


@pytest.mark.parametrize("name", ["retries_left", "repeats_left"])
def test_repetition_is_refused_however_it_is_written(name: str) -> None:
    for value in (b"1", b"0", 1, "1"):
        assert refusal({name: value}, JOB_FUNCTION) is not None
