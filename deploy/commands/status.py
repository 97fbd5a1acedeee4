"""`rollout-farm status`: the farm at a glance, once or again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.glance import Board
    from orchestrator.farm import Farm

_LAST = 8
"""Outcomes on the board."""

_SOON = 3.0
"""Seconds that one answer of Redis may take before the board says that it is away."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm status",
            "rollout-farm status --json",
            "rollout-farm status --watch",
            "rollout-farm status --watch --every 10 >> status.log",
            "rollout-farm status --here",
        )
    )(status)


def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --watch, one a line.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again until Ctrl-C, with more detail.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks of --watch.")] = 2.0,
    here: Annotated[
        bool, typer.Option("--here", help="Only say which workers of this host take episodes; exit 1 when none does.")
    ] = False,
) -> None:
    """Show workers, slots, limits, queue, outcomes, spending, who reconciles, and by id what could not be settled yet.

    With --watch also the limits in force, 429 answers and the last outcomes: a board in a terminal, else plain text.
    --here is for a container's probes: whether a new worker is ready. While Redis is away none is, so let no probe
    of it restart anything.
    """
    import json

    from deploy.commands.resolve import connected_settings, stop_as_ctrl_c_does
    from deploy.glance import facts_of
    from deploy.terminal import output
    from orchestrator.connection import SILENT_SECONDS
    from orchestrator.farm import open_farm
    from orchestrator.status import read_status

    # who looks again in a moment anyway says what is wrong, soon
    again = watch or here
    farm = open_farm(connected_settings(), patient=not again, answer_seconds=_SOON if again else SILENT_SECONDS)
    if here:
        _workers_here(farm)
        return
    if watch:
        stop_as_ctrl_c_does()
        try:
            _watch(farm, every, as_json=as_json)
        except KeyboardInterrupt:
            return  # as asked: there is no other end
    reading = read_status(farm)
    if as_json:
        typer.echo(json.dumps(reading.as_json()))
    else:
        output().print("\n".join(fact.line() for fact in facts_of(reading)), markup=False)


def _workers_here(farm: Farm) -> None:
    import socket

    from deploy.terminal import output, safe
    from orchestrator.errors import FarmError

    host = socket.gethostname()
    taking = farm.presence.taking(host)
    if not taking:
        raise FarmError(f"no worker of {host} takes episodes: it has not begun yet, drains, or cannot reach this Redis")
    output().print(safe("\n".join(taking)), markup=False)


def _watch(farm: Farm, every: float, *, as_json: bool) -> None:
    import json
    import sys
    import time

    from rich.console import Console
    from rich.live import Live

    from deploy.glance import board_lines, draw
    from deploy.terminal import output

    screen = Console(highlight=False)
    # not screen.is_terminal: that believes FORCE_COLOR, also where the output is a file
    if sys.stdout.isatty() and not screen.is_dumb_terminal and not as_json:
        with Live(console=screen, auto_refresh=False) as live:
            for board in _boards(farm):
                live.update(draw(board), refresh=True)
                time.sleep(every)
    for board in _boards(farm):
        if as_json:
            typer.echo(json.dumps({"at": board.at, "trouble": board.trouble, **board.status.as_json()}))
        else:
            output().print("\n".join(board_lines(board)) + "\n", markup=False)
        time.sleep(every)


def _boards(farm: Farm) -> Iterator[Board]:
    """One look after another; while Redis is away, the last one, which says so."""
    import dataclasses

    from redis.exceptions import RedisError

    from deploy.glance import Board
    from orchestrator.receipts import ReceiptFilter, Receipts
    from orchestrator.redis_trouble import diagnose
    from orchestrator.status import read_status

    receipts = Receipts(farm.redis, farm.ledger.allocations)
    board: Board | None = None
    while True:
        try:
            board = Board(
                read_status(farm),
                farm.limiter.read(),
                tuple(receipts.select(ReceiptFilter(), limit=_LAST)),
                farm.ledger.now(),
            )
        except RedisError as error:
            if board is None:
                raise
            board = dataclasses.replace(board, trouble=f"Redis is away: {diagnose(error).wrong}")
        yield board
