"""What a worker refuses to run: everything but one function, by its whole name, with nothing else to execute."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap

import pytest
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from orchestrator.queue import EXECUTABLE_EXTRAS, JOB_FUNCTION, refusal

_HARMLESS = {
    "data",  # what is called and with what, see below
    *("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat"),
    *("status", "origin", "worker_name", "description", "meta", "result", "exc_info"),
    *("timeout", "ttl", "result_ttl", "failure_ttl"),
    # nothing without the name, or the number left, that they go with
    *("success_callback_timeout", "failure_callback_timeout", "stopped_callback_timeout"),
    *("number_of_retries", "retry_intervals", "enqueue_at_front_on_retry", "repeat_intervals"),
    # about other jobs, each of which is refused or not by itself, and about the order of all
    *("dependency_id", "dependency_ids", "allow_dependency_failures", "group_id", "enqueue_at_front"),
    *("rate_limit_key", "rate_limit_concurrency"),
}
"""What RQ reads of a job's hash and does not execute."""


def test_an_episode_is_not_refused() -> None:
    assert refusal({"instance": None, "status": b"queued", "timeout": b"100"}, JOB_FUNCTION) is None


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


@pytest.mark.parametrize("name", EXECUTABLE_EXTRAS)
def test_an_empty_field_is_nothing_to_execute(name: str) -> None:
    assert refusal({name: b""}, JOB_FUNCTION) is None


def test_every_field_that_rq_reads_of_a_job_is_known_to_be_harmless_or_refused() -> None:
    assert _read_by_rq() == _HARMLESS | set(EXECUTABLE_EXTRAS) - {"instance"}, "decide on what RQ's release has changed"


def test_a_jobs_data_names_a_function_an_instance_and_arguments_and_nothing_else() -> None:
    job = Job.create(JOB_FUNCTION, args=["spec", 1], connection=Redis(), serializer=JSONSerializer)
    assert json.loads(job.data) == [JOB_FUNCTION, None, ["spec", 1], {}]


def _read_by_rq() -> set[str]:
    """What Job.restore looks up in the hash, its `obj`: by obj[name], obj.get(name) or name in obj."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Job.restore)))):
        match node:
            case (
                ast.Subscript(ast.Name("obj"), ast.Constant(str(name)))
                | ast.Call(ast.Attribute(ast.Name("obj"), "get"), [ast.Constant(str(name)), *_])
                | ast.Compare(ast.Constant(str(name)), [ast.In()], [ast.Name("obj")])
            ):
                names.add(name)
            case _:
                pass
    return names
