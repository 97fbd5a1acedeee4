"""What a sandbox costs: running time times its real size. Pure, in integer pico-dollars (10^-12 USD).

Source: the provider bills running seconds x (vCPUs x CPU rate + GiB x memory rate) of what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_UP, Decimal, InvalidOperation
from enum import StrEnum
from functools import cache

from orchestrator.errors import SettingsError

PICO = Decimal(10) ** 12

HIGHEST_USD_PER_SECOND = 0.001
"""Seventy times the list price of a vCPU: a higher rate is a slip, and products stay exact in the scripts' doubles."""

HIGHEST_USD = 1_000_000
"""The highest limit of a budget: in pico-dollars it still is a 64-bit integer, with room for what is added to it."""


class By(StrEnum):
    """What a bill is split by."""

    ROLE = "role"
    TASK = "task"
    OUTCOME = "outcome"
    DAY = "day"
    RUN = "run"
    GROUP = "group"
    EPISODE = "episode"


@dataclass(frozen=True)
class Size:
    """What one sandbox is allocated."""

    vcpus: int
    memory_mb: int
    """MiB."""


@dataclass(frozen=True)
class Rates:
    """Prices in USD per vCPU-second and per GiB-second."""

    vcpu_usd_per_second: float
    gib_usd_per_second: float
    assumed: Size = Size(2, 512)
    """The size of a sandbox whose real one is not known (yet)."""

    @classmethod
    def of_picousd(cls, per_vcpu_second: int, per_gib_second: int) -> Rates:
        """Prices that were noted as whole pico-dollars."""
        return cls(float(usd(per_vcpu_second)), float(usd(per_gib_second)))

    @property
    def vcpu_picousd(self) -> int:
        """Pico-dollars per vCPU-second, rounded up."""
        return _ceiling(self.vcpu_usd_per_second)

    @property
    def gib_picousd(self) -> int:
        """Pico-dollars per GiB-second, rounded up."""
        return _ceiling(self.gib_usd_per_second)


LIST_PRICES = Rates(0.000014, 0.0000045)
"""E2B's public prices, and its default sandbox."""


def cost_picousd(running_ms: int, *, vcpus: int, memory_mb: int, rates: Rates) -> int:
    """Pico-dollars of one sandbox that ran `running_ms` milliseconds."""
    per_second = Decimal(str(rates.vcpu_usd_per_second)) * vcpus
    per_second += Decimal(str(rates.gib_usd_per_second)) * memory_mb / 1024
    return int((per_second * running_ms / 1000 * PICO).to_integral_value(ROUND_HALF_UP))


def usd(picousd: int) -> Decimal:
    """Pico-dollars as dollars."""
    return Decimal(picousd) / PICO


def usd_text(picousd: int) -> str:
    """Pico-dollars as dollars in plain decimal digits, exactly: never an exponent, never a binary fraction."""
    return f"{usd(picousd):f}"


def parse_usd(amount: Decimal | float | str, *, name: str) -> int:
    """Dollars as pico-dollars; raises SettingsError, that says `name`, for what no budget can be."""
    try:
        dollars = Decimal(str(amount).strip().removeprefix("$"))
    except InvalidOperation:
        raise SettingsError(f"{name} is an amount in US dollars such as 2.50, got {amount!r}") from None
    if not dollars.is_finite() or not 0 <= dollars <= HIGHEST_USD:
        raise SettingsError(f"{name} is 0 to {HIGHEST_USD} US dollars, got {amount}")
    if 0 < dollars * PICO < 1:
        raise SettingsError(f"{name} is 0 or at least {1 / PICO:f} US dollars, the smallest unit counted, got {amount}")
    return int((dollars * PICO).to_integral_value(ROUND_HALF_UP))


@cache  # each admission asks for the same two
def _ceiling(usd_per_second: float) -> int:
    return int((Decimal(str(usd_per_second)) * PICO).to_integral_value(ROUND_CEILING))
