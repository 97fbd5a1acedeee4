"""How long a generation step under GRPOTrainer takes: TRL's own loop and the farm's, on episodes of exact times.

Both trainers get the same scripted completions in one run; ids, masks and rewards have to be the same, or the benchmark
fails. TRL's own loop waits for each reset, as an environment does that is not the farm's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from orchestrator.pool import Pool
from tests.bench.rows import Goal, Row
from tests.support.timed_pool import TimedPool, Times

_EPISODES = 8
_TIMES = Times(reset=0.5, tool=0.3, reward=0.2)


def parallel_rollouts() -> list[Row]:
    """Rows of one generation step with 8 episodes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    how = f"{_EPISODES} episodes: reset 0.5 s, two tool calls of 0.3 s, reward 0.2 s; best possible 1.3 s"
    return [
        Row("generation step, episodes in parallel", found["farm"], "s", Goal("<=", 1.5), how),
        Row("generation step, TRL's own loop", found["trl"], "s", None, "the same completions, masks and rewards"),
    ]


def measure(episodes: int = _EPISODES, times: Times = _TIMES) -> dict[str, float]:
    """Seconds of a generation step by trainer; raises when their results differ. In a process of its own: torch."""
    from trl import GRPOTrainer

    from trainer import FarmGRPOTrainer, RemoteEpisode, RemoteEpisodes

    class Waiting(RemoteEpisode):
        """Waits for its sandbox in reset."""

        def reset(self, task: Any = None, prompt: Any = None, **columns: Any) -> str | None:
            said = super().reset(task, prompt, **columns)
            assert self._episode is not None
            self._episode.reset()
            return said

    class WaitingEpisodes(RemoteEpisodes):
        def __call__(self) -> RemoteEpisode:
            self._made.append(Waiting(self))
            return self._made[-1]

    results, seconds = [], {}
    for name, base, factory in (("trl", GRPOTrainer, WaitingEpisodes), ("farm", FarmGRPOTrainer, RemoteEpisodes)):
        pool = TimedPool(times)
        trainer = _trained(base, factory(cast(Pool, pool), batch_size=episodes), episodes)
        seconds[name] = trainer.seconds
        scores = next(iter(trainer._logs["rewards"].values()))
        results.append((*trainer.generated[:4], list(scores), [episode.log for episode in pool.episodes]))
    if results[0] != results[1]:
        raise AssertionError("the two trainers made different ids, masks, completions, rewards or commands")
    return seconds


def _trained(base: Any, factory: Any, episodes: int) -> Any:
    from tests.support.policies import weekly_sales
    from tests.support.tiny_policy import (
        SUBMIT,
        Turn,
        grpo_config,
        make_model,
        make_tokenizer,
        rows,
        script_words,
        scripted,
        shell,
    )

    scripts: list[list[Turn]] = [[[shell("ls")], [SUBMIT], []]]
    tokenizer = make_tokenizer([*script_words(scripts), "ok1", "bye", "fix"])

    def generate_and_score(self: Any, inputs: Any) -> Any:
        began = time.perf_counter()
        made = base._generate_and_score_completions(self, inputs)
        self.seconds = time.perf_counter() - began
        return made

    with tempfile.TemporaryDirectory() as directory:
        trainer = scripted(base, scripts, _generate_and_score_completions=generate_and_score)(
            model=make_model(tokenizer),
            args=grpo_config(Path(directory), batch=episodes),
            train_dataset=rows(weekly_sales()),
            processing_class=tokenizer,
            environment_factory=factory,
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
