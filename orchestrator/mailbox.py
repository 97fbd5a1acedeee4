"""How a trainer drives an episode that runs elsewhere: numbered actions in, results out, each executed at most once.

What always holds: taking an action is atomic, is marked before it is executed and is never undone; a result is stored
under its number and the first one stays, so asking again returns it, and a late answer is never read as another's. Only
what a trainer may still ask for is kept: the newest two actions with their results.
Number 0 is the reset, which needs no action: its result is stored when the sandbox is ready.
"""

from __future__ import annotations

import math
import secrets
import time
from typing import cast

from pydantic import BaseModel, ConfigDict
from redis import Redis

from orchestrator.connection import BLOCK_SECONDS
from orchestrator.errors import ActionPending, EpisodeClosed, FarmError
from orchestrator.keys import Keys
from orchestrator.scripts import Scripts
from orchestrator.vocabulary import Outcome

RESET_NUMBER = 0

PARTS = ("actions", "taken", "results", "inbox", "outbox")

ENDED_SECONDS = 600
"""What is left of a mailbox once the episode has its receipt: long enough for a trainer whose Redis was away."""

_AFTERLIFE_SECONDS = 3_600
"""A mailbox outlives its last write by the episode's deadline and this, where nobody writes a receipt."""


class Action(BaseModel):
    """What the trainer asks: a terminal command, a submission, the reward without one, or the end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    command: str | None = None


class Result(BaseModel):
    """What came of one action. `outcome` is set when the episode ended with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    truncated: bool = False
    binary: bool = False
    outcome: Outcome | None = None
    reward: float | None = None
    detail: str | None = None


class Mailbox:
    """Both ends of one episode's mailbox: the trainer posts and awaits, the slot takes and finishes."""

    def __init__(self, redis: Redis, episode_id: str, *, deadline_seconds: float = 600) -> None:
        self._redis = redis
        self._life_seconds = math.ceil(deadline_seconds) + _AFTERLIFE_SECONDS
        self._scripts = Scripts(redis)
        self._row = Keys.episode(episode_id)
        self._actions, self._taken, self._results, self._inbox, self._outbox = (
            Keys.mailbox(episode_id, part) for part in PARTS
        )
        self._woken: set[int] = set()
        self._asked: int | None = None

    def post(self, number: int, action: Action) -> Result | None:
        """Post an action under its number; its result if that is there already. Raises EpisodeClosed."""
        keys = [self._row, self._actions, self._results, self._inbox]
        answer = self._scripts.run("post_action", keys, [number, action.model_dump_json(), self._life_seconds])
        if answer[0] == "closed":
            raise EpisodeClosed("the episode has ended; read its receipt")
        if answer[0] == "other":
            raise FarmError(f"another action has number {number} already: one handle drives an episode, here are two")
        return Result.model_validate_json(answer[1]) if answer[0] == "done" else None

    def wait(self, number: int, seconds: float) -> Result:
        """Block until the result of `number` is there, at most `seconds` (<= 5); raises ActionPending."""
        ends = time.monotonic() + min(seconds, BLOCK_SECONDS)
        again = self._asked is None or number <= self._asked  # then its wake may have been used up
        self._asked = max(number, self._asked or 0)
        if again and (result := self.result(number)) is not None:
            return result
        while (left := ends - time.monotonic()) > 0:
            woken = cast("list[str] | None", self._redis.blpop([self._outbox], timeout=max(left, 0.01)))
            told, _, text = woken[1].partition(":") if woken else ("", "", "")
            if told == str(number):
                return Result.model_validate_json(text)
            if (result := self.result(number)) is not None:  # another's wake, or ours was taken by an earlier wait
                return result
        raise ActionPending(f"action {number} is still running; ask again with the same number")

    def result(self, number: int) -> Result | None:
        """The stored result of `number`, or None."""
        text = self._redis.hget(self._results, str(number))
        return Result.model_validate_json(cast(str, text)) if text else None

    def take(self, number: int, token: str, seconds: float) -> Action | None:
        """Wait at most `seconds` for action `number` and take it, once; None when it has not come."""
        keys = [self._row, self._actions, self._taken, self._results]
        args: list[str | int | float] = [number, token, self._life_seconds, secrets.token_hex(8)]
        ends = time.monotonic() + min(seconds, BLOCK_SECONDS)
        while (left := ends - time.monotonic()) > 0:
            if number in self._woken:  # its wake came early and is not waited for again
                self._woken.discard(number)
                text = self._scripts.run("take_action", keys, args)
            else:
                woken, text = self._scripts.run_after_pop(self._inbox, max(left, 0.01), "take_action", keys, args)
                if woken is not None and int(woken) > number:
                    self._woken.add(int(woken))
            if text:
                return Action.model_validate_json(text)
        return None

    def finish(self, number: int, token: str, result: Result) -> None:
        """Store the result of an action and wake whoever waits for it."""
        keys = [self._row, self._results, self._outbox]
        text = result.model_dump_json()
        self._scripts.run("finish_action", keys, [number, token, text, self._life_seconds, ENDED_SECONDS])
