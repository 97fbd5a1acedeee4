"""What the farm itself adds to an episode: everything between enqueueing and receipt but the calls to the provider.

The worker is an ordinary one whose provider notes its calls, in the horse and in the Terminus server. They never
overlap within an episode, so what remains after taking the union of them away is queue, fork, leases, rows, Redis,
WebSocket, JSON and grading. The first call of each horse also starts the SDK: that is shown apart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from deploy.commands.resolve import provider_of
from orchestrator.pool import Pool
from orchestrator.provider import CreateRequest
from orchestrator.records import Script, SettledReceipt
from orchestrator.tasks import Task, load_builtin
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import farm_of, milliseconds, one_more_worker
from tests.bench.timed_provider import Call, CallLog

_EPISODES = 20
_WARM_UP = 2
_REST_SECONDS = 0.4
"""Between two episodes, so that the next finds an idle slot: RQ tidies up after each job."""
_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class _Timed:
    """One episode: when it was submitted, when its receipt was seen, and the calls in between; unix seconds."""

    submitted: float
    seen: float
    settled: SettledReceipt
    calls: Sequence[Call]

    @property
    def overhead(self) -> float:
        return self.seen - self.submitted - self.inside

    @property
    def inside(self) -> float:
        return union_seconds([(call.began, call.ended) for call in self.calls])

    @property
    def to_lease(self) -> float:
        return (self.settled.receipt.started_at or self.seen) - self.submitted

    @property
    def to_first_call(self) -> float:
        return self.calls[0].began - (self.settled.receipt.started_at or self.seen)

    @property
    def after_last_call(self) -> float:
        return self.seen - self.calls[-1].ended


def episode_overhead(episodes: int = _EPISODES, warm_up: int = _WARM_UP) -> list[Row]:
    """Rows of one repair episode after another on an idle worker."""
    task = load_builtin("weekly-sales")
    with farm_of(0) as farm:
        log = CallLog(farm.settings.state_dir / "calls.jsonl")
        with (
            one_more_worker(farm, "tests.bench.timed_worker", str(farm.settings.state_dir / "calls.jsonl")),
            Pool(farm.settings) as pool,
        ):
            done = [_one(pool, task, log) for _ in range(warm_up + episodes)][warm_up:]
        provider = provider_of(farm.settings)
        sandbox_id = provider.create(CreateRequest("bench-warm", "base", 60, allow_internet_access=False)).sandbox_id
        warm = [_attach_seconds(provider.attach, sandbox_id) for _ in range(20)][1:]
        provider.delete(sandbox_id)
    cold = [call.seconds for timed in done for call in timed.calls if call.name == "attach"]
    return [
        *_rows(done),
        _part("of those calls: first of a fresh process", cold, "attach, in the horse: it starts the SDK"),
        _part("the same call in a process that made one before", warm, "attach, in this process"),
    ]


def union_seconds(stretches: Sequence[tuple[float, float]]) -> float:
    """The length of what the stretches cover together."""
    covered, reached = 0.0, float("-inf")
    for began, ended in sorted(stretches):
        covered += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return covered


def _one(pool: Pool, task: Task, log: CallLog) -> _Timed:
    time.sleep(_REST_SECONDS)
    submitted = time.time()
    episode = pool.submit(task, policy=Script(name="repair", commands=task.scripts["repair"]))
    settled = next(pool.as_completed([episode], timeout_seconds=_WAIT_SECONDS))
    seen = time.time()
    if settled.receipt.reward != 1.0:
        raise RuntimeError(f"the episode ended {settled.receipt.outcome}: {settled.receipt.detail}")
    calls = [call for call in log.calls() if submitted <= call.began and call.ended <= seen and call.name != "list"]
    return _Timed(submitted, seen, settled, calls)


def _attach_seconds(attach: object, sandbox_id: str) -> float:
    began = time.perf_counter()
    assert callable(attach)
    attach(sandbox_id, lifetime_seconds=60)
    return time.perf_counter() - began


def _rows(done: Sequence[_Timed]) -> list[Row]:
    overhead = milliseconds([timed.overhead for timed in done])
    between = [timed.overhead - timed.to_lease - timed.to_first_call - timed.after_last_call for timed in done]
    calls = len(done[0].calls)
    return [
        Row(
            "episode overhead beyond sandbox time, p50",
            median(overhead),
            "ms",
            Goal("<=", 40),
            f"submit to receipt minus the {calls} calls to the provider, idle slot; {spread(overhead)}",
        ),
        Row("episode overhead in quiet moments", quantiles(overhead, n=10)[0], "ms", None, "its 10th percentile"),
        _part("of it: submit to lease", [timed.to_lease for timed in done], "row, enqueue, RQ, fork"),
        _part("of it: lease to first provider call", [timed.to_first_call for timed in done], "admission, session"),
        _part("of it: between provider calls", between, "rows, WebSocket, JSON, grading"),
        _part("of it: last call to receipt seen", [timed.after_last_call for timed in done], "commit, stream"),
        _part("inside provider calls", [timed.inside for timed in done], f"{calls} calls: two sandboxes"),
    ]


def _part(name: str, seconds: Sequence[float], what: str) -> Row:
    values = milliseconds(seconds)
    return Row(name, median(values), "ms", None, f"{what}; {spread(values)}")
