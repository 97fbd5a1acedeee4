"""`rollout-farm train` as a user runs it, on a running farm: what it prints, writes, resumes, refuses and leaves."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from typer.main import get_command

from deploy.command_line import build
from deploy.evaluations import Options, run_evaluation
from deploy.training_report import NoBars
from orchestrator.errors import CapacityError, FarmError, SettingsError
from orchestrator.keys import Keys
from orchestrator.records import EpisodeSpec
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support import warm
from tests.support.farm import Field
from tests.support.policies import weekly_sales
from tests.support.processes import Marked, children, worker_environment
from tests.support.tiny_policy import SUBMIT, save_model, shell
from tests.support.waiting import wait_until
from tests.trainer.two_plans import LOSING_RUN
from trainer.evaluation.chat_template import load_tokenizer
from trainer.evaluation.comparison import compare
from trainer.evaluation.identity import Sampling
from trainer.evaluation.results import read_evaluation
from trainer.training import TrainingPlan, checkpoint_of, tokenizer_of, train

Start = Callable[..., Marked]
COMMAND = [sys.executable, "-W", "ignore", "-m", "deploy.cli", "train"]
SECONDS = 150.0
"""A process that imports torch and TRL takes seven seconds on an idle machine, and so does their template."""

METRIC_LINES = [(1, True), (1, False), (2, True), (2, False)]
"""Step and whether it has a loss: one line a step, one at the end of each run."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls the report and submits it."""
    said = [shell("python3 -B /home/user/report.py"), SUBMIT]
    return save_model(tmp_path_factory.mktemp("model"), said, prompt=weekly_sales().prompt)


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sleeps as long as a command may."""
    said = [shell("sleep 1.5"), shell("sleep 1.5")]
    return save_model(tmp_path_factory.mktemp("slow-model"), said, prompt=weekly_sales().prompt)


@pytest.fixture
def start(farm: Field, tmp_path: Path) -> Iterator[Start]:
    """Starts commands in an empty directory, and ends them."""
    started: list[Marked] = []

    def begin(*arguments: str, command: list[str] = COMMAND, **changes: str) -> Marked:
        environment = {**worker_environment(farm.settings), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **changes}
        output = tmp_path / f"stdout-{len(started)}"
        template = warm.trainer() if command[0] == sys.executable else None
        command_line = [*command, *arguments]
        started.append(Marked(command_line, environment=environment, cwd=tmp_path, output=output, template=template))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def open_specs(redis: Redis) -> list[EpisodeSpec]:
    """Of the episodes that have not ended."""
    found = [redis.hget(Keys.episode(str(name)), "spec") for name in redis.zrange(Keys.OPEN, 0, -1)]
    return [EpisodeSpec.model_validate_json(str(text)) for text in found if text is not None]


def test_a_run_is_reported_saved_and_resumed(
    farm: Field, start: Start, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start("--model", str(model), "--cpu")
    assert run.wait(SECONDS) == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["steps"] == 1
    assert len(report["receipts"]) == 2
    given = torch.load(tmp_path / "training-output" / "checkpoint" / "training_args.bin", weights_only=False)
    assert (given.num_generations, given.per_device_train_batch_size, given.max_steps) == (2, 2, 1)
    assert (given.max_completion_length, given.learning_rate) == (512, 1e-6)
    assert [receipt["run_id"] for receipt in report["receipts"]] == [report["run_id"]] * 2
    assert {operation["name"] for trace in report["traces"] for operation in trace["operations"]} >= {
        "reset",
        "terminal",
        "submit",
    }
    assert all(row["confirmed_absent"] for row in report["cleanup"])
    assert len({row["sandbox_id"] for row in report["cleanup"]}) == len(report["cleanup"]) >= 2
    assert {"reward", "tools/call_frequency", "train_loss"} <= {row["signal"] for row in report["signals"]}
    assert all(row["tells"] for row in report["signals"])
    assert "steps" in run.stderr
    output = tmp_path / "training-output"
    assert json.loads((output / "report.json").read_text()) == report
    assert (output / "checkpoint" / "model.safetensors").is_file()
    assert rows_of(output / "metrics.jsonl")[0]["step"] == 1
    assert len(rows_of(output / "receipts.jsonl")) == 2
    assert json.loads((output / "plan.json").read_text())["task_names"] == ["weekly-sales"]
    check_that_the_checkpoint_can_be_evaluated(farm, base=model, trained=output / "checkpoint", directory=tmp_path)
    first_state = json.loads((output / "checkpoint-1" / "trainer_state.json").read_text())

    plan = TrainingPlan(model=str(model), tasks=[weekly_sales()], cpu=True, output_dir=output, max_steps=2)
    with pytest.raises(SettingsError, match="--resume"):
        train(plan, farm.settings, NoBars())
    with pytest.raises(SettingsError, match="larger --max-steps"):
        train(replace(plan, max_steps=1, resume=True), farm.settings, NoBars())
    aside = (output / "checkpoint-1").rename(tmp_path / "aside")
    shutil.copytree(aside, output / "checkpoint-1")
    torch.save({}, output / "checkpoint-1" / "optimizer.pt")
    with pytest.raises(SettingsError, match=r"checkpoint-1: cannot be loaded"):
        train(replace(plan, resume=True), farm.settings, NoBars())
    shutil.rmtree(output / "checkpoint-1")
    aside.rename(output / "checkpoint-1")
    (output / "checkpoint-7").mkdir()  # a process that is killed while it saves leaves a part of a state
    with (output / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2, "time": 0, "reward": 0.5}\n{"step": 2, "ti')
    resumed = train(replace(plan, resume=True, learning_rate=4e-6), farm.settings, NoBars())
    assert [(row["step"], "loss" in row) for row in rows_of(output / "metrics.jsonl")] == METRIC_LINES
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [1, 2], "it went on where it was"
    assert state["log_history"][0] == first_state["log_history"][0]
    made = next(row for row in rows_of(output / "metrics.jsonl") if row["step"] == 2)
    assert made["learning_rate"] == pytest.approx(2e-6), "the second of two steps, with this run's rate"
    moments = torch.load(output / "checkpoint-2" / "optimizer.pt")["state"]
    assert {float(row["step"]) for row in moments.values()} == {2.0}, "the optimizer's state went on too"
    assert len(rows_of(output / "receipts.jsonl")) == 4
    assert (len(resumed.receipts), resumed.metrics["episodes/finished"]) == (2, 4), "of this start, of the whole run"
    assert "going on with --learning-rate 4e-06, it was 1e-06" in caplog.text
    kept = json.loads((output / "plan.json").read_text())
    assert (kept["options"]["max_steps"], kept["task_names"]) == (2, ["weekly-sales"])


def check_that_the_checkpoint_can_be_evaluated(farm: Field, *, base: Path, trained: Path, directory: Path) -> None:
    """It is evaluated as it is, and alike with what it was made of."""
    for model in (base, trained):
        options = Options(
            tasks=("weekly-sales",),
            output=directory / f"of-{model.name}",
            model=str(model),
            script=None,
            episodes=2,
            seed=0,
            sampling=Sampling(temperature=0, max_turns=2),
            system_prompt=None,
            device="cpu",
            batch=2,
            parallel=None,
            retry_failed=False,
            label="",
            workers=1,
            worker_patience_seconds=60.0,
        )
        run_evaluation(options, farm.settings)
    ours, theirs = (read_evaluation(directory / f"of-{model.name}") for model in (base, trained))
    compared = compare(ours, theirs)
    assert [result.outcome for result in theirs.results] == [Outcome.WRONG_ANSWER] * 2, "it says what it was taught"
    assert [result.usage.turns for result in theirs.results if result.usage] == [1, 1]
    assert compared.second.scored == 2
    assert [(row.first, row.second) for row in compared.by_task] == [(0.0, 0.0)]
    assert theirs.identity.subject.name == str(trained)


DEFAULTS = {
    "max_steps": 1,
    "completions": 2,
    "batch_size": 2,
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "on_abort": "raise",
}


def test_the_defaults_show_the_wiring_in_one_step() -> None:
    plan = TrainingPlan(model="any", tasks=[weekly_sales()])
    assert {name: getattr(plan, name) for name in DEFAULTS} == DEFAULTS
    (command,) = (it for it in get_command(build()).commands.values() if it.name == "train")  # type: ignore[attr-defined]
    asked = {option.name: option.default for option in command.params}
    for field in fields(TrainingPlan):
        if field.name not in ("model", "tasks", "task_names"):
            assert asked[field.name] == getattr(plan, field.name), f"--{field.name} and the plan's own"


def test_a_directory_of_a_run_that_saved_no_state_is_not_written_on(tmp_path: Path) -> None:
    plan = TrainingPlan(model="any", tasks=[weekly_sales()], output_dir=tmp_path)
    assert checkpoint_of(plan) is None
    (tmp_path / "receipts.jsonl").write_text("{}\n")
    with pytest.raises(SettingsError, match="remove it"):
        checkpoint_of(plan)
    with pytest.raises(SettingsError, match="nothing to resume"):
        checkpoint_of(replace(plan, resume=True))


def test_a_second_run_into_the_same_directory_is_refused(
    farm: Field, start: Start, model: Path, slow_model: Path, tmp_path: Path
) -> None:
    first = start("--model", str(slow_model), "--cpu", "--max-steps", "50", "--output-dir", "out")
    wait_until(
        lambda: len(farm.provider.list({})) == 2 or first.process.poll() is not None,
        description="two sandboxes of the first run",
        seconds=120,
    )
    plan = TrainingPlan(model=str(model), tasks=[weekly_sales()], cpu=True, output_dir=tmp_path / "out")
    for resume in (False, True):
        with pytest.raises(SettingsError, match="another run is writing there"):
            train(replace(plan, resume=resume), farm.settings, NoBars())
    second = start("--model", str(model), "--cpu", "--output-dir", "out")
    assert second.wait(SECONDS) == 3, second.stderr
    assert "another run is writing there" in second.stderr.replace("\n", " ")
    first.process.send_signal(signal.SIGINT)
    assert first.wait(60) == 130, first.stderr


def test_a_directory_that_cannot_be_written_to_is_not_blamed_on_the_model(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = start("--model", "no-such-model", "--cpu", "--output-dir", "file/out")
    assert run.wait(SECONDS) == 3, run.stderr
    assert "file/out: cannot be written to (not a directory)" in run.stderr.replace("\n", " ")
    assert "--output-dir" in run.stderr


def test_an_interrupt_leaves_no_episode_and_no_sandbox(farm: Field, start: Start, slow_model: Path) -> None:
    run = start("--model", str(slow_model), "--cpu", "--max-steps", "50", "--output-dir", "out")
    wait_until(
        lambda: len(farm.provider.list({})) == 2 or run.process.poll() is not None,
        description="two sandboxes of the run",
        seconds=120,
    )
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.stderr
    assert open_specs(farm.farm.redis) == []
    assert farm.provider.list({}) == []


def test_a_run_whose_own_farm_has_died_says_so(start: Start, slow_model: Path, tmp_path: Path) -> None:
    alone = ["env", "-u", "REDIS_URL", "-u", "E2B_API_KEY", "-u", "FARM_E2B_API_URL", *COMMAND]
    arguments = ("--model", str(slow_model), "--cpu", "--max-steps", "50", "--on-abort", "exclude")
    run = start(*arguments, command=alone)
    receipts = tmp_path / "training-output" / "receipts.jsonl"
    wait_until(lambda: receipts.exists() or run.process.poll() is not None, description="a receipt", seconds=120)
    crews = [pid for pid in children(run.pid) if "worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(crews) == 1, run.stderr
    os.kill(crews[0], signal.SIGKILL)
    assert run.wait(SECONDS) == 1, run.stderr
    assert "workers ended with -9" in run.stderr


def test_a_task_that_is_not_there_is_said_before_torch_is_imported(start: Start, model: Path) -> None:
    run = start("--model", str(model), "--cpu", "--tasks", "no-such-task")
    assert run.wait(SECONDS) == 7
    assert "built-in" in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "no-such-model"}, SettingsError, "cannot be loaded"),
        ({"resume": True}, SettingsError, "nothing to resume"),
        ({"completions": 3}, SettingsError, "divisible"),
        ({"cpu": False}, SettingsError, "--cpu"),
        ({"batch_size": 8}, CapacityError, "add 2 workers"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_an_episode_starts(
    farm: Field, model: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = farm.farm.redis.zcard(Keys.RECEIPTS)
    given = {"model": str(model), "tasks": [weekly_sales()], "cpu": True, "output_dir": tmp_path / "out", **changes}
    with pytest.raises(error, match=words):
        train(TrainingPlan(**given), farm.settings, NoBars())
    assert farm.farm.redis.zcard(Keys.RECEIPTS) == before
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_leaves_no_room_to_answer_is_refused_without_a_farm(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = weekly_sales(id="long", prompt="fix " * 2000)
    plan = TrainingPlan(str(model), [weekly_sales(), long], cpu=True, output_dir=tmp_path / "out")
    nowhere = Settings(redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(FarmError, match=r"fewer than the 1024 tokens that the model takes: long has 2\d\d\d; leave"):
        train(plan, nowhere, NoBars())
    assert not (tmp_path / "out").exists()
    assert not caplog.text
    tokenizer_of(replace(plan, tasks=[weekly_sales()], max_completion_length=1000), warn=True)
    assert "the prompts of 1 tasks" in caplog.text
    assert "--max-completion-length 1000 are more than the 1024 tokens" in caplog.text


def test_a_model_whose_template_has_no_tools_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(SettingsError, match="tool calls"):
        load_tokenizer(str(tmp_path))


# several processes


def start_two(start: Start, *arguments: str, command: list[str] = COMMAND) -> list[Marked]:
    """The same command as two processes of one run, as a launcher starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(*arguments, command=command, RANK=rank, LOCAL_RANK=rank, **shared) for rank in ("0", "1")]


