"""`status --watch` as a person runs it: a board in a terminal, plain text elsewhere, and Ctrl-C ends it well."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.glance import Board, board_lines, draw, facts_of
from orchestrator.farm import Farm
from orchestrator.presence import WorkerRow
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.settings import Settings
from orchestrator.status import Status, read_status
from orchestrator.unresolved import Kind
from orchestrator.vocabulary import Outcome
from tests.support import warm
from tests.support.bare_farm import a_receipt, admit, farm_settings, intended, leased, stored
from tests.support.processes import Marked, worker_environment
from tests.support.redis_processes import RedisProcess
from tests.support.redis_server import running_redis
from tests.support.waiting import wait_until


def started(settings: Settings, directory: Path, *words: str, **variables: str) -> Marked:
    command = [*warm.FARM_COMMAND, "status", "--watch", "--every", "0.2", *words]
    environment = {**worker_environment(settings), **variables}
    output = directory / "output"
    return Marked(command, environment=environment, cwd=directory, output=output, template=warm.farm())


@pytest.fixture
def watching(settings: Settings, tmp_path: Path) -> Iterator[Marked]:
    process = started(settings, tmp_path)
    yield process
    process.end()


def ended(farm: Farm, outcome: Outcome) -> str:
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec, outcome), lease.token)
    return spec.episode_id


def look(farm: Farm) -> Status:
    return read_status(farm)


def board(farm: Farm, **changes: Any) -> Board:
    receipts = tuple(Receipts(farm.redis, farm.ledger.allocations).select(ReceiptFilter(), limit=8))
    return Board(**{"status": look(farm), "limits": farm.limiter.read(), "last": receipts, "at": 0.0, **changes})


def shown(drawn: Board) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(draw(drawn))
    return capture.get()


def test_elsewhere_it_is_plain_text_again_and_again_until_ctrl_c(farm: Farm, watching: Marked) -> None:
    wait_until(lambda: watching.stdout.count("workers     0") >= 2, description="two looks", seconds=40)
    name = ended(farm, Outcome.SOLVED)
    wait_until(lambda: name in watching.stdout, description="the last outcome")
    assert "\x1b" not in watching.stdout
    assert "outcomes    solved 1" in watching.stdout
    watching.interrupt_group()
    assert watching.wait(20) == 0
    assert watching.stderr == ""


class Terminal:
    """`status --watch` in a terminal of its own, of this kind, and what it shows."""

    def __init__(self, settings: Settings, directory: Path, kind: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "deploy.cli", "status", "--watch", "--every", "0.2"]
        environment = {**worker_environment(settings), "TERM": kind, "COLUMNS": "150", "LINES": "40"}
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True
        )
        os.close(theirs)
        self.seen = bytearray()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._ours)

    def shows(self, text: bytes) -> bool:
        """Whether this has been shown by now."""
        if select.select([self._ours], [], [], 0.1)[0]:
            try:
                self.seen.extend(os.read(self._ours, 65_536))
            except OSError:  # the other end is closed
                return True
        return text in self.seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_a_terminal_it_is_a_board_and_the_cursor_comes_back(
    farm: Farm, settings: Settings, tmp_path: Path, number: signal.Signals
) -> None:
    name = ended(farm, Outcome.WRONG_ANSWER)
    with Terminal(settings, tmp_path, "xterm") as terminal:
        wait_until(lambda: terminal.shows(name.encode()), description="the board", seconds=40)
        terminal.seen.clear()
        wait_until(lambda: terminal.shows(b"wrong_answer"), description="it is drawn again")
        terminal.process.send_signal(number)
        wait_until(lambda: terminal.shows(b"\x1b[?25h"), description="the cursor is shown again")
        assert terminal.process.wait(20) == 0


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_text(
    farm: Farm, settings: Settings, tmp_path: Path, kind: str
) -> None:
    name = ended(farm, Outcome.WRONG_ANSWER)
    with Terminal(settings, tmp_path, kind) as terminal:
        wait_until(lambda: terminal.shows(name.encode()), description="the outcome", seconds=40)
        assert name.encode() in terminal.seen
        assert b"\x1b" not in terminal.seen


def test_a_file_gets_plain_text_also_where_colours_are_asked_for(settings: Settings, tmp_path: Path) -> None:
    process = started(settings, tmp_path, FORCE_COLOR="1", TERM="xterm")
    try:
        wait_until(lambda: process.stdout.count("workers     0") >= 2, description="two looks", seconds=40)
        assert "\x1b" not in process.stdout
    finally:
        process.end()


def test_as_json_it_is_an_object_a_line(farm: Farm, settings: Settings, tmp_path: Path) -> None:
    farm.budget.set("2.5")
    process = started(settings, tmp_path, "--json")
    try:
        wait_until(lambda: process.stdout.count("\n") >= 2, description="two lines", seconds=40)
        first = json.loads(process.stdout.splitlines()[0])
        assert first["budget"]["limit_usd"] == "2.5"
        assert first["at"] > 0
        process.interrupt_group()
        assert process.wait(20) == 0
    finally:
        process.end()


def test_it_goes_on_when_redis_comes_back(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with running_redis(tmp_path / "redis") as url:
        process = started(farm_settings(url), tmp_path)
        try:
            wait_until(lambda: "workers     0" in process.stdout, description="a look", seconds=40)
        except BaseException:
            process.end()
            raise
    try:
        wait_until(lambda: "TROUBLE     Redis is away" in process.stdout, description="it says so", seconds=20)
        with running_redis(tmp_path / "redis") as again:
            assert again == url
            before = len(process.stdout)
            wait_until(
                lambda: any("TROUBLE" not in look for look in process.stdout[before:].split("\n\n")[1:-1]),
                description="a look without trouble",
                seconds=20,
            )
    finally:
        process.end()


def test_a_redis_that_stands_still_is_told_within_seconds(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis", []) as server:
        process = started(farm_settings(f"redis://127.0.0.1:{server.port}/0"), tmp_path)
        try:
            wait_until(lambda: "workers     0" in process.stdout, description="a look", seconds=40)
            server.signal(signal.SIGSTOP)
            try:
                wait_until(lambda: "TROUBLE     Redis is away" in process.stdout, description="it says so", seconds=10)
            finally:
                server.signal(signal.SIGCONT)
        finally:
            process.end()


def test_a_farm_that_is_not_there_ends_it_at_once(tmp_path: Path) -> None:
    process = started(farm_settings("redis://127.0.0.1:1/0"), tmp_path)
    try:
        assert process.wait(40) == 4
        assert "no Redis at" in process.stderr
    finally:
        process.end()


def test_spending_stands_in_the_status_and_an_almost_empty_budget_is_an_alarm(farm: Farm) -> None:
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, "sbx-1", lease.token, creating_ms=0)
    row = farm.ledger.allocations.sized(stored(farm, row.allocation_id), vcpus=2, memory_mb=512).row

    def spent() -> tuple[str, bool]:
        [fact] = [fact for fact in facts_of(look(farm)) if fact.label == "spent"]
        return fact.text, fact.alarm

    assert spent() == ("0.0000 USD, now 0.1089 an hour", False)
    farm.budget.set(1)
    assert spent() == ("0.0000 USD, now 0.1089 an hour; 0.9779 left of 1", False)
    farm.budget.set("0.023")
    assert spent()[1]
    assert look(farm).as_json()["burn_usd_per_hour"] == "0.1089"
    farm.ledger.allocations.absent(row, lease.token, running_ms=200_000)
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert Decimal(look(farm).as_json()["budget"]["spent_usd"]) == Decimal("0.00605")


def in_window(drawn: Board, width: int, height: int) -> list[str]:
    """The lines of a terminal of this size; as rich's Live does, it shows no more than fit."""
    console = Console(width=width, height=height)
    with console.capture() as capture:
        console.print(draw(drawn))
    return capture.get().splitlines()[:height]


