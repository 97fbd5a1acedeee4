"""Everything that a farm consists of, run once over whatever Redis its settings name: worker, orchestrator, trainer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from orchestrator.pool import Pool
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support import warm
from tests.support.farm import Field
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.processes import Marked, WorkerProcess, slots_of, worker_environment
from tests.support.waiting import wait_until
from trainer.environment import RemoteEpisodes

COMMANDS = (
    ("status", "--json"),
    ("status", "--here"),
    ("reconcile", "--dry-run"),
    ("receipts", "--format", "jsonl"),
    ("cost", "--by", "task"),
    ("limits", "--concurrency", "7"),
    ("limits", "--reset"),
    ("budget", "--set", "50"),
    ("budget", "--clear"),
    ("run", "weekly-sales", "--script", "repair"),
)
"""What a person runs beside; each must succeed."""


@contextmanager
def orchestrator(settings: Settings, directory: Path) -> Iterator[tuple[Marked, str]]:
    """`rollout-farm orchestrator` that serves metrics, and the URL where it does."""
    command = [*warm.FARM_COMMAND, "orchestrator", "--metrics-port", "0"]
    directory.mkdir()
    started = Marked(command, environment=worker_environment(settings), cwd=directory, output=directory / "output")
    try:
        wait_until(lambda: "/metrics" in started.stdout, description="metrics are served", seconds=30)
        found = re.search(r"http://\S+/metrics", started.stdout)
        assert found is not None
        yield started, found[0]
    finally:
        started.end()


def command(settings: Settings, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command against this farm."""
    environment = {**worker_environment(settings), "NO_COLOR": "1"}
    return warm.farm().run([*warm.FARM_COMMAND, *arguments], env=environment, cwd=directory)


def solve(field: Field, *, as_trainer: Settings | None = None) -> None:
    """One episode that a pool drives, one of its own policy, a batch as TRL has it, one that is cancelled."""
    with Pool(as_trainer or field.settings, budget_usd=5) as pool, RemoteEpisodes(pool) as episodes:
        with pool.submit(weekly_sales()) as episode:
            assert '"east": 5' in episode.terminal("python3 -B /home/user/report.py")
            episode.terminal(candidate(repaired()))
            episode.submit()
            assert episode.reward() == 1.0
        field.check_ended(episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
        alone = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
        assert [settled.receipt.reward for settled in pool.as_completed([alone], timeout_seconds=30)] == [1.0]
        with episodes.batch(2, group_size=2):
            batch = [episodes() for _ in range(2)]
            for environment in batch:
                environment.reset(task=weekly_sales().model_dump_json(), prompt="go")
            assert [environment.terminal("echo here").strip() for environment in batch] == ["here"] * 2
            assert [environment.get_reward() for environment in batch] == [0.0] * 2
        pool.submit(weekly_sales())
        assert pool.cancel(wait_seconds=30).open == ()


def lose_a_worker(field: Field, worker: WorkerProcess) -> None:
    """A killed worker's episode ends as lost, by the orchestrator; its sandbox is confirmed gone."""
    with Pool(field.settings) as pool:
        episode = pool.submit(weekly_sales())
        episode.reset()
        for slot in slots_of(worker.pid):
            os.kill(slot, signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)
        assert episode.wait(timeout_seconds=40).outcome is Outcome.WORKER_LOST
    field.check_ended(episode.episode_id, Outcome.WORKER_LOST)


def check_answers(field: Field, metrics_url: str) -> None:
    """What the orchestrator says of the newest episode and of its run."""
    site = metrics_url.removesuffix("/metrics")
    [newest] = Receipts(field.farm.redis, field.farm.ledger.allocations).select(ReceiptFilter(), limit=1)
    for place in (f"runs/{newest.receipt.run_id}", f"episodes/{newest.receipt.episode_id}"):
        assert newest.receipt.run_id in httpx.get(f"{site}/api/{place}", timeout=10).raise_for_status().text


def check_metrics(field: Field, url: str) -> None:
    """The orchestrator's metrics count the receipts."""
    text = httpx.get(url, timeout=10).raise_for_status().text
    found = Receipts(field.farm.redis, field.farm.ledger.allocations).select(ReceiptFilter())
    for outcome, count in Counter(settled.receipt.outcome for settled in found).items():
        assert f'farm_episodes_total{{outcome="{outcome}"}} {float(count)}' in text
