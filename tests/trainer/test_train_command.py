"""`rollout-farm train` as a user runs it, on a running farm: what it prints, writes, resumes, refuses and leaves."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from orchestrator.keys import Keys
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, weekly_sales
from tests.support.processes import Marked, worker_environment
from tests.support.tiny_policy import SUBMIT, save_model, shell
from tests.support.waiting import wait_until

Start = Callable[..., Marked]
COMMAND = [sys.executable, "-W", "ignore", "-m", "deploy.cli", "train"]
SECONDS = 90.0


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
        started.append(Marked([*command, *arguments], environment=environment, cwd=tmp_path, output=output))
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


def test_a_run_is_reported_saved_and_resumed(farm: Field, start: Start, model: Path, tmp_path: Path) -> None:
    run = start("--model", str(model), "--cpu")
    assert run.wait(SECONDS) == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["steps"] == 1
    assert len(report["receipts"]) == 2
    assert [receipt["run_id"] for receipt in report["receipts"]] == [report["run_id"]] * 2
    assert {operation["name"] for trace in report["traces"] for operation in trace["operations"]} >= {"reset"}
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
    first_state = json.loads((output / "checkpoint-1" / "trainer_state.json").read_text())

    refused = start("--model", str(model), "--cpu")
    assert refused.wait(SECONDS) == 3
    assert "--resume" in refused.stderr

    resumed = start("--model", str(model), "--cpu", "--resume", "--max-steps", "2")
    assert resumed.wait(SECONDS) == 0, resumed.stderr
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [1, 2], "it went on where it was"
    assert state["log_history"][0] == first_state["log_history"][0]
    assert (output / "checkpoint-2" / "optimizer.pt").is_file()
    assert len(rows_of(output / "receipts.jsonl")) == 4
    assert len(json.loads(resumed.stdout)["receipts"]) == 2, "of this run alone"


def test_an_interrupt_leaves_no_episode_and_no_sandbox(farm: Field, start: Start, slow_model: Path) -> None:
    run = start("--model", str(slow_model), "--cpu", "--max-steps", "50", "--output-dir", "out")
    wait_until(
        lambda: len(farm.provider.list({})) == 2 or run.process.poll() is not None,
        description="two sandboxes of the run",
        seconds=60,
    )
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.stderr
    assert open_specs(farm.farm.redis) == []
    assert farm.provider.list({}) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "no-such-model", "--cpu"], 3, "cannot be loaded"),
        (["--model", "MODEL", "--cpu", "--resume"], 3, "nothing to resume"),
        (["--model", "MODEL", "--cpu", "--tasks", "no-such-task"], 7, "built-in"),
        (["--model", "MODEL", "--cpu", "--on-abort", "zero"], 3, "exclude"),
        (["--model", "MODEL", "--cpu", "--completions", "4"], 3, "divisible"),
        (["--model", "MODEL", "--cpu", "--batch-size", "8", "--completions", "8"], 6, "add 2 workers"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    farm: Field, start: Start, model: Path, arguments: list[str], code: int, words: str
) -> None:
    before = farm.farm.redis.zcard(Keys.RECEIPTS)
    run = start(*(str(model) if word == "MODEL" else word for word in arguments))
    assert run.wait(SECONDS) == code, run.stderr
    assert words in run.stderr.replace("\n", " ")
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    assert farm.farm.redis.zcard(Keys.RECEIPTS) == before


def test_a_model_whose_template_has_no_tools_is_refused(start: Start, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "plain"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    run = start("--model", str(copy), "--cpu")
    assert run.wait(SECONDS) == 3
    assert "tool calls" in run.stderr


# several processes


TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
BOTH = [*TORCHRUN, "deploy.cli", "train"]


def test_two_processes_train_as_one_run(farm: Field, start: Start, model: Path, tmp_path: Path) -> None:
    run = start("--model", str(model), "--cpu", command=BOTH)
    assert run.wait(SECONDS) == 0, run.stderr
    report = json.loads(run.stdout)
    rows = [farm.farm.ledger.row(receipt["episode_id"]) for receipt in report["receipts"]]
    specs = [row.spec for row in rows if row is not None]
    assert len(specs) == 4
    assert len({spec.reservation_id for spec in specs} - {None}) == 1, "one reservation for the batch of both"
    drivers = {spec.group_id: {s.trainer_id for s in specs if s.group_id == spec.group_id} for spec in specs}
    assert [len(trainers) for trainers in drivers.values()] == [1, 1], "each process drives its own group"
    assert len(set.union(*drivers.values())) == 2
    assert rows_of(tmp_path / "training-output" / "metrics.jsonl")[0]["episodes/finished"] == 4


def test_the_batch_of_all_processes_has_to_fit(farm: Field, start: Start, model: Path) -> None:
    run = start("--model", str(model), "--cpu", "--batch-size", "4", command=BOTH)
    assert run.wait(SECONDS) != 0
    assert "a batch of 8 can never be live at once" in run.stderr.replace("\n", " ")
    assert open_specs(farm.farm.redis) == []


def test_one_processs_death_ends_its_own_episodes_only(farm: Field, start: Start, slow_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        start(
            "--model",
            str(slow_model),
            "--cpu",
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in ("0", "1")
    ]
    wait_until(lambda: len(farm.provider.list({})) == 4, description="the sandboxes of both", seconds=60)
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
