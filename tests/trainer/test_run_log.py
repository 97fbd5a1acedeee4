"""The file of a run's receipts: what each program is shown of them, and nothing of it lost without a word."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from transformers import TrainerControl, TrainerState

from orchestrator.errors import FarmError
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.records import Script, SettledReceipt
from orchestrator.settings import Settings
from tests.support.bare_farm import TASK, TinySlot, farm_settings
from tests.support.waiting import wait_until
from trainer.run_log import MetricsLog, ReceiptLog, take_back
from trainer.signals import advice

FULL = Path("/dev/full")


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url)


@pytest.fixture
def pool(settings: Settings) -> Iterator[Pool]:
    with TinySlot(settings), Pool(settings) as pool:
        yield pool
    pool.redis.close()


def ended(pool: Pool, count: int = 1) -> list[SettledReceipt]:
    return pool.receipts([pool.submit(TASK, policy=Script()) for _ in range(count)])


def nothing(settled: SettledReceipt) -> None:
    """What is done with a receipt that nobody watches for."""


def test_a_receipt_is_written_as_every_program_is_given_it(pool: Pool, tmp_path: Path) -> None:
    seen: list[SettledReceipt] = []
    with ReceiptLog(pool, tmp_path / "receipts.jsonl", seen.append) as log:
        receipts = ended(pool, 3)
    assert seen == log.receipts()
    lines = [json.loads(line) for line in (tmp_path / "receipts.jsonl").read_text().splitlines()]
    assert {line["episode_id"]: line for line in lines} == {
        settled.receipt.episode_id: settled.as_json() for settled in receipts
    }
    assert all("cost_usd" in line for line in lines)


def broken(settled: SettledReceipt) -> None:
    raise LookupError("of the one who watches")


@pytest.mark.parametrize(
    ("path", "on_receipt", "failure"),
    [(FULL, nothing, OSError), (Path("receipts.jsonl"), broken, LookupError)],
    ids=["disk full", "watcher failed"],
)
def test_what_keeps_receipts_from_being_written_ends_the_run(
    pool: Pool, tmp_path: Path, path: Path, on_receipt: Callable[[SettledReceipt], None], failure: type[Exception]
) -> None:
    with pytest.raises(failure), ReceiptLog(pool, tmp_path / path, on_receipt):
        ended(pool)


def test_a_receipt_that_cannot_be_read_ends_the_run(pool: Pool, redis: Redis, tmp_path: Path) -> None:
    settled = ended(pool)[0]
    redis.set(Keys.receipt(settled.receipt.episode_id), '{"schema_version": 99}', keepttl=True)
    with pytest.raises(FarmError), ReceiptLog(pool, tmp_path / "receipts.jsonl", nothing):
        pass


def test_what_ended_the_block_is_not_hidden_by_it(pool: Pool) -> None:
    ended(pool)
    with pytest.raises(ZeroDivisionError), ReceiptLog(pool, FULL, nothing) as log:
        fail_after(log)


def fail_after(log: ReceiptLog) -> None:
    wait_until(lambda: log._failure, description="the receipt could not be written")
    raise ZeroDivisionError


def test_a_receipt_that_was_not_written_is_not_counted_as_written(pool: Pool) -> None:
    with pytest.raises(OSError, match="No space left"), ReceiptLog(pool, FULL, nothing) as log:
        ended(pool)
    assert log.episode_ids == []
    assert log._position == "0"


def test_what_was_counted_adds_up_over_the_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", on_step=lambda step: None)
    lost = {"reward": 0.5, "episodes/finished": 4, "episodes/aborted": 1, "episodes/aborted/sandbox_lost": 1}
    for logs in (lost, {"reward": 1.0, "episodes/finished": 4, "episodes/aborted": 0}, {"train_loss": float("nan")}):
        log.on_log(None, TrainerState(is_world_process_zero=True), TrainerControl(), logs=logs)
    assert log.summary == {
        "reward": 1.0,
        "run_mean/reward": 0.75,
        "episodes/finished": 8,
        "episodes/aborted": 1,
        "episodes/aborted/sandbox_lost": 1,
        "train_loss": None,
    }
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("episodes/finished") for line in lines] == [4, 4, None], "each line is of its own step"


def test_what_was_counted_before_a_resume_is_of_the_run_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def log(metrics: MetricsLog, step: int, **logs: float) -> None:
        state = TrainerState(global_step=step, is_world_process_zero=True)
        metrics.on_log(None, state, TrainerControl(), logs=logs)

    first = MetricsLog(path, on_step=lambda step: None)
    for step, reward in ((1, 0.0), (2, 1.0), (3, 1.0)):
        log(first, step, **{"reward": reward, "episodes/finished": 4, "episodes/aborted/sandbox_lost": 1})
    log(first, 3, train_loss=float("nan"))
    take_back(path, after_step=2)
    resumed = MetricsLog(path, on_step=lambda step: None)
    resumed.read_back()
    log(resumed, 3, **{"reward": 0.5, "episodes/finished": 4})
    assert resumed.summary == {
        "reward": 0.5,
        "run_mean/reward": 0.5,
        "episodes/finished": 12,
        "episodes/aborted/sandbox_lost": 2,
    }
    fresh = MetricsLog(tmp_path / "none.jsonl", on_step=lambda step: None)
    fresh.read_back()
    assert fresh.summary == {}


POOR = {
    "reward": 0.0,
    "frac_reward_zero_std": 1.0,
    "completions/clipped_ratio": 1.0,
    "tools/call_frequency": 0.0,
}
GOOD = {
    "reward": 0.9,
    "frac_reward_zero_std": 0.1,
    "completions/clipped_ratio": 0.0,
    "tools/call_frequency": 3.0,
}


@pytest.mark.parametrize(
    ("steps", "said"),
    [([GOOD] * 20 + [POOR], 0), ([POOR] * 3, 4), ([POOR] * 20 + [GOOD], 1)],
    ids=["one unlucky step", "nothing to learn", "most were cut off but in the last step"],
)
def test_advice_is_of_the_whole_run(tmp_path: Path, steps: list[dict[str, float]], said: int) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", on_step=lambda step: None)
    for logs in [*steps, {"train_loss": 0.1}]:
        log.on_log(None, TrainerState(is_world_process_zero=True), TrainerControl(), logs=logs)
    assert len(advice(log.summary)) == said
