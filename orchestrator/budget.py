"""The hard cap on what is spent: the farm's budget and one for each run, in dollars (an episode's time budgets are
`settings.Budgets`).

What always holds: spent + reserved never exceeds a limit by an admission. An episode's permit comes with a reservation
of the most that its policy sandbox and its verifier can cost, made in the same script (acquire_permit.lua), so the cap
holds though every host dies at that moment. What a sandbox really cost takes the place of its reservation in the script
that settles it, whoever does so. Both are counted whether there is a limit or not, so a limit can be set at any time;
one that is set below what is spent or reserved lets running episodes finish and admits no other.

Why Redis alone holds limits, and no setting of a process: a cap that differs from host to host is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from redis import Redis

from orchestrator.cost import parse_usd, usd_text
from orchestrator.keys import Keys
from orchestrator.scripts import Scripts


@dataclass(frozen=True)
class Balance:
    """A budget as it stands, in pico-dollars."""

    limit_picousd: int | None
    spent_picousd: int
    """By settled sandboxes, and, at its longest life, by what may have run without ever being named."""
    reserved_picousd: int
    """The most that the sandboxes of running episodes can still cost."""

    @property
    def left_picousd(self) -> int | None:
        """What can still be reserved; negative where the limit was lowered; None without a limit."""
        return None if self.limit_picousd is None else self.limit_picousd - self.spent_picousd - self.reserved_picousd

    def as_json(self) -> dict[str, Any]:
        """For a program's eyes: dollars as exact decimals."""
        named = {
            "limit_usd": self.limit_picousd,
            "spent_usd": self.spent_picousd,
            "reserved_usd": self.reserved_picousd,
            "left_usd": self.left_picousd,
        }
        return {name: None if amount is None else usd_text(amount) for name, amount in named.items()}


UNTOUCHED = Balance(None, 0, 0)
"""Of a farm or run that never spent anything."""


class Budget:
    """Reads and changes the limits; what is spent and reserved is moved by the scripts of limiter and ledger."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)

    def read(self, run_id: str | None = None) -> Balance:
        """The balance of one run, or the farm's."""
        return _balance(cast("list[str | None]", self._redis.hmget(Keys.budget(run_id), _FIELDS)))

    def known(self, run_id: str) -> bool:
        """Whether the run has spent or reserved anything, or has a limit."""
        return bool(self._redis.exists(Keys.budget(run_id)))

    def set(self, amount: Decimal | float | str | None, *, run_id: str | None = None) -> Balance:
        """Limit what a run, or the farm, may spend in all, counted from its beginning; None takes the limit away.

        Raises SettingsError for an amount that is none.
        """
        limit: int | str = "" if amount is None else parse_usd(amount, name="a budget")
        of_a_run = int(run_id is not None)
        return _balance(self._scripts.run("change_budget", [Keys.budget(run_id)], [limit, of_a_run]))


_FIELDS = ["limit", "spent", "reserved"]


def _balance(row: list[str | None]) -> Balance:
    limit, spent, reserved = row
    return Balance(None if limit is None else int(limit), int(spent or 0), int(reserved or 0))