def test_two_processes_train_as_one_run(farm: Field, start: Start, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.two_plans"]
    ranks = start_two(start, str(model), str(tmp_path / "out"), command=command)
    for rank in ranks:
        assert rank.wait(SECONDS) == 0, rank.stderr
    first, second = (json.loads(rank.stdout) for rank in ranks)
    assert "a batch of 8 can never be live at once" in first["refused"], "four of each process: the limit is one"
    assert first["refused"] == second["refused"]
    assert (first["steps"], second["steps"]) == (1, 1)
    rows = [farm.farm.ledger.row(name) for name in first["episodes"]]
    specs = [row.spec for row in rows if row is not None]
    assert len(specs) == 4
    assert len({spec.reservation_id for spec in specs} - {None}) == 1, "one reservation for the batch of both"
    drivers = {spec.group_id: {s.trainer_id for s in specs if s.group_id == spec.group_id} for spec in specs}
    assert [len(trainers) for trainers in drivers.values()] == [1, 1], "each process drives its own group"
    assert len(set.union(*drivers.values())) == 2
    assert rows_of(tmp_path / "out" / "metrics.jsonl")[0]["episodes/finished"] == 4
    assert first["failed"].startswith("ZeroDivisionError")
    assert second["failed"].startswith("FarmError: the first process of this run failed (ZeroDivisionError")
    check_what_the_second_lost(first["lost"], second["lost"])


def check_what_the_second_lost(first: dict[str, Any], second: dict[str, Any]) -> None:
    """One group over both, whose last row was aborted: it alone is left out, by the process that it belongs to."""
    assert (first.pop("masked"), second.pop("masked")) == ([False, False], [False, True])
    assert first == second, "both know the same, and have the same weights"
    assert first["groups"] == [f"{LOSING_RUN}-b0-g0"]
    assert first["rewards"] == [1.0, 0.0, 0.0, None]
    third = 1 / math.sqrt(3)
    assert first["advantages"] == pytest.approx([2 * third, -third, -third, 0.0], rel=1e-3), "of three, not of four"
    assert first["counts"] == {
        "episodes/finished": 4, "episodes/aborted": 1, "episodes/aborted/sandbox_lost": 1, "episodes/excluded": 1
    }  # fmt: skip
    assert first["moved"]


def test_one_processs_death_ends_its_own_episodes_only(farm: Field, start: Start, slow_model: Path) -> None:
    ranks = start_two(start, "--model", str(slow_model), "--cpu")
    wait_until(lambda: len(farm.provider.list({})) == 4, description="the sandboxes of both", seconds=120)
    groups = {"g0": list[str](), "g1": list[str]()}
    for spec in open_specs(farm.farm.redis):
        groups[(spec.group_id or "")[-2:]].append(spec.episode_id)
    assert [len(names) for names in groups.values()] == [2, 2]
    ranks[1].process.kill()
    assert ranks[0].wait(60) == 1
    assert "another process of this run has gone" in ranks[0].stderr.replace("\n", " ")
    for name in groups["g1"]:
        assert farm.wait_receipt(name).receipt.outcome is Outcome.TRAINER_LOST
    for name in groups["g0"]:
        assert farm.wait_receipt(name).receipt.outcome in (Outcome.NOT_SUBMITTED, Outcome.CANCELLED)
