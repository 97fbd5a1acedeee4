"""Faults as data, and the verdicts that follow from them: no service, no clock."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.e2b_local.faults import Faults, Latency, Often, Operation, explain
from workers.e2b_local.verdicts import Call, Ending, Plan, Refusal

CREATE = Call(Operation.CREATE, {})


def plan(**faults: Any) -> Plan:
    return Plan(Faults.model_validate(faults))


def test_by_default_nothing_is_wrong() -> None:
    assert Faults().shown() == {}
    judged = [plan().judge(Call(operation, {}), 0.0) for operation in Operation]
    assert all(verdict == plan().judge(CREATE, 0.0) for verdict in judged)
    assert judged[0].refusal is None
    assert judged[0].ending is Ending.WHOLE


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (3, Often(count=3)),
        ("3", Often(count=3)),
        ("25%", Often(probability=0.25)),
        ("always", Often(probability=1)),
        (True, Often(probability=1)),
        ("never", Often()),
        (0, Often()),
        ({"count": 2, "probability": 0.5}, Often(count=2, probability=0.5)),
    ],
)
def test_how_often_is_understood_and_written_so_that_it_is_understood_again(text: Any, meant: Often) -> None:
    assert Often.model_validate(text) == meant
    assert Often.model_validate(meant.model_dump()) == meant


@pytest.mark.parametrize("text", ["constant:0.5", "uniform:0.1:0.5", "exponential:0.2", "lognormal:0.2:0.6"])
def test_a_latency_is_written_as_it_was_read(text: str) -> None:
    assert json.loads(Latency.model_validate(text).model_dump_json()) == text


def test_what_is_shown_can_be_set_again() -> None:
    faults = Faults.model_validate(
        {
            "seed": "7",
            "only": {"role": "verifier"},
            "create_rate": "2.5",
            "retry_after": "false",
            "rate_limited": "4",
            "latency": {"create": "uniform:0:1"},
            "lost": {"delete": "10%"},
            "stream_cut": {"count": 1, "probability": 0.5},
        }
    )
    assert Faults.model_validate(faults.shown()) == faults


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"create_rte": 1}, "create_rte: there is no such fault; there are seed, only, create_rate"),
        ({"create_rate": -1}, "create_rate: "),
        ({"create_rate": "nan"}, "create_rate: "),
        ({"rate_limited": "often"}, 'rate_limited: expected a count such as 3, a share such as "25%"'),
        ({"rate_limited": "150%"}, "rate_limited.probability: "),
        ({"latency": {"create": "gamma:1"}}, "latency.create.distribution: Input should be 'constant'"),
        ({"latency": {"create": "uniform:1"}}, 'latency.create: expected "constant:SECONDS"'),
        ({"latency": {"create": "uniform:2:1"}}, "latency.create: uniform:FROM:TO needs FROM <= TO"),
        ({"lost": {"destroy": 1}}, "lost.destroy: "),
        ({"outage_seconds": 601}, "outage_seconds: "),
    ],
)
def test_a_wrong_fault_is_named_with_what_it_takes(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Faults.model_validate(wrong)
    assert explain(caught.value.errors()[0]).startswith(told)


@pytest.mark.parametrize(
    ("text", "mean"), [("constant:2", 2.0), ("uniform:1:3", 2.0), ("exponential:2", 2.0), ("lognormal:2:0", 2.0)]
)
def test_a_latency_has_its_mean(text: str, mean: float) -> None:
    random = Random(1)
    drawn = [Latency.model_validate(text).draw(random) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)


def test_no_latency_lasts_for_ever() -> None:
    random = Random(1)
    wild = Latency.model_validate("lognormal:30:3")
    assert max(wild.draw(random) for _ in range(200)) == 60


def test_the_same_calls_meet_the_same_faults() -> None:
    faults = {"seed": 3, "lost": {"create": "50%"}, "latency": {"create": "exponential:1"}}
    first, second = ([made.judge(CREATE, 0.0) for _ in range(20)] for made in (plan(**faults), plan(**faults)))
    assert first == second
    assert first != [plan(**{**faults, "seed": 4}).judge(CREATE, 0.0) for _ in range(20)]


def test_a_count_is_used_up() -> None:
    made = plan(lost={"create": 2})
    assert [made.judge(CREATE, 0.0).ending for _ in range(3)] == [Ending.LOST, Ending.LOST, Ending.WHOLE]
    assert made.hits == {"lost.create": 2}


def test_only_what_is_meant_meets_faults() -> None:
    made = plan(only={"role": "verifier"}, lost={"create": "always", "list": "always"}, dies_after_seconds=1)
    assert made.judge(Call(Operation.CREATE, {"role": "policy"}), 0.0).ending is Ending.WHOLE
    assert made.judge(Call(Operation.CREATE, {"role": "verifier", "farm": "x"}), 0.0).ending is Ending.LOST
    assert made.judge(Call(Operation.LIST), 0.0).ending is Ending.LOST
    assert made.life_seconds({"role": "policy"}) is None
    assert made.life_seconds({"role": "verifier"}) == 1


@given(
    rate=st.floats(0.5, 50),
    burst=st.integers(1, 5),
    gaps=st.lists(st.floats(0, 1), min_size=1, max_size=60),
)
def test_never_more_creations_than_rate_and_burst_allow(rate: float, burst: int, gaps: list[float]) -> None:
    made = plan(create_rate=rate, create_burst=burst)
    now, accepted = 0.0, list[float]()
    for gap in gaps:
        now += gap
        refusal = made.judge(CREATE, now).refusal
        if refusal is None:
            accepted.append(now)
        else:
            assert refusal.status == 429
            assert refusal.retry_after_seconds is not None
            assert refusal.retry_after_seconds >= 1
    for first in range(len(accepted)):
        for last in range(first, len(accepted)):
            assert last - first + 1 <= burst + (accepted[last] - accepted[first]) * rate + 1e-6


def test_a_refused_creation_uses_nothing_up_and_may_come_back_when_told() -> None:
    made = plan(create_rate=0.25)
    assert made.judge(CREATE, 0.0).refusal is None
    refusals = [made.judge(CREATE, now).refusal for now in (1.0, 2.0, 3.5)]
    assert [refusal.retry_after_seconds for refusal in refusals if refusal] == [3, 2, 1]
    assert made.judge(CREATE, 4.0).refusal is None


def test_a_deletion_fails_for_its_time_and_then_succeeds() -> None:
    made = plan(undeletable_seconds=5)
    assert isinstance(made.deletion("a", {}, 10.0), Refusal)
    assert isinstance(made.deletion("a", {}, 14.9), Refusal)
    assert made.deletion("a", {}, 15.0) == 0
    assert isinstance(made.deletion("b", {}, 15.0), Refusal)


def test_a_sandbox_dies_of_its_last_command_only() -> None:
    made = plan(dies_after_commands=2)
    assert [made.kills("a", {}) for _ in range(3)] == [False, True, False]
    assert not made.kills("b", {})
