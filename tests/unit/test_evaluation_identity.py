"""What was run: the same gives the same ids and seeds, and whatever else differs is said."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.records import EpisodeSpec
from orchestrator.settings import Budgets
from orchestrator.tasks.schema import TaskBudgets
from orchestrator.vocabulary import Drive
from tests.support.evaluations import an_identity, some_tasks
from trainer.evaluation.identity import Identity, Sampling, Subject, TaskIdentity, differences, notes

OTHER = Subject(kind="model", name="trained", fingerprint="9" * 64, chat_template="1" * 64, dtype="float32")


def of_tasks(**changes: Any) -> tuple[TaskIdentity, ...]:
    return tuple(TaskIdentity.of(task) for task in some_tasks(**changes))


def test_the_same_evaluation_has_the_same_ids_also_after_a_round_trip() -> None:
    identity = an_identity()
    again = Identity.model_validate_json(identity.model_dump_json())
    assert again == identity
    assert again.evaluation_id == an_identity().evaluation_id
    assert again.episode_id(1, 0) == identity.episode_id(1, 0)


def test_ids_tell_episodes_and_evaluations_apart() -> None:
    identity, labelled, other = an_identity(), an_identity(label="again"), an_identity(subject=OTHER)
    ids = {
        each.episode_id(*place) for each in (identity, labelled, other) for place in ((0, 0), (0, 1), (1, 0), (0, 0, 1))
    }
    assert len(ids) == 12


def test_the_longest_id_is_one_that_an_episode_may_have() -> None:
    task = some_tasks()[0]
    spec = EpisodeSpec(
        episode_id=an_identity().episode_id(9_999, 99_999, 99),
        run_id=an_identity().run_id,
        task=task,
        template="base",
        drive=Drive.REMOTE,
        trainer_id="trainer-1",
    )
    assert spec.episode_id.endswith("-9999-99999-99")


def test_seeds_are_the_episodes_own_and_the_same_for_every_policy() -> None:
    identity, other = an_identity(), an_identity(subject=OTHER, label="x")
    seeds = {identity.episode_seed(task, sample) for task in range(2) for sample in range(50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert identity.episode_seed(1, 3) == other.episode_seed(1, 3)
    assert identity.episode_seed(1, 3) != an_identity(seed=1).episode_seed(1, 3)


def test_another_policy_or_label_is_no_difference() -> None:
    assert differences(an_identity(), an_identity(subject=OTHER, label="again")) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 5}, "seed: 0 and 5"),
        ({"episodes": 8}, "episodes: 2 and 8"),
        ({"sampling": Sampling(temperature=0.2)}, "sampling.temperature: 1.0 and 0.2"),
        ({"sampling": Sampling(max_completion_tokens=64)}, "sampling.max_completion_tokens: 512 and 64"),
        ({"system_prompt": "Be brief."}, 'system_prompt: nothing and "Be brief."'),
        ({"template": "large"}, 'template: "base" and "large"'),
        ({"budgets": Budgets(command_seconds=5)}, "budgets.command_seconds: 10"),
        ({"tools": "3" * 64}, "tools: "),
    ],
)
def test_each_setting_that_differs_is_named_with_both_values(changes: dict[str, Any], said: str) -> None:
    found = differences(an_identity(), an_identity(**changes))
    assert len(found) == 1
    assert found[0].startswith(said)


def test_every_field_of_the_record_is_compared() -> None:
    """A field that is added later must not be forgotten; these are the ones that tell policies apart."""
    exempt = {"subject", "label", "schema_version"}
    tried = {"seed", "episodes", "sampling", "system_prompt", "template", "budgets", "tools", "tasks"}
    assert set(Identity.model_fields) == exempt | tried


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"prompt": "Do it."}, "prompt"),
        ({"verification": {"/home/user/sales.csv": "region,amount\nx,1\n"}}, "held-out data"),
        ({"expected": {"east": 1}}, "held-out data"),
        ({"files": {"/home/user/report.py": "print(1)"}}, "starter files"),
        ({"command": "python3 /home/user/report.py"}, "judging"),
        ({"network": False}, "sandbox and budgets"),
        ({"budgets": TaskBudgets(command_seconds=5)}, "sandbox and budgets"),
        ({"scripts": {}}, "scripts or visible answers"),
    ],
)
def test_a_changed_task_is_named_with_what_changed(changes: dict[str, Any], part: str) -> None:
    found = differences(an_identity(), an_identity(tasks=of_tasks(**changes)))
    assert found == [f"task task-0: {part} differ", f"task task-1: {part} differ"]


def test_other_tasks_are_named() -> None:
    more = an_identity(tasks=of_tasks(count=4))
    assert differences(an_identity(), more) == ["tasks only in the second: task-2, task-3"]
    assert differences(more, an_identity()) == ["tasks only in the first: task-2, task-3"]
    assert differences(an_identity(), an_identity(tasks=of_tasks()[::-1])) == ["the tasks are in another order"]


def test_a_script_and_a_model_were_not_sampled_alike() -> None:
    script = an_identity(sampling=None, tools=None, subject=Subject(kind="script", name="repair", fingerprint="5"))
    assert any(line.startswith("sampling") for line in differences(script, an_identity()))


def test_what_of_the_policies_matters_is_noted() -> None:
    assert "noise" in notes(an_identity(), an_identity())[0]
    changed = an_identity(subject=OTHER.model_copy(update={"chat_template": "7" * 64, "dtype": "bfloat16"}))
    found = notes(an_identity(), changed)
    assert len(found) == 2
    assert "float32 and bfloat16" in found[1]
