"""What a sandbox costs: running time times its real size. Pure, in integer pico-dollars (10^-12 USD).

Source: the provider bills running seconds x (vCPUs x CPU rate + GiB x memory rate) of what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

PICO = Decimal(10) ** 12


@dataclass(frozen=True)
class Rates:
    """Prices in USD per vCPU-second and per GiB-second."""

    vcpu_usd_per_second: float
    gib_usd_per_second: float


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
