"""A policy learns on the farm: real jobs, workers, Terminus servers, jails and graders, and GRPO's own gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")

import pytest
from transformers.utils import get_json_schema

from deploy.local_farm import LocalFarm
from orchestrator.pool import Pool
from orchestrator.tasks import Task
from orchestrator.vocabulary import Outcome
from tests.learning.__main__ import problems
from tests.learning.plot import save_plot
from tests.learning.tasks import BUGS, PATCHED, seen, task
from tests.learning.training import EPISODES, Run, _episodes, train
from tests.support.bare_farm import farm_settings
from tests.support.redis_server import announced
from tests.support.timed_pool import TimedEpisode, TimedPool
from tests.trainer.conftest import TOLERATED
from trainer.environment import RemoteEpisode

pytestmark = [pytest.mark.filterwarnings(spec) for spec in TOLERATED]


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A farm in which one batch is live at once."""
    settings = farm_settings("").model_copy(update={"redis_url": None})
    with LocalFarm(settings, workers=EPISODES // 2, temporary=True) as farm, Pool(farm.settings) as pool:
        yield pool
        pool.redis.close()


@pytest.mark.timeout(1500)
def test_a_policy_learns_to_look_before_it_repairs(pool: Pool) -> None:
    run = train(pool, seed=4)
    assert run.learnt, f"mean rewards by step: {run.rewards}"
    assert run.rewards[0] < 0.7  # there was something to learn
    receipts = [pool.ledger.receipt(episode_id) for episode_id in announced(pool.redis, pool.run_id)]
    assert len(receipts) == EPISODES * len(run.rewards)
    outcomes = [settled.receipt.outcome for settled in receipts if settled is not None]
    assert len(outcomes) == len(receipts)
    assert all(outcome.scored for outcome in outcomes)
    solved = sum(outcome is Outcome.SOLVED for outcome in outcomes)
    assert solved == pytest.approx(sum(run.rewards) * EPISODES)  # each reward that it learnt from is a grader's


def test_runs_are_judged_by_their_last_and_their_best_steps() -> None:
    good, late = Run(0, (0.3,) * 10 + (1.0,) * 10), Run(1, (1.0,) * 10 + (0.3,) * 10)
    assert (good.learnt, late.learnt, Run(2, (1.0,) * 9).learnt) == (True, False, False)
    assert problems([good, Run(3, (0.5,) * 20, swapped=True)]) == []
    assert len(problems([good, late])) == 1
    lucky = Run(3, (0.5,) * 10 + (0.7,) * 10 + (0.5,) * 10, swapped=True)
    assert "the control reached 0.70" in problems([good, lucky])[0]


class Speaking(TimedEpisode):
    """Prints what it is asked to print."""

    def terminal(self, command: str) -> str:
        super().terminal(command)
        return command


class SpeakingPool(TimedPool):
    """A pool of them."""

    def submit(self, task: Task, **options: Any) -> TimedEpisode:
        plain = super().submit(task, **options)
        self.episodes[-1] = Speaking(plain.episode_id, plain.times, plain.ready_at)
        return self.episodes[-1]


def test_the_control_shows_half_of_the_episodes_the_other_bug_and_changes_nothing_else() -> None:
    pool = SpeakingPool()
    environment = _episodes(cast(Pool, pool), 4, swapped=True)()
    high, low = (f"{seen(bug)}\n" for bug in BUGS)
    others = [f"{PATCHED}\n", "", "total=$((a+b))\n", f"{high}{low}", f"read a b\n{high}"]
    swapped = 0
    for number in range(400):
        environment.reset(task=task(BUGS[number % 2]).model_dump_json())
        looks = [environment.terminal(text) for text in (high, low, high)]
        assert looks in ([high, low, high], [low, high, low]), "one way for the whole episode"
        swapped += looks[0] == low
        assert [environment.terminal(text) for text in others] == others
        assert environment.submit() == "bye"
        assert environment.get_reward() == 0.9, "the farm's: nine actions"
        assert pool.episodes[-1].log == [high, low, high, *others, "submit"]
    assert 160 <= swapped <= 240, "four standard deviations around a half"
    plain = _episodes(cast(Pool, pool), 4, swapped=False)()
    assert type(plain) is RemoteEpisode, "the run itself is shown what there is"
    for tool in ("submit", "terminal"):
        assert get_json_schema(getattr(environment, tool)) == get_json_schema(getattr(plain, tool))


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    save_plot([Run(0, (0.3, 0.5, 1.0)), Run(0, (0.4, 0.5), swapped=True)], tmp_path / "learn.png")
    assert (tmp_path / "learn.png").read_bytes().startswith(b"\x89PNG")
