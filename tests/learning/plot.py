"""The curve: each step's mean reward, smoothed over a window, for every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tests.learning.training import EPISODES, LEARNT, UNLEARNT, WINDOW, Run


def save_plot(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        name = f"control: seed {run.seed}, observations swapped" if run.swapped else f"seed {run.seed}"
        colour = "grey" if run.swapped else None
        (line,) = axes.plot(_steps(len(run.rewards)), _smoothed(run.rewards), label=name, color=colour, linewidth=2)
        axes.plot(_steps(len(run.rewards)), run.rewards, color=line.get_color(), alpha=0.25, linewidth=1)
    axes.axhline(LEARNT, color="green", linestyle="--", linewidth=1)
    axes.axhline(UNLEARNT, color="grey", linestyle="--", linewidth=1)
    axes.set(ylim=(0, 1.02), xlabel=f"step ({EPISODES} episodes each)", ylabel="mean reward")
    axes.set_title(f"A tiny policy learns on real episodes (bold: mean of up to {WINDOW} steps)")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, format="png")


def _steps(count: int) -> list[int]:
    return list(range(1, count + 1))


def _smoothed(rewards: Sequence[float]) -> list[float]:
    windows = [rewards[max(0, end - WINDOW) : end] for end in range(1, len(rewards) + 1)]
    return [sum(window) / len(window) for window in windows]
