"""What TRL's numbers tell: one sentence each, and what to look at first when there is nothing to learn from."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.vocabulary import Outcome

SIGNALS: Mapping[str, str] = {
    "reward": "mean task score of the scored completions, from 0 to 1",
    "reward_std": "spread of the scores; 0 means that all were alike",
    "frac_reward_zero_std": "share of groups with identical rewards; they give GRPO no difference to learn from",
    "tools/call_frequency": "tool calls per completion; 0 means that none of the model's calls was understood",
    "tools/failure_frequency": "share of calls that raised; a command that failed in its shell is an observation",
    "completions/mean_length": "tokens that the model wrote per completion, without tool results; 0 for one left out",
    "completions/clipped_ratio": "share of completions cut off at the token limit, often before they submitted",
    "loss": "what the optimizer saw; 0 can be right when every completion of a group has the same reward",
    "train_loss": "mean of the losses of the run; 0 can be right, as for loss",
    "grad_norm": "size of the update; 0 means that no weight moved",
    "entropy": "how undecided the model is; close to 0 it explores no more",
    "kl": "how far the model has moved from where it started",
    "step_time": "seconds of a step, generation and episodes included",
    "episodes/finished": "episodes that ended, with a score or without",
    "episodes/aborted": "episodes that our side lost; never trained on, never a zero",
    "episodes/excluded": "completions left out of the training data: the aborted ones and the rest of dropped groups",
    "groups/dropped": "groups with fewer than two scored members, left out whole",
    "groups/identical_rewards": "groups in which every score was the same",
}
"""By the name in the logs."""


AVERAGED = ("reward", "frac_reward_zero_std", "tools/call_frequency", "completions/clipped_ratio")
"""Judged by their means over the run: one unlucky step says nothing of it, nor one lucky one."""


_MANY = 0.1
"""Of the episodes: more is no bad luck of one."""


def mean_name(name: str) -> str:
    """What the mean over the run of one of `AVERAGED` is called."""
    return f"run_mean/{name}"


def is_count(name: str) -> bool:
    """Whether the number counts what there was since the last log, so that those of several logs add up."""
    return name.removeprefix("eval_").startswith(("episodes/", "groups/"))


def told(logs: Mapping[str, float | None]) -> list[dict[str, object]]:
    """The known signals in `logs` with what each tells, in the order above; then how episodes were aborted."""
    found: list[dict[str, object]] = [
        {"signal": name, "value": logs[name], "tells": tells} for name, tells in SIGNALS.items() if name in logs
    ]
    prefix = "episodes/aborted/"
    for name in sorted(name for name in logs if name.startswith(prefix)):
        found.append({"signal": name, "value": logs[name], "tells": f"of them: {name.removeprefix(prefix)}"})
    return found


def advice(logs: Mapping[str, float | None], outcomes: Mapping[str, int] | None = None) -> list[str]:
    """What to look at, most basic first, given a run's means and counts; empty when there was something to learn.

    `outcomes` are how many of its episodes ended how.
    """
    reward, alike, calls, cut = (logs.get(mean_name(name)) for name in AVERAGED)
    found = []
    if calls == 0:
        found.append("no tool was called: see whether the model writes calls that its template's parser understands")
    if cut is not None and cut > 0.5:
        found.append("most completions were cut off: raise --max-completion-length, or shorten the prompts")
    if reward == 0:
        found.append("every score was 0: look at the receipts' outcomes; not_submitted comes before wrong_answer")
    if alike == 1:
        found.append("no group had a difference to learn from: more --completions, or tasks of another difficulty")
    late, ended = (outcomes or {}).get(Outcome.WINDOW_EXHAUSTED, 0), sum((outcomes or {}).values())
    if late > _MANY * ended:
        found.append(
            f"{late} of {ended} episodes ran out of time, which scores 0 whatever they had done: raise "
            "FARM_BUDGETS__POLICY_WINDOW_SECONDS, generate faster, or use smaller batches"
        )
    if logs.get("episodes/aborted"):
        found.append("episodes were aborted: rollout-farm status and the receipts say why")
    return found
