"""The parts of the truth, put together over one Redis: what every process of the farm begins with.

Made from settings alone; makes no request, so it may be built before a fork (its clients connect at first use).
"""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from orchestrator.allocations import Allocations
from orchestrator.budget import Budget
from orchestrator.connection import SILENT_SECONDS, client
from orchestrator.errors import RedisUnavailable
from orchestrator.ledger import Ledger
from orchestrator.limiter import Limiter
from orchestrator.presence import Presence
from orchestrator.queue import JobQueue
from orchestrator.settings import Settings


@dataclass(frozen=True)
class Farm:
    """Ledger, limiter, budget, presence and queue of one farm."""

    settings: Settings
    redis: Redis
    ledger: Ledger
    limiter: Limiter
    budget: Budget
    presence: Presence
    queue: JobQueue


def open_farm(settings: Settings, *, patient: bool = True, answer_seconds: float = SILENT_SECONDS) -> Farm:
    """The farm that these settings name; raises RedisUnavailable when they name no Redis.

    `patient` is about Redis calls that fail (connection.py).
    """
    if settings.redis_url is None:
        raise RedisUnavailable("REDIS_URL is not set; set it, or use the embedded stack (rollout-farm up)")
    redis = client(settings, patient=patient, answer_seconds=answer_seconds)
    retention = settings.receipt_retention_seconds
    rates = settings.rates()
    concurrency, rate = settings.limits()
    return Farm(
        settings=settings,
        redis=redis,
        ledger=Ledger(
            redis,
            Allocations(redis, rates=rates, retention_seconds=retention),
            retention_seconds=retention,
            queue=settings.queue,
        ),
        limiter=Limiter(redis, concurrency_limit=concurrency, creation_rate=rate, rates=rates),
        budget=Budget(redis),
        presence=Presence(
            redis, slot_seconds=settings.lease_lost_seconds, trainer_seconds=settings.trainer_lost_seconds
        ),
        queue=JobQueue(client(settings, text=False, patient=patient, answer_seconds=answer_seconds), settings.queue),
    )