def test_many_workers_hide_nothing_in_an_ordinary_window(farm: Farm) -> None:
    for number in range(20):
        worker = WorkerRow(f"worker-{number}", f"host-{number % 3}", 1, "running", 2, "http://127.0.0.1:1")
        farm.presence.beat_worker(worker, [f"worker-{number}-{slot}" for slot in range(2)])
    for outcome in (Outcome.SOLVED, Outcome.CLEANUP_UNRESOLVED, Outcome.WRONG_ANSWER):
        ended(farm, outcome)
    episodes = [leased(farm) for _ in range(12)]
    row = intended(farm, *episodes[0])
    farm.ledger.allocations.unknown(row, episodes[0][1].token, "its answer was lost " * 40)
    for number in range(10):
        farm.ledger.unresolved.keep(Kind.SANDBOX, f"sandbox-{number}", "500: cannot be deleted now", now=1.0)
    drawn = board(farm, trouble="Redis is away")
    for width, height in ((80, 24), (60, 30)):
        lines = in_window(drawn, width, height)
        text = "\n".join(lines)
        assert any(line.startswith("UNRESOLVED") and row.allocation_id in line for line in lines), text
        assert "and 8 more: rollout-farm status shows all" in text
        assert "20 on 3 hosts (40 live slots, 12 busy)" in text
        assert any(line.startswith("limits") for line in lines), text
        ends = lines[next(at for at, line in enumerate(lines) if "last outcomes" in line) :]
        for outcome in (Outcome.SOLVED, Outcome.CLEANUP_UNRESOLVED, Outcome.WRONG_ANSWER):
            assert any(f"{outcome} " in line for line in ends), text
    for spec, lease in episodes:
        farm.ledger.commit(a_receipt(spec), lease.token)


def test_a_board_shows_limits_trouble_and_nothing_that_steers(farm: Farm) -> None:
    farm.limiter.change(concurrency=7, rate=3)
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.unknown(row, lease.token, "lost \x1b[31m[bold]here\n")
    drawn = board(farm, trouble="Redis is away")
    for text in (shown(drawn), "\n".join(board_lines(drawn))):
        assert "0 with a sandbox of 7; 0 wait for a permit; creations: 3 a second" in text
        assert "Redis is away" in text
        assert "lost \\x1b[31m[bold]here\\n" in text
        assert "\x1b" not in text
    farm.ledger.commit(a_receipt(spec), lease.token)
