"""The orchestrator's endless rounds: lead, reconcile, rest; one leader at a time over all orchestrators.

What always holds: a round that fails is logged and followed by another; a Redis that was away is never mistaken for
workers that are gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis import Redis
from redis.exceptions import RedisError

from orchestrator.leadership import Leadership
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
    away = False
    while not stop.is_set():
        try:
            if leadership.take():
                if away:
                    reconciler.interrupted()
                    away = False
                on_report(reconciler.run_once(leading=leadership.take))
            else:
                away = True  # whatever time passed while another led, it was not ours to judge leases by
        except RedisError as error:
            away = True
            logger.warning("Redis is away: %s", error)
        except Exception:
            logger.exception("round failed; another follows")
        stop.wait(every_seconds)
    try:
        leadership.give_back()
    except RedisError as error:
        logger.warning("leadership not given back: %s", error)
