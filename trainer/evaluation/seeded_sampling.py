"""Sampling in which each row of a batch has a seed of its own; needs torch and transformers.

What always holds: a row's tokens depend on its seed, its turn and its own logits, not on its neighbours, so that an
episode is sampled alike in whatever batch it meets the model (up to the rounding of a batch's shape). transformers
draws a whole batch from one generator; so decoding is told to be greedy, and the draw is made here, as a race: with E
exponential, the arg max of p / E is a sample of p. One number a token and not one a row: the inverse of the summed
probabilities would hang on the rounding of every token in front, and rare tokens would differ from batch to batch.
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

_SHORTEST = 1e-30
"""Instead of a wait of 0, so that a token without any probability stays at 0."""


class RowDraws(LogitsProcessor):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Turns scores [rows, vocabulary] into numbers whose arg max is a sample, each row by its own generator.

    On CUDA the generators are the device's: a vocabulary's draws on the CPU would take longer than the model's step. So
    a seed samples alike on one kind of device. `exponential_` is not used: on a CPU it is several times slower.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = tuple(seeds)
        self._generators: list[torch.Generator] = []

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, each where it is."""
        self._seeds = tuple(self._seeds[row] for row in rows)
        self._generators = [self._generators[row] for row in rows if self._generators]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Numbers from 0 whose arg max is a sample; 0 is what has no probability."""
        place = scores.device if scores.device.type == "cuda" else torch.device("cpu")
        if not self._generators:
            self._generators = [torch.Generator(place).manual_seed(seed) for seed in self._seeds]
        race: torch.FloatTensor = scores.float().softmax(-1)  # type: ignore[assignment, unused-ignore]
        for row, generator in zip(race, self._generators, strict=True):
            # 53 bits: in a large vocabulary the winner's number is tiny, and 24 bits would often make it 0
            drawn = torch.rand(scores.shape[-1], generator=generator, dtype=torch.float64, device=place)
            wait = drawn.float().neg_().log1p_().neg_().clamp_min_(_SHORTEST)  # exponential
            row.div_(wait.to(scores.device))
        return race


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
    made.append(RowDraws(seeds))
    return made


def keep_rows(made: LogitsProcessorList, rows: Sequence[int]) -> None:
    """Let what `processors` made go on with these rows only."""
    for it in made:
        if isinstance(it, RowDraws):
            it.keep(rows)
