"""The orchestrator's endless rounds: lead, reconcile, rest; one leader at a time over all orchestrators.

What always holds: a round that fails is logged and followed by another; a Redis that was away is never mistaken for
workers that are gone. A rest may be longer than a lease or the lead: in short beats Redis is asked and the lead kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from redis import Redis
from redis.exceptions import RedisError

from orchestrator.leadership import LEAD_SECONDS, Leadership
from orchestrator.reconciler import Reconciler, Report

logger = logging.getLogger(__name__)


def run_rounds(
    redis: Redis,
    reconciler: Reconciler,
    name: str,
    *,
    every_seconds: float,
    stop: threading.Event,
    on_report: Callable[[Report], None],
) -> None:
    """Reconcile every `every_seconds` while this process leads, until `stop` is set."""
    leadership = Leadership(redis, name)
    beat_seconds = min(every_seconds, reconciler.beat_seconds, LEAD_SECONDS / 4)
    away = False
    due = time.monotonic()
    while not stop.is_set():
        now_due = time.monotonic() >= due
        try:
            if leadership.take():
                if away:
                    reconciler.interrupted()
                    away = False
                if now_due:
                    with leadership.kept():
                        report = reconciler.run_once(leading=leadership.take)
                    on_report(report)
                else:
                    reconciler.beat()
            else:
                away = True  # whatever time passed while another led, it was not ours to judge leases by
        except RedisError as error:
            away = True
            logger.warning("Redis is away: %s", error)
        except Exception:
            logger.exception("round failed; another follows")
        if now_due:
            due = time.monotonic() + every_seconds
        stop.wait(min(beat_seconds, max(0.0, due - time.monotonic())))
    try:
        leadership.give_back()
    except RedisError as error:
        logger.warning("leadership not given back: %s", error)
