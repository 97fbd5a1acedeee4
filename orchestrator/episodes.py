"""One episode as its trainer sees it: tool calls out, observations back, a reward at the end.

What always holds: every action has its own number and is executed at most once; a call that failed without its answer
and is made again is the same action, and returns that answer; an infrastructure failure is remembered and raised again
when the reward is asked for; nothing waits longer than `closing_seconds` for an episode whose end was asked for here.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from orchestrator.arguments import require_seconds
from orchestrator.connection import BLOCK_SECONDS, redis_border
from orchestrator.endings import end_queued
from orchestrator.errors import (
    ActionPending,
    CommandRefused,
    CommandTooLarge,
    EpisodeAborted,
    EpisodeClosed,
    FarmError,
    InfrastructureLost,
    ReceiptOverdue,
)
from orchestrator.finished import Finished
from orchestrator.ledger import Ledger
from orchestrator.mailbox import RESET_NUMBER, Action, Mailbox, Result
from orchestrator.queue import JobQueue
from orchestrator.records import EpisodeSpec, Receipt
from orchestrator.vocabulary import Drive, EpisodeState, Outcome

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""How often a waiting call looks for the receipt of an episode that ended without answering it."""


class Observation(str):
    """What a command printed, with how it ended."""

    exit_code: int | None
    timed_out: bool
    truncated: bool
    binary: bool

    @classmethod
    def of(cls, result: Result) -> Observation:
        """From a mailbox result."""
        text = cls(result.text)
        text.exit_code, text.timed_out = result.exit_code, result.timed_out
        text.truncated, text.binary = result.truncated, result.binary
        return text


