"""What crosses Redis is checked on both sides."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.records import EpisodeSpec, Receipt, Script, SettledReceipt
from orchestrator.vocabulary import Drive, Outcome, Role, allocation_id
from tests.support.bare_farm import a_receipt, a_spec


def test_a_spec_comes_back_from_json_as_it_was() -> None:
    spec = a_spec(group_id="g-1", reservation_id="r-1")
    assert EpisodeSpec.model_validate_json(spec.model_dump_json()) == spec
    assert EpisodeSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"episode_id": "E-1"},
        {"episode_id": "e" * 49},
        {"episode_id": ""},
        {"episode_id": "e-1\n"},
        {"run_id": "run:1"},
        {"run_id": "r" * 65},
        {"trainer_id": "t 1"},
        {"schema_version": 2},
        {"policy": None},
        {"drive": Drive.REMOTE},
        {"surprise": 1},
    ],
)
def test_a_wrong_spec_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        a_spec(**changes)


def test_no_error_of_a_job_from_another_version_tells_what_is_expected() -> None:
    """RQ writes such an error into its log and keeps it with the job."""
    job = a_spec().model_dump(mode="json")
    job["task"]["expected"] = {"north": "s3cr3t"}
    for broken in (
        {**job, "surprise": job["task"]},
        {**job, "task": {**job["task"], "surprise": job["task"]["expected"]}},
    ):
        with pytest.raises(ValidationError) as caught:
            EpisodeSpec.model_validate(broken)
        assert "s3cr3t" not in str(caught.value)


def test_the_longest_episode_id_leaves_room_for_its_allocations() -> None:
    spec = a_spec("e" * 48)
    assert len(allocation_id(spec.episode_id, 9999, Role.VERIFIER)) <= 64


@pytest.mark.parametrize("wrong", [{"commands": ("true", "echo \ud800")}, {"name": "\udfff"}])
def test_a_script_that_no_message_could_carry_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="lone surrogate, which UTF-8 cannot carry"):
        Script(**wrong)
    assert Script(commands=("echo \N{GRINNING FACE}",)).commands == ("echo \N{GRINNING FACE}",)


def test_a_remote_episode_needs_its_trainer() -> None:
    assert a_spec(drive=Drive.REMOTE, policy=None, trainer_id="t-1").trainer_id == "t-1"


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("reward", [None, 0.0, 1.0, -0.1, 1.5, float("nan"), float("inf")])
def test_a_reward_belongs_to_its_outcome(outcome: Outcome, reward: float | None) -> None:
    fits = reward is not None and 0 <= reward <= 1 if outcome.scored else reward is None
    if fits:
        assert a_receipt(a_spec(), outcome, reward=reward).reward == reward
    else:
        with pytest.raises(ValidationError):
            a_receipt(a_spec(), outcome, reward=reward)


def test_a_receipt_comes_back_from_json_as_it_was() -> None:
    receipt = a_receipt(a_spec(), Outcome.SOLVED, phases={"queue": 0.1}, sizes={"artifact": 3}, detail="\ufffd ü")
    assert Receipt.model_validate_json(receipt.model_dump_json()) == receipt


def test_records_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        a_spec().run_id = "run-other"


def test_a_receipt_without_allocations_costs_nothing() -> None:
    assert SettledReceipt(receipt=a_receipt(a_spec()), allocations=()).cost_picousd == 0
