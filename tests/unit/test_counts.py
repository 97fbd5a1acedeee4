"""What a receipt adds to the totals, and how histograms are kept and read."""

from __future__ import annotations

from decimal import Decimal

import pytest

from orchestrator.counts import COST, PHASE, Histogram, cost_bounds, counts_of, distribution
from orchestrator.records import Operation
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import a_receipt, a_spec


def operation(name: str = "terminal", **facts: object) -> Operation:
    return Operation.model_validate({"name": name, "seconds": 0.25, **facts})


@pytest.mark.parametrize(
    ("step", "outcome", "result"),
    [
        (operation(exit_code=0), Outcome.SOLVED, "ok"),
        (operation(exit_code=3), Outcome.SOLVED, "failed"),
        (operation(timed_out=True), Outcome.SOLVED, "timed_out"),
        (operation(ok=False), Outcome.SANDBOX_LOST, "lost"),
        (operation("submit"), Outcome.SOLVED, "ok"),
        (operation("submit", ok=False), Outcome.ARTIFACT_MISSING, "failed"),
        (operation("submit", ok=False), Outcome.TRANSPORT, "lost"),
    ],
)
def test_a_call_is_counted_by_how_it_went(step: Operation, outcome: Outcome, result: str) -> None:
    counts = counts_of(a_receipt(a_spec(), outcome, operations=(step,)))
    assert {name for name in counts if name.startswith("tool_calls:")} == {f"tool_calls:{step.name}:{result}"}


def test_other_operations_are_no_tool_calls() -> None:
    counts = counts_of(a_receipt(a_spec(), operations=(operation("reset"), operation("health"))))
    assert counts == {}


def test_sums_lose_nothing() -> None:
    counts: dict[str, int] = {}
    for _ in range(10):
        for name, count in counts_of(a_receipt(a_spec(), phases={"setup": 0.1, "policy": 0.000001})).items():
            counts[name] = counts.get(name, 0) + count
    stored = {name: str(count) for name, count in counts.items()}
    assert distribution(stored, PHASE, "setup").sum == Decimal(1)
    assert distribution(stored, PHASE, "policy").sum == Decimal("0.00001")


def test_a_histogram_is_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram("h", ("0.1", "1"), 10)
    assert [histogram.under(amount) for amount in (0, 1, 2, 10, 11)] == ["0.1", "0.1", "1", "1", "+Inf"]
    found = distribution({"h:le:0.1": "2", "h:le:1": "3", "h:le:+Inf": "4", "h:sum": "57"}, histogram)
    assert found.buckets == (("0.1", 2), ("1", 5), ("+Inf", 9))
    assert found.sum == Decimal("5.7")


def test_counts_under_bounds_of_before_stay_right() -> None:
    found = distribution({"h:le:0.5": "2", "h:le:2": "1", "h:sum": "0"}, Histogram("h", ("1", "5"), 10))
    assert found.buckets == (("1", 2), ("5", 3), ("+Inf", 3))


def test_one_label_is_not_read_as_another() -> None:
    stored = {"phase:setup:le:1": "1", "phase:setup:sum": "5", "phase_other:le:1": "9"}
    assert distribution(stored, PHASE, "set").buckets[-1] == ("+Inf", 0)


def test_the_scripts_get_whole_pico_dollars() -> None:
    assert cost_bounds()[0] == ["0.0001", 100_000_000]
    assert [bound for bound, _ in cost_bounds()] == list(COST.bounds)
