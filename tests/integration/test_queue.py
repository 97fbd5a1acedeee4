"""Jobs as they really lie in Redis: JSON, one function, no repetition; and what of a hostile job gives it away."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, cast

import pytest
from redis import Redis
from rq import Callback, Queue, Repeat, Retry
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from orchestrator.connection import client
from orchestrator.farm import Farm
from orchestrator.queue import EXECUTABLE_EXTRAS, JOB_FUNCTION, JobQueue, refusal
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import job_id
from tests.support.bare_farm import a_spec, farm_settings, leased


@pytest.fixture
def raw(redis_url: str) -> Iterator[Redis]:
    """A byte connection, as a slot has."""
    with client(farm_settings(redis_url), text=False) as connection:
        yield connection


def fields_of(raw: Redis, job: str) -> dict[str, Any]:
    fields = cast("dict[bytes, bytes]", raw.hgetall(Job.key_for(job)))
    return {name.decode(): value for name, value in fields.items()}


def test_a_job_is_json_and_names_one_function_and_nothing_else(farm: Farm, raw: Redis) -> None:
    spec = a_spec()
    farm.queue.enqueue(spec)
    fields = fields_of(raw, job_id(spec.episode_id, 1))
    function, instance, args, kwargs = json.loads(zlib.decompress(fields["data"]))
    assert (function, instance, kwargs) == (JOB_FUNCTION, None, {})
    assert EpisodeSpec.model_validate(args[0]) == spec
    assert args[1] == 1
    assert not [name for name in EXECUTABLE_EXTRAS if fields.get(name)]
    assert refusal(fields, function) is None


def test_a_job_has_time_for_admission_deadline_and_cleanup(farm: Farm, raw: Redis) -> None:
    spec = a_spec()
    farm.queue.enqueue(spec)
    budgets = spec.budgets
    assert budgets.reserved_admission_seconds != budgets.admission_seconds
    needed = max(budgets.admission_seconds, budgets.reserved_admission_seconds)
    needed += budgets.deadline_seconds + budgets.cleanup_seconds
    assert int(fields_of(raw, job_id(spec.episode_id, 1))["timeout"]) > needed


def test_enqueueing_twice_is_one_job(farm: Farm, raw: Redis) -> None:
    spec = a_spec()
    for _ in range(3):
        farm.queue.enqueue(spec)
    assert farm.queue.depth() == 1
    raw.lpop(farm.queue.rq.key)
    farm.queue.enqueue(spec)
    assert farm.queue.depth() == 0, "somebody has taken it: it is not put back"
    farm.queue.forget(job_id(spec.episode_id, 1))


def test_attempts_are_jobs_of_their_own(farm: Farm) -> None:
    spec = a_spec()
    farm.queue.enqueue(spec, 1)
    farm.queue.enqueue(spec, 2)
    assert farm.queue.waiting() == {job_id(spec.episode_id, 1), job_id(spec.episode_id, 2)}


def test_reserved_jobs_go_to_the_front(farm: Farm) -> None:
    first, second, reserved = a_spec(), a_spec(), a_spec(reservation_id="reservation-1")
    for spec in (first, second, reserved):
        farm.queue.enqueue(spec)
    order = [job_id(spec.episode_id, 1) for spec in (reserved, first, second)]
    assert farm.queue.rq.get_job_ids() == order


def test_a_reserved_job_that_stepped_back_goes_to_the_end(farm: Farm) -> None:
    """In front it would be taken and given back again and again, before all those that could run."""
    other, stepped_back = a_spec(), a_spec(reservation_id="reservation-over")
    farm.queue.enqueue(other)
    _, lease = leased(farm, stepped_back)
    assert farm.ledger.defer(lease)
    farm.queue.enqueue(stepped_back, 2)
    assert farm.queue.rq.get_job_ids() == [job_id(other.episode_id, 1), job_id(stepped_back.episode_id, 2)]


def test_waiting_names_what_lies_in_the_queue(farm: Farm, raw: Redis) -> None:
    spec = a_spec()
    assert farm.queue.waiting() == set()
    farm.queue.enqueue(spec)
    assert farm.queue.waiting() == {job_id(spec.episode_id, 1)}
    raw.lpop(farm.queue.rq.key)
    assert farm.queue.waiting() == set()
    farm.queue.forget(job_id(spec.episode_id, 1))


def test_a_lost_job_can_be_enqueued_again(farm: Farm) -> None:
    spec = a_spec()
    farm.queue.enqueue(spec)
    farm.queue.withdraw(job_id(spec.episode_id, 1), lost=True)
    assert farm.queue.depth() == 0
    farm.queue.enqueue(spec)
    assert farm.queue.depth() == 1


def test_a_withdrawn_job_that_was_popped_is_forgotten_some_time(farm: Farm, raw: Redis) -> None:
    """Whoever popped it may be dead, and then nobody else tidies it up."""
    spec = a_spec()
    farm.queue.enqueue(spec)
    raw.lpop(farm.queue.rq.key)
    farm.queue.withdraw(job_id(spec.episode_id, 1))
    assert 0 < raw.ttl(Job.key_for(job_id(spec.episode_id, 1))) <= 600


def test_farms_with_other_queue_names_do_not_share_jobs(farm: Farm, raw: Redis) -> None:
    farm.queue.enqueue(a_spec())
    assert JobQueue(raw, "others").depth() == 0


HOSTILE: dict[str, dict[str, Any]] = {
    "success callback": {"on_success": Callback("os.system")},
    "failure callback": {"on_failure": Callback("os.system")},
    "stopped callback": {"on_stopped": Callback("os.system")},
    "retries": {"retry": Retry(max=3)},
    "repeats": {"repeat": Repeat(times=2)},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_rq_itself_writes_for_an_extra_is_refused(raw: Redis, kind: str) -> None:
    queue = Queue("episodes", connection=raw, serializer=JSONSerializer)
    job = queue.enqueue(JOB_FUNCTION, args=({}, 1), **HOSTILE[kind])
    assert refusal(fields_of(raw, job.id), JOB_FUNCTION) is not None


def test_webhooks_as_rq_writes_them_are_refused(raw: Redis) -> None:
    queue = Queue("episodes", connection=raw, serializer=JSONSerializer)
    job = queue.enqueue(JOB_FUNCTION, args=({}, 1), webhooks=[Webhook("http://127.0.0.1:9/", "finished")])
    assert refusal(fields_of(raw, job.id), JOB_FUNCTION) is not None
