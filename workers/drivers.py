"""The two ways to drive an episode over the same executor: a script in the job, or a trainer through the mailbox.

What always holds: a driver returns only when the episode has its receipt; a window ends by itself, not at the next
call; an aborted episode is ended, not raised.
"""

from __future__ import annotations

from contextlib import suppress

from orchestrator.errors import CommandTooLarge, EpisodeAborted
from orchestrator.mailbox import RESET_NUMBER, Action, Mailbox, Result
from orchestrator.records import Receipt, Script
from orchestrator.vocabulary import Outcome
from workers.executor import Executor

_LOOK_SECONDS = 1.0
"""How often a waiting remote episode looks whether its trainer, its lease and its window are still there."""


def drive_script(executor: Executor, policy: Script) -> Receipt:
    """Run a script's commands in order, then submit (or collect the reward without)."""
    try:
        executor.reset()
        for command in policy.commands:
            if executor.timeline.window_left() <= 0:
                return executor.window_exhausted()
            with suppress(CommandTooLarge):  # nothing was run; like any policy, the script goes on
                executor.terminal(command)
        if executor.timeline.window_left() <= 0:
            return executor.window_exhausted()
        return executor.submit() if policy.submit else executor.not_submitted()
    except EpisodeAborted as error:
        return executor.abort(error)


def drive_remote(executor: Executor, mailbox: Mailbox, token: str) -> Receipt:
    """Do what the trainer asks, one numbered action after another, until the episode has ended."""
    number = RESET_NUMBER
    try:
        mailbox.finish(number, token, Result(text=executor.reset()))
        while executor.receipt is None:
            if (left := executor.timeline.window_left()) <= 0:
                return executor.window_exhausted()
            executor.idle()
            executor.timeline.bound(left)  # a deadline shorter than the window ends the episode by itself too
            if (action := mailbox.take(number + 1, token, min(left, _LOOK_SECONDS))) is not None:
                number += 1
                mailbox.finish(number, token, _perform(executor, action))
        return executor.receipt
    except EpisodeAborted as error:
        receipt = executor.abort(error)
        mailbox.finish(number, token, _ending(receipt))  # changes nothing where this number has its result
        return receipt


def _perform(executor: Executor, action: Action) -> Result:
    match action.name:
        case "terminal" if action.command is not None:
            try:
                step = executor.terminal(action.command)
            except CommandTooLarge as error:
                return Result(text=f"error: {error}", detail="command too large")
            return Result(
                text=step.text,
                exit_code=step.exit_code,
                timed_out=step.timed_out,
                truncated=step.truncated,
                binary=step.binary,
            )
        case "submit":
            return _ending(executor.submit())
        case "reward":
            return _ending(executor.not_submitted())
        case "close":
            return _ending(executor.abort(EpisodeAborted(Outcome.CANCELLED, "closed before a submission")))
        case _:
            return Result(text=f"unknown action {action.name!r}", detail="unknown action")


def _ending(receipt: Receipt) -> Result:
    return Result(outcome=receipt.outcome, reward=receipt.reward, detail=receipt.detail)
