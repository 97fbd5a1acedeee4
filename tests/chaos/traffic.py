"""The trainer's side of a round: episodes of every kind, half of them driven from here, and what it was told of each.

What always holds: every episode is submitted once under an id of its own, whatever dies meanwhile; the trainer believes
only what the client said.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from orchestrator.episodes import Episode
from orchestrator.errors import EpisodeAborted, RedisUnavailable
from orchestrator.pool import Pool
from orchestrator.records import Script
from orchestrator.settings import Settings
from tests.support.policies import candidate, repaired, weekly_sales

_DRIVERS = 8
"""Remote episodes that are driven side by side."""

_CALLS = "/tmp/calls"
"""In the policy sandbox of a remote episode: the number of each command that was carried out, one a line."""

_PATIENCE_SECONDS = 60.0
"""How long the trainer tries again while Redis is away."""

T = TypeVar("T")


@dataclass
class Traffic:
    """What was asked for and what came of it. `expected`: the score an undisturbed episode has."""

    run_id: str
    expected: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    """Rewards that the client returned, by episode."""
    faults: list[str] = field(default_factory=list)
    """What the client did that it must not do."""
    done: threading.Event = field(default_factory=threading.Event)


def drive(settings: Settings, count: int, seed: int) -> tuple[Traffic, Future[None]]:
    """Begin to submit and drive `count` episodes in threads; the future ends when each has its receipt."""
    traffic = Traffic(f"chaos-{seed}")
    executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    future = executor.submit(_train, settings, traffic, count, Random(seed))
    executor.shutdown(wait=False)
    return traffic, future


def _train(settings: Settings, traffic: Traffic, count: int, random: Random) -> None:
    task = weekly_sales()
    try:
        with _patient(lambda: Pool(settings, run_id=traffic.run_id)) as pool, ThreadPoolExecutor(_DRIVERS) as drivers:
            for number in range(count):
                policy, score = _policy(random)
                name = f"{traffic.run_id}-{number}"
                traffic.expected[name] = score
                own = policy if number % 2 else None
                episode = _patient(lambda name=name, own=own: pool.submit(task, policy=own, episode_id=name))  # type: ignore[misc]
                if own is None:
                    drivers.submit(_noted, traffic, episode, policy)
                time.sleep(random.uniform(0, 0.2))
            drivers.shutdown(wait=True)
            waiting = set(traffic.expected)
            while waiting:  # a receipt may have come while Redis was away: the stream is read from its start again
                waiting -= _patient(lambda: {r.receipt.episode_id for r in pool.as_completed()})
    finally:
        traffic.done.set()


def _policy(random: Random) -> tuple[Script, float]:
    """A script, and what it scores when nothing disturbs it."""
    pause = f"sleep {random.uniform(0, 1.5):.2f}"
    match random.choice(("right", "right", "wrong", "missing", "silent")):
        case "right":
            return Script(commands=(pause, candidate(repaired()))), 1.0
        case "wrong":
            return Script(commands=("cat report.py", pause)), 0.0
        case "missing":
            return Script(commands=(pause, "rm report.py")), 0.0
        case _:
            return Script(commands=(pause,), submit=False), 0.0


def _noted(traffic: Traffic, episode: Episode, policy: Script) -> None:
    try:
        traffic.told[episode.episode_id] = _drive(episode, policy)
    except EpisodeAborted:
        pass
    except Exception as error:  # noqa: BLE001 - a driver's thread: the round reports it
        traffic.faults.append(f"{episode.episode_id}: {type(error).__name__}: {error}")


def _drive(episode: Episode, policy: Script) -> float:
    try:
        _patient(episode.reset)
        for number, command in enumerate(policy.commands):
            noted = f"echo {number} >> {_CALLS}\n{command}"
            _patient(lambda noted=noted: episode.terminal(noted))  # type: ignore[misc]
        carried_out = _patient(lambda: episode.terminal(f"cat {_CALLS}")).split()
        if carried_out != [str(number) for number in range(len(policy.commands))]:
            raise RuntimeError(f"not each command once and in order: {carried_out}")
        if policy.submit:
            _patient(episode.submit)
        return _patient(episode.reward)
    finally:
        _patient(episode.close)


def _patient(call: Callable[[], T]) -> T:
    """Make the call again while Redis is away, as a trainer may: it is carried out once."""
    ends = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except RedisUnavailable:
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)