class Episode:
    """A handle on one submitted episode. As a context manager it closes what it leaves unfinished."""

    def __init__(
        self,
        spec: EpisodeSpec,
        mailbox: Mailbox,
        ledger: Ledger,
        finished: Finished,
        queue: JobQueue,
        *,
        lease_lost_seconds: float,
    ) -> None:
        self.spec = spec
        self.episode_id = spec.episode_id
        self.run_id = spec.run_id
        self.remote = spec.drive is Drive.REMOTE
        self._mailbox = mailbox
        self._ledger = ledger
        self._finished = finished
        self._queue = queue
        budgets = spec.budgets
        self.closing_seconds = budgets.message_seconds + 2 * budgets.cleanup_seconds + 2 * lease_lost_seconds
        """From the asked end to the receipt: the call on its way, both deletions, a worker that is found dead first."""
        self._end_asked: float | None = None
        self._number = RESET_NUMBER
        self._ready: Observation | None = None
        self._resetting = threading.Lock()
        """One of several threads waits for the sandbox: there is one wake for all of them."""
        self._acting = threading.Lock()
        """One action after another, whichever threads ask: numbers are given out and answers read in one order."""
        self._unsure: Action | None = None
        """An action whose posting failed: it may have arrived, so its number is its own."""
        self._unanswered: tuple[int, Action] | None = None
        """An action whose answer was not read: made again, the call asks for it under this number."""

    def __enter__(self) -> Episode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except FarmError as failed:
            if error is None:
                raise
            logger.error("not closed: %s", failed, extra={"episode": self.episode_id})  # what ended the block matters

    @redis_border
    def reset(self) -> Observation:
        """Wait until the sandbox is ready; raises EpisodeAborted when it never will be."""
        self._require_remote()
        with self._resetting:
            if self._ready is None:
                if self._mailbox.result(RESET_NUMBER) is None and (receipt := self.receipt()) is not None:
                    self._raise_ended(receipt)
                result = self._await(RESET_NUMBER)
                if result.outcome is not None:
                    self._raise_ended(self._wait_receipt(self.spec.budgets.cleanup_seconds))
                self._ready = Observation.of(result)
            return self._ready

    @redis_border
    def terminal(self, command: str) -> Observation:
        """Run one shell command in the policy sandbox; the sandbox is waited for first.

        Raises InfrastructureLost when the episode was aborted, EpisodeClosed when it has ended otherwise,
        CommandRefused for what no shell was given.
        """
        if not isinstance(command, str):
            raise CommandRefused(f"a command has to be text, got {command!r}: give a str")
        try:
            size = len(command.encode())
        except UnicodeEncodeError as error:
            raise CommandRefused(f"a command has to be text that UTF-8 can carry ({error.reason})") from None
        if size > self.spec.budgets.command_bytes:
            raise CommandTooLarge(
                f"a command is at most {self.spec.budgets.command_bytes} bytes, got {size}: write a file"
            )
        self.reset()
        result = self._act(Action(name="terminal", command=command))
        if result.outcome is not None:
            self._raise_ended(self._wait_receipt(self.spec.budgets.cleanup_seconds))
        return Observation.of(result)

    @redis_border
    def submit(self) -> str:
        """Have the artifact verified in a fresh sandbox; both sandboxes are gone when this returns."""
        self.reset()
        self._act(Action(name="submit"))
        receipt = self._wait_receipt(self.spec.budgets.cleanup_seconds)
        if not receipt.outcome.scored:
            self._raise_ended(receipt)
        return "Submitted. The episode is closed."

    @redis_border
    def reward(self) -> float:
        """The committed reward in [0, 1]; without a submission this ends the episode at 0.0.

        Raises EpisodeAborted when the episode ended without a score.
        """
        if self.remote and self.receipt() is None:
            try:
                self.reset()
                self._act(Action(name="reward"))
            except EpisodeClosed:
                pass  # it ended meanwhile: the receipt says how
        receipt = self.wait()
        if receipt.reward is None:
            raise EpisodeAborted(receipt.outcome, receipt.detail or "")
        return receipt.reward

    @redis_border
    def close(self) -> None:
        """End the episode if it has not ended (`cancelled`), and wait until it has its receipt.

        Raises ReceiptOverdue when it has none `closing_seconds` after its end was first asked for: who ran it is dead,
        and no orchestrator ends it.
        """
        if self.receipt() is None:
            self.cancel()
            self.wait()

    @redis_border
    def cancel(self) -> None:
        """Ask for the end without waiting for it; an episode that nobody has taken yet ends here and now."""
        state = self._ledger.cancel(self.episode_id)
        if self._end_asked is None:
            self._end_asked = time.monotonic()
        if state in (None, EpisodeState.FINAL):
            return
        row = self._ledger.row(self.episode_id) if state is EpisodeState.QUEUED else None
        if row is not None and end_queued(self._ledger, self._queue, row, Outcome.CANCELLED):
            return
        # The flag alone is seen within a second; an action is seen at once, where none of ours is on its way.
        if self._ready is not None and self._unsure is None and self._acting.acquire(blocking=False):
            try:
                self._unsure = Action(name="close")
                with suppress(FarmError):  # over already, or somebody else drives it too: the flag will do
                    self._mailbox.post(self._number + 1, self._unsure)
                    self._number, self._unsure = self._number + 1, None
            finally:
                self._acting.release()

    @redis_border
    def receipt(self) -> Receipt | None:
        """The receipt, or None while the episode is open."""
        settled = self._ledger.receipt(self.episode_id)
        return settled.receipt if settled else None

    @redis_border
    def wait(self, timeout_seconds: float | None = None) -> Receipt:
        """Block until the receipt is there; raises ReceiptOverdue (a TimeoutError) when it is not in time.

        Without a timeout that is however long the episode takes, `closing_seconds` once its end was asked for here.
        """
        require_seconds("timeout_seconds", timeout_seconds, or_none=True)
        began = time.monotonic()
        while True:
            position = self._finished.position()
            if (receipt := self.receipt()) is not None:
                return receipt
            left = BLOCK_SECONDS if timeout_seconds is None else began + timeout_seconds - time.monotonic()
            if timeout_seconds is None and self._end_asked is not None:
                left = self._end_asked + self.closing_seconds - time.monotonic()
            if left <= 0:
                raise self._overdue(self.closing_seconds if timeout_seconds is None else timeout_seconds)
            self._require_row()
            self._finished.after(position, left)

    def _act(self, action: Action) -> Result:
        self._require_remote()
        with self._acting:
            return self._act_alone(action)

    def _act_alone(self, action: Action) -> Result:
        done = None
        if self._unsure is not None:  # whether or not it arrived: no other action's answer is read under its number
            done = self._post(self._unsure)
        if self._unanswered is not None and self._unanswered[1] == action:
            number = self._unanswered[0]
        else:
            done = self._post(action)
            number = self._number
        result = done if done is not None else self._await(number)
        self._unanswered = None
        return result

    def _post(self, action: Action) -> Result | None:
        self._unsure = action
        try:
            done = self._mailbox.post(self._number + 1, action)
        except EpisodeClosed:
            self._raise_ended(self._wait_receipt(self.spec.budgets.cleanup_seconds))
        self._number, self._unsure = self._number + 1, None
        self._unanswered = (self._number, action)
        return done

    def _await(self, number: int) -> Result:
        """The result of an action, however long its own budgets let it take, or how the episode ended instead."""
        while True:
            try:
                return self._mailbox.wait(number, _LOOK_SECONDS)
            except ActionPending:
                receipt = self.receipt()
                if receipt is None:
                    if self._end_asked is not None and time.monotonic() - self._end_asked > self.closing_seconds:
                        raise self._overdue(self.closing_seconds) from None
                    self._require_row()
                    continue
                late = self._mailbox.result(number)  # it may have been stored between the two looks
                return late or Result(outcome=receipt.outcome, reward=receipt.reward, detail=receipt.detail)

    def _overdue(self, seconds: float) -> ReceiptOverdue:
        return ReceiptOverdue(
            f"{self.episode_id} has no receipt after {seconds:g} s; see whether its worker and an orchestrator run: "
            "rollout-farm status"
        )

    def _wait_receipt(self, seconds: float) -> Receipt:
        return self.wait(timeout_seconds=seconds + 10)

    def _raise_ended(self, receipt: Receipt) -> NoReturn:
        if receipt.outcome.scored:
            raise EpisodeClosed(f"the episode has ended: {receipt.outcome}; ask for its reward()")
        raise InfrastructureLost(receipt.outcome, receipt.detail or "")

    def _require_row(self) -> None:
        if self._ledger.forgotten([self.episode_id]):
            raise FarmError(f"the farm does not know {self.episode_id} (any more): its Redis was emptied, or it is old")

    def _require_remote(self) -> None:
        if not self.remote:
            raise FarmError(f"{self.episode_id} is driven by its own policy; only wait(), reward() and close() apply")
