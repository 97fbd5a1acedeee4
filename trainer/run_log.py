"""The files of one run: a line of numbers for each log of TRL's, and each receipt as it comes.

What always holds: `metrics.jsonl` and `receipts.jsonl` are complete lines, appended as things happen, so an interrupted
run keeps what it has; receipts are read from the run's own stream, whichever process drove the episode; that one could
not be written ends the run's block, unless another error does.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import TrainerCallback

from orchestrator.connection import redis_border
from orchestrator.errors import RedisUnavailable, SettingsError
from orchestrator.finished import START, Finished
from orchestrator.pool import Pool
from orchestrator.records import SettledReceipt
from trainer.signals import AVERAGED, is_count, mean_name

logger = logging.getLogger(__name__)

_AS_IT_IS = "surrogateescape"
"""Bytes that are no text are written back as they were."""

_BLOCK_SECONDS = 1.0
"""How long one read of the stream waits: how soon the end of the run is noticed."""


class ReceiptLog:
    """Appends the run's receipts to a file from a thread of its own, while the block lasts.

    Leaving the block raises what kept the thread from it: the file's OSError, a receipt that cannot be read, a Redis
    that is away at the end, whatever `on_receipt` raised.
    """

    def __init__(self, pool: Pool, path: Path, on_receipt: Callable[[SettledReceipt], None]) -> None:
        self.episode_ids: list[str] = []
        """Of the run, in the order in which they ended."""
        self._pool = pool
        self._path = path
        self._on_receipt = on_receipt
        self._finished = Finished(pool.redis, pool.run_id)
        self._position = START
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="receipts", daemon=True)

    def __enter__(self) -> ReceiptLog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def receipts(self) -> list[SettledReceipt]:
        """All of them, with their sandboxes as they stand now."""
        found = [redis_border(self._pool.ledger.receipt)(name) for name in self.episode_ids]
        return [settled for settled in found if settled is not None]

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._read(_BLOCK_SECONDS)
                except RedisUnavailable as error:
                    logger.warning("receipts not read: %s", error)
                    self._stop.wait(_BLOCK_SECONDS)
            self._read(0.001)  # what ended until the stop is in it
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            logger.error("receipts not written from here on: %s", error)
            self._failure = error

    def _read(self, seconds: float) -> None:
        while entries := redis_border(self._finished.after)(self._position, seconds):
            for position, episode_id in entries:
                settled = redis_border(self._pool.ledger.receipt)(episode_id)
                if settled is not None:
                    append(self._path, settled.as_json())
                    self.episode_ids.append(episode_id)
                self._position = position
                if settled is not None:
                    self._on_receipt(settled)


class MetricsLog(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Appends TRL's logs to a file, in the first process only, and keeps what they come to at the end.

    What the file holds of a run that is gone on with counts too: `read_back` before the first log.
    """

    def __init__(self, path: Path, on_step: Callable[[int], None]) -> None:
        self.summary: dict[str, float | None] = {}
        """Counts of the whole run, of every other number the newest; means over the run of those to be judged by."""
        self._averaged: dict[str, tuple[float, int]] = {}
        """Sum and count."""
        self._path = path
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """TRL logged."""
        numbers = {name: _finite(value) for name, value in (logs or {}).items()}
        self._add(numbers)
        if state.is_world_process_zero:
            append(self._path, {"step": state.global_step, "time": time.time(), **numbers})

    def read_back(self) -> None:
        """Take what the file holds for logged."""
        for line in _whole_lines(self._path):
            row = json.loads(line)
            self._add({name: row[name] for name in row.keys() - {"step", "time"} if _is_number(row[name])})

    def _add(self, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            if is_count(name):
                self.summary[name] = (self.summary.get(name) or 0) + (value or 0)
            else:
                self.summary[name] = value
            if name in AVERAGED and value is not None:
                total, count = self._averaged.get(name, (0.0, 0))
                self._averaged[name] = total + value, count + 1
                self.summary[mean_name(name)] = (total + value) / (count + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer made a step."""
        self._on_step(state.global_step)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """One line, whole."""
    with path.open("a") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")


def lines_until(path: Path, step: int) -> list[str]:
    """The whole lines of a file of numbers, without those of later steps; raises SettingsError for any other line."""
    kept = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            later = json.loads(line)["step"] > step
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SettingsError(
                f"{path}:{number}: is no line of a run's numbers; mend or remove that line, then --resume again"
            ) from None
        if not later:
            kept.append(line)
    return kept


def take_back(path: Path, *, after_step: int | None = None) -> None:
    """Drop a last line that was cut short, and lines of later steps, which a resumed run makes anew."""
    if not path.exists():
        return
    kept = _whole_lines(path) if after_step is None else lines_until(path, after_step)
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(kept), errors=_AS_IT_IS)
    fresh.replace(path)


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(errors=_AS_IT_IS) if path.exists() else ""
    return [f"{line}\n" for line in text.split("\n")[:-1]]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value: Any) -> bool:
    """Whether a value of the file is one that was logged; None is a number that JSON has not."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
