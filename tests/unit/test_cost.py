"""Money is exact, in integer pico-dollars."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cost import Rates, cost_picousd, usd

RATES = Rates(0.000014, 0.0000045)
sizes = st.integers(min_value=1, max_value=64)
memories = st.integers(min_value=1, max_value=512 * 1024)
days = st.integers(min_value=0, max_value=86_400_000)


@given(days, sizes, memories)
def test_the_cost_is_the_exact_product_rounded_once(running_ms: int, vcpus: int, memory_mb: int) -> None:
    exact = Fraction(running_ms, 1000) * (
        Fraction("0.000014") * vcpus + Fraction("0.0000045") * Fraction(memory_mb, 1024)
    )
    assert abs(cost_picousd(running_ms, vcpus=vcpus, memory_mb=memory_mb, rates=RATES) - exact * 10**12) <= Fraction(
        1, 2
    )


@given(days, days, sizes, memories)
def test_running_longer_never_costs_less(first: int, second: int, vcpus: int, memory_mb: int) -> None:
    short, long = sorted((first, second))
    assert cost_picousd(short, vcpus=vcpus, memory_mb=memory_mb, rates=RATES) <= cost_picousd(
        long, vcpus=vcpus, memory_mb=memory_mb, rates=RATES
    )


def test_an_hour_of_two_vcpus_and_half_a_gibibyte() -> None:
    cost = cost_picousd(3_600_000, vcpus=2, memory_mb=512, rates=RATES)
    assert usd(cost) == Decimal("0.1089")


def test_one_day_of_the_largest_sandbox_fits_the_counters() -> None:
    """A Lua number is a double: what one script adds has to stay below 2^53."""
    assert cost_picousd(86_400_000, vcpus=64, memory_mb=512 * 1024, rates=RATES) < 2**53


def test_nothing_that_ran_for_no_time_costs_anything() -> None:
    assert cost_picousd(0, vcpus=2, memory_mb=512, rates=RATES) == 0
