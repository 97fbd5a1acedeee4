"""One training run of the tiny policy: GRPO on real episodes of a farm, until it has learnt or its steps are used up.

What always holds: a reward comes from a grader that ran the artifact in a verifier; nothing here computes one. A step
is one batch of episodes, EPISODES of them in groups of GROUP.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from orchestrator.pool import Pool
from tests.learning.policy import TinyPolicy, tiny_policy, warm_start
from tests.learning.tasks import BUGS, PROMPT, seen, task
from trainer.environment import RemoteEpisode, RemoteEpisodes
from trainer.grpo import FarmGRPOTrainer

EPISODES, GROUP = 16, 8
PASSES = 2
"""Optimizer steps on each batch of episodes: these cost far more than gradients here."""
STEPS = 80
WINDOW = 10
"""Steps whose mean reward is judged."""
LEARNT = 0.9
"""A window above this has learnt; always guessing gives 0.5."""
UNLEARNT = 0.65
"""A control stays below: what it sees tells nothing, and a window's 160 guesses are above it once in 14,000 times."""


@dataclass(frozen=True)
class Run:
    """A run's rewards, one a step."""

    seed: int
    rewards: tuple[float, ...]
    swapped: bool = False

    @property
    def last(self) -> float:
        """Mean reward of the last window."""
        return _mean(self.rewards[-WINDOW:])

    @property
    def best(self) -> float:
        """Mean reward of the best window."""
        starts = range(max(1, len(self.rewards) - WINDOW + 1))
        return max(_mean(self.rewards[start : start + WINDOW]) for start in starts)

    @property
    def learnt(self) -> bool:
        """Whether the last window is above the mark."""
        return len(self.rewards) >= WINDOW and self.last > LEARNT


def train(
    pool: Pool,
    seed: int,
    *,
    swapped: bool = False,
    steps: int = STEPS,
    on_step: Callable[[float], None] = lambda reward: None,
) -> Run:
    """Teach a fresh policy; stops early once it has learnt. `swapped` shows half of the episodes the other bug."""
    policy = tiny_policy(seed)
    warm_start(policy, seed=seed)
    watch = _Watch(on_step)
    with tempfile.TemporaryDirectory() as directory, _episodes(pool, seed, swapped=swapped) as episodes:
        trainer = FarmGRPOTrainer(
            model=policy.model,
            args=_config(policy, directory, seed=seed, steps=steps),
            train_dataset=_rows(),
            processing_class=policy.tokenizer,
            environment_factory=episodes,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Run(seed, tuple(watch.rewards), swapped)


def _config(policy: TinyPolicy, directory: str, *, seed: int, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=EPISODES,
        num_generations=GROUP,
        max_steps=steps * PASSES,
        max_completion_length=64,
        max_tool_calling_iterations=4,
        learning_rate=3e-3,
        num_iterations=PASSES,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        generation_kwargs={"suppress_tokens": policy.silenced},
        seed=seed,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )


def _rows() -> Dataset:
    """One group of each bug a step; the prompts are the same, so that nothing but a look tells them apart."""
    rows = [
        {"prompt": [{"role": "user", "content": PROMPT}], "task": json.dumps(task(bug).model_dump(mode="json"))}
        for bug in BUGS
    ]
    return Dataset.from_list(rows * 8)


class _Watch(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Notes each step's mean reward, and ends the run once it has learnt."""

    def __init__(self, on_step: Callable[[float], None]) -> None:
        self.rewards: list[float] = []
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called by the trainer after each step."""
        if not logs or logs.get("reward") is None:
            return
        self.rewards.append(float(logs["reward"]))
        self._on_step(self.rewards[-1])
        if len(self.rewards) >= WINDOW and _mean(self.rewards[-WINDOW:]) > LEARNT:
            control.should_training_stop = True


def _episodes(pool: Pool, seed: int, *, swapped: bool) -> RemoteEpisodes:
    return _SwappedEpisodes(pool, seed) if swapped else RemoteEpisodes(pool)


class _SwappedEpisodes(RemoteEpisodes):
    """The control: environments in every second of which a look shows the other bug, at random."""

    def __init__(self, pool: Pool, seed: int) -> None:
        super().__init__(pool)
        self.random = random.Random(seed)

    def __call__(self) -> RemoteEpisode:
        """One more environment."""
        made = _SwappedEpisode(self)
        self._made.append(made)
        return made


class _SwappedEpisode(RemoteEpisode):
    def __init__(self, episodes: _SwappedEpisodes) -> None:
        super().__init__(episodes)
        self._random = episodes.random
        self._swapped = False

    def reset(self, task: Any = None, prompt: Any = None, **columns: Any) -> str | None:
        """As the real one, and decide whether this episode is told the truth."""
        self._swapped = self._random.random() < 0.5
        return super().reset(task, prompt, **columns)

    def terminal(self, command: str) -> str:  # without a docstring, so that the model is shown the real one's
        printed = super().terminal(command)
        shown = printed.strip()
        if self._swapped and shown in map(seen, BUGS):
            return printed.replace(shown, next(seen(bug) for bug in BUGS if seen(bug) != shown))
        return printed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
