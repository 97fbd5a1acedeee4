"""Sampling in which each row of a batch has a seed of its own; needs torch and transformers.

What always holds: a row's tokens depend on its seed, its turn and its own logits, not on its neighbours, so that an
episode is sampled alike in whatever batch it meets the model (up to the rounding of a batch's shape). transformers
draws a whole batch from one generator; so decoding is told to be greedy, and the noise is added here: the arg max of
log p + Gumbel noise is a sample of p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainer.evaluation.identity import Sampling


class RowNoise(LogitsProcessor):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Adds Gumbel noise to scores [rows, vocabulary], each row from its own generator, made here."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores whose arg max is a sample; what has probability zero keeps it."""
        waits = [torch.empty(scores.shape[-1]).exponential_(generator=generator) for generator in self._generators]
        noisy: torch.FloatTensor = scores.float() - torch.stack(waits).to(scores.device).log()
        return noisy


def processors(sampling: Sampling, seeds: Sequence[int]) -> LogitsProcessorList:
    """What makes greedy decoding sample as `sampling` says; one seed a row. Temperature 0 adds nothing."""
    made = LogitsProcessorList()
    if sampling.temperature == 0:
        return made
    if sampling.temperature != 1:
        made.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        made.append(TopPLogitsWarper(sampling.top_p))
    made.append(RowNoise(seeds))
    return made
