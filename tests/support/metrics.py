"""What an orchestrator's /metrics says, and whether that equals the receipts: counted once more, from them alone.

What always holds: nothing here asks farm:counters or the product's own counting, so an error in either is a difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.web_server import serving
from orchestrator.farm import Farm
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import Operation, SettledReceipt
from orchestrator.web import create_app

Name = tuple[str, frozenset[tuple[str, str]]]
"""A series: its name and its labels."""

Series = Mapping[Name, float]

_COUNTERS = ("farm_episodes", "farm_tool_calls", "farm_cleanups", "farm_sandboxes_created")
_AMOUNTS = ("farm_cost_usd", "farm_sandbox_seconds")
_HISTOGRAMS = ("farm_episode_phase_seconds", "farm_tool_call_seconds", "farm_episode_reward", "farm_episode_cost_usd")
_FROM_RECEIPTS = {
    *(f"{name}_total" for name in (*_COUNTERS, *_AMOUNTS)),
    *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "count", "sum")),
}
"""What nothing but receipts and their sandboxes moves."""


def series(text: str) -> Series:
    """Every sample by name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


def scrape(farm: Farm) -> str:
    """What an orchestrator of its own answers."""
    with serving(create_app(farm), "127.0.0.1", 0) as url:
        return httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text


def differences(farm: Farm, found: Series) -> list[str]:
    """Where totals are not those of the receipts, to the last digit; what receipts do not know of has to be nought."""
    settled = Receipts(farm.redis, farm.ledger.allocations).select(ReceiptFilter())
    wanted = _of_receipts(settled, bounds={key for key in found if key[0].endswith("_bucket")})
    names = {key for key in found if key[0] in _FROM_RECEIPTS} | wanted.keys()
    said = {key: (found.get(key), float(wanted.get(key, 0))) for key in names}
    return sorted(
        f"{name}{dict(sorted(labels))} says {scraped}, the receipts {counted}"
        for (name, labels), (scraped, counted) in said.items()
        if scraped != counted
    )


def check_equal(farm: Farm, found: Series) -> None:
    """There are receipts, and every total is theirs."""
    assert sum(amount for (name, _), amount in found.items() if name == "farm_episodes_total") > 0
    assert differences(farm, found) == []


def _of_receipts(receipts: Iterable[SettledReceipt], *, bounds: Iterable[Name]) -> dict[Name, Decimal]:
    """Every total; of histograms those buckets that `bounds` names."""
    totals: Counter[Name] = Counter()
    seen: dict[Name, list[Decimal]] = defaultdict(list)

    def add(name: str, amount: Decimal | int = 1, **labels: str) -> None:
        totals[f"{name}_total", frozenset(labels.items())] += amount  # type: ignore[assignment]

    def see(name: str, amount: Decimal, **labels: str) -> None:
        seen[name, frozenset(labels.items())].append(amount)

    for settled in receipts:
        receipt = settled.receipt
        add("farm_episodes", outcome=receipt.outcome)
        for phase, seconds in receipt.phases.items():
            see("farm_episode_phase_seconds", Decimal(repr(seconds)), phase=phase)
        for step in receipt.operations:
            if step.name in ("terminal", "submit"):
                add("farm_tool_calls", tool=step.name, result=_went(step, scored=receipt.reward is not None))
            if step.name == "terminal":
                see("farm_tool_call_seconds", Decimal(repr(step.seconds)))
        if receipt.reward is not None:
            see("farm_episode_reward", Decimal(repr(receipt.reward)))
        for row in settled.allocations:
            if row.state.settled:
                add("farm_cleanups", result=row.state)
            if row.unresolved_at is not None:
                add("farm_cleanups", result="unresolved")
            if row.sandbox_id is not None:
                add("farm_sandboxes_created", role=row.role)
            add("farm_cost_usd", Decimal(row.cost_picousd or 0) / 10**12, role=row.role)
            add("farm_sandbox_seconds", Decimal(repr(row.running_seconds or 0)), role=row.role)
        if all(row.state.settled for row in settled.allocations):
            cost = sum(row.cost_picousd or 0 for row in settled.allocations)
            see("farm_episode_cost_usd", Decimal(cost) / 10**12)
    counted: dict[Name, Decimal] = dict(totals)  # type: ignore[arg-type]
    for (name, labels), amounts in seen.items():
        counted[f"{name}_sum", labels] = sum(amounts, Decimal(0))
        counted[f"{name}_count", labels] = Decimal(len(amounts))
    for name, labels in bounds:
        (bound,) = (Decimal(text) for label, text in labels if label == "le")
        rest = frozenset((label, text) for label, text in labels if label != "le")
        amounts = seen.get((name.removesuffix("_bucket"), rest), [])
        counted[name, labels] = Decimal(sum(amount <= bound for amount in amounts))
    return counted


def _went(step: Operation, *, scored: bool) -> str:
    if step.timed_out:
        return "timed_out"
    if step.ok:
        return "failed" if step.exit_code else "ok"
    return "failed" if scored else "lost"
