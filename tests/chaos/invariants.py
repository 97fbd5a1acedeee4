"""What must hold when a round is over: pure functions over what was read, which return violations as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.counts import counts_of
from orchestrator.records import Allocation, SettledReceipt
from orchestrator.vocabulary import AllocationState, Outcome, Phase, Role
from tests.chaos.budgets import BUDGETS

_VERIFIED = (Outcome.SOLVED, Outcome.WRONG_ANSWER, Outcome.CANDIDATE_FAILED)
"""What only a verifier can have found out."""

_ROUNDING_SECONDS = 0.001

_RECEIPTS_OWN = ("episodes:", "cost_", "phase:", "tool_call", "reward:", "episode_cost:sum")
"""What counters begin with that nothing but receipts and their sandboxes moves."""


@dataclass(frozen=True)
class Reading:
    """The farm after a round. Times are unix seconds."""

    expected: Mapping[str, float]
    """Every episode that was submitted, with its undisturbed score."""
    told: Mapping[str, float]
    """Rewards that the trainer was told."""
    receipts: Mapping[str, SettledReceipt]
    written_at: Mapping[str, float]
    """When each receipt was written."""
    announced: Sequence[str]
    """Episodes in the run's stream of finished ones."""
    counters: Mapping[str, int]
    metrics: Sequence[str]
    """Where what is scraped is not what the receipts say (tests/support/metrics.py), as sentences."""
    leftovers: Mapping[str, Sequence[str]]
    """What is left, by kind: sandboxes, leases, permits, keys, processes, directories..."""


def violations(reading: Reading) -> list[str]:
    """Everything that is wrong with a round."""
    return [
        *_receipts(reading),
        *_scores(reading),
        *_absences(reading),
        *_counters(reading),
        *reading.metrics,
        *(f"left: {kind}: {item}" for kind, items in reading.leftovers.items() for item in items),
    ]


def shows_nothing(outcomes: Mapping[str, int], blows: Mapping[str, int], planned: Iterable[str]) -> list[str]:
    """Why a round proves less than it seems to, whatever held in it: episodes by outcome, blows by kind that fell.

    `planned` are the kinds that had to fall.
    """
    found = []
    if not outcomes.get(Outcome.SOLVED):
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "none ended at all"
        found.append(f"no episode was solved ({ended}): what is not hit has to go on")
    found += [
        f"no blow ever fell on {kind}: the round was over before, or there was never one to strike"
        for kind in planned
        if not blows.get(kind)
    ]
    return found


def _receipts(reading: Reading) -> Iterable[str]:
    announced = Counter(reading.announced)
    for episode in reading.expected:
        if episode not in reading.receipts:
            yield f"{episode} has no receipt"
        if announced[episode] != 1:
            yield f"{episode} was announced {announced[episode]} times"
    for episode in reading.receipts.keys() - reading.expected.keys():
        yield f"{episode} has a receipt and was never submitted"


def _scores(reading: Reading) -> Iterable[str]:
    for episode, settled in reading.receipts.items():
        receipt = settled.receipt
        if not receipt.outcome.scored and receipt.reward is not None:
            yield f"{episode} ended {receipt.outcome} and has the reward {receipt.reward}"
        earned = reading.expected.get(episode)
        # A window that ended while the farm was down is the one honest zero beside the policy's own.
        window = receipt.phases.get(Phase.POLICY, 0.0) + _ROUNDING_SECONDS
        ran_out = receipt.outcome is Outcome.WINDOW_EXHAUSTED and window > BUDGETS.policy_window_seconds
        if receipt.outcome.scored and receipt.reward != earned and not ran_out:
            yield f"{episode} scored {receipt.reward} ({receipt.outcome}), its policy earns {earned}"
        if episode in reading.told and reading.told[episode] != receipt.reward:
            yield f"the trainer was told {reading.told[episode]} of {episode}, its receipt says {receipt.reward}"


def _absences(reading: Reading) -> Iterable[str]:
    for episode, settled in reading.receipts.items():
        if len(settled.allocations) != len(settled.receipt.allocations):
            yield f"{episode}: {len(settled.receipt.allocations)} allocations, {len(settled.allocations)} rows"
        absent = Counter(row.role for row in settled.allocations if row.state is AllocationState.ABSENT)
        if settled.receipt.outcome in _VERIFIED and absent != {Role.POLICY: 1, Role.VERIFIER: 1}:
            yield f"{episode} ended {settled.receipt.outcome}, its absent sandboxes: {dict(absent)}, not one of each"
        for row in settled.allocations:
            if not row.state.settled:
                yield f"{row.allocation_id} is still {row.state}"
            if settled.receipt.outcome.scored and not _confirmed(row, reading.written_at[episode]):
                yield f"{episode} has a score and {row.allocation_id} was {row.state} then, absent at {row.absent_at}"


def _confirmed(row: Allocation, by: float) -> bool:
    if row.state is AllocationState.REFUSED:
        return True
    return row.state is AllocationState.ABSENT and row.absent_at is not None and row.absent_at <= by


def _counters(reading: Reading) -> Iterable[str]:
    wanted: Counter[str] = Counter()
    for settled in reading.receipts.values():
        wanted[f"episodes:{settled.receipt.outcome}"] += 1
        wanted.update(counts_of(settled.receipt))
        wanted["episode_cost:sum"] += settled.cost_picousd
        for row in settled.allocations:
            if row.state is AllocationState.ABSENT:
                wanted[f"cost_picousd:{row.role}"] += row.cost_picousd or 0
                wanted[f"sandbox_ms:{row.role}"] += round(1000 * (row.running_seconds or 0))
    for name in sorted(wanted.keys() | {name for name in reading.counters if name.startswith(_RECEIPTS_OWN)}):
        if reading.counters.get(name, 0) != wanted[name]:
            yield f"counter {name} says {reading.counters.get(name, 0)}, the receipts {wanted[name]}"
