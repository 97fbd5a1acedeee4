"""What ends a command in order, and what its caller has switched off."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from deploy.commands.resolve import stop_as_ctrl_c_does


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_closed_terminal_ends_a_command_unless_nohup_has_it_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop_as_ctrl_c_does()
    assert signal.getsignal(signal.SIGHUP) is signal.default_int_handler
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_as_ctrl_c_does()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
