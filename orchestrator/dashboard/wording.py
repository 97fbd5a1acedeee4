"""How numbers and moments read on the page: with units, as short as they stay exact enough to watch."""

from __future__ import annotations

from datetime import UTC, datetime

from orchestrator.cost import usd


def dollars(picousd: int) -> str:
    """Money: cents, or as many digits as small amounts need."""
    amount = usd(picousd)
    if amount == 0:
        return "$0"
    digits = 2 if abs(amount) >= 1 else 4 if abs(amount) >= 0.01 else 6
    return f"${amount:,.{digits}f}"


def dollars_short(picousd: float) -> str:
    """Money on an axis: two digits that count."""
    amount = picousd / 1e12
    return "$0" if not amount else f"${amount:,.0f}" if amount >= 10 else f"${amount:.2g}"


def seconds(value: float) -> str:
    """A length of time."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60} min {int(value) % 60:02d} s"
    return f"{int(value) // 3600} h {int(value) % 3600 // 60:02d} min"


def clock(moment: float | None) -> str:
    """A moment of the day, UTC."""
    return "-" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S}"


def day_and_clock(moment: float | None) -> str:
    """A moment, UTC."""
    return "-" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}"


def size(count: int) -> str:
    """Bytes."""
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB"


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
