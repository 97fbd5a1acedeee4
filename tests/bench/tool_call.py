"""A tool call from the trainer through Redis against the same call straight to the worker's Terminus server.

Both go to the same worker: the episode holds one of its two places, our own session the other. The calls alternate, so
that whatever else this machine does meets both alike; the cost is the median of the pairs' differences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles

import workers.terminus  # noqa: F401 - blocks gradio before the client imports openenv
from orchestrator.farm import open_farm
from orchestrator.pool import Pool
from orchestrator.provider import CreateRequest
from orchestrator.settings import Budgets
from orchestrator.tasks import load_builtin
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import farm_of, milliseconds
from workers.terminus.client import TerminusSession

_PAIRS = 400
_WARM_UP = 20
_BUDGETS = Budgets(policy_window_seconds=300, deadline_seconds=600)


def tool_call(count: int = _PAIRS, warm_up: int = _WARM_UP) -> list[Row]:
    """Rows of alternating calls."""
    with farm_of(1) as farm, Pool(farm.settings) as pool:
        url = open_farm(farm.settings).presence.workers()[0].terminus_url
        session = TerminusSession(url, _BUDGETS)
        try:
            session.reset(CreateRequest("bench-direct", "base", 300, allow_internet_access=False))
            with pool.submit(load_builtin("weekly-sales"), budgets=_BUDGETS) as episode:
                episode.reset()
                pairs = [
                    _pair(lambda: episode.terminal("true"), lambda: session.terminal("true"), number)
                    for number in range(warm_up + count)
                ][warm_up:]
        finally:
            session.close()
    farm_ms = milliseconds([through for through, _ in pairs])
    direct_ms = milliseconds([direct for _, direct in pairs])
    more = [through - direct for through, direct in zip(farm_ms, direct_ms, strict=True)]
    return [
        Row(
            "tool call through Redis, more than direct, p50",
            median(more),
            "ms",
            Goal("<=", 1.5),
            f"Episode.terminal('true') minus TerminusSession.terminal('true'), alternating; {spread(more)}",
        ),
        Row("tool call through Redis, p50", median(farm_ms), "ms", None, spread(farm_ms)),
        Row("tool call straight to the server, p50", median(direct_ms), "ms", None, spread(direct_ms)),
        Row(
            "more than direct, in quiet moments",
            _tenth(farm_ms) - _tenth(direct_ms),
            "ms",
            None,
            "difference of the two 10th percentiles, which other load on this machine hardly touches",
        ),
        Row("through Redis over direct", median(farm_ms) / median(direct_ms), "x", None, "the two medians"),
    ]


def _pair(first: Callable[[], object], second: Callable[[], object], number: int) -> tuple[float, float]:
    """Seconds of both, in alternating order."""
    if number % 2:
        late = _seconds(second)
        return _seconds(first), late
    early = _seconds(first)
    return early, _seconds(second)


def _tenth(values: list[float]) -> float:
    return quantiles(values, n=10)[0]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
