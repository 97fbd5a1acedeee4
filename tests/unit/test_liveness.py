"""Whether a server answers, by a clock of the test's own: real connections to servers that speak and that do not."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator

import pytest

from tests.support.waiting import wait_until
from workers.liveness import Liveness

PATIENCE_SECONDS = 30.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listens, as the kernel does for any process, and answers only what a test makes it answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def liveness(server: socket.socket) -> Iterator[Liveness]:
    liveness = Liveness(server.getsockname(), patience_seconds=PATIENCE_SECONDS)
    yield liveness
    liveness.forget()


def silence_until_given_up(liveness: Liveness, now: float, *, step: float = 0.25) -> float:
    """The time, by steps of the clock, at which the server counts as hung."""
    while liveness.look(now):
        now += step
        assert now < 10_000
    return now


def answer(server: socket.socket) -> bytes:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(5)
        asked = connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
    return asked


def test_a_server_that_never_answers_is_hung_after_its_patience(liveness: Liveness) -> None:
    assert PATIENCE_SECONDS < silence_until_given_up(liveness, 0.0) < PATIENCE_SECONDS + 1


def test_an_answer_begins_the_count_anew(server: socket.socket, liveness: Liveness) -> None:
    now = 0.0
    while now < PATIENCE_SECONDS - 1:
        assert liveness.look(now)
        now += 0.25
    assert answer(server).startswith(b"GET /health HTTP/1.1\r\n")
    assert liveness.look(now)
    assert silence_until_given_up(liveness, now) > now + PATIENCE_SECONDS


def test_a_connection_that_breaks_is_no_answer_and_asked_again(server: socket.socket, liveness: Liveness) -> None:
    now = 0.0
    while now < PATIENCE_SECONDS - 1:
        assert liveness.look(now)
        now += 0.25
    server.accept()[0].close()
    server.settimeout(0.01)

    def is_answered() -> bool:
        assert liveness.look(now)
        try:
            return bool(answer(server))
        except TimeoutError:
            return False

    wait_until(is_answered, description="it asks again")
    assert liveness.look(now)
    assert silence_until_given_up(liveness, now) > now + PATIENCE_SECONDS


def test_a_machine_that_stood_still_is_no_hung_server(liveness: Liveness) -> None:
    assert liveness.look(0.0)
    assert liveness.look(600.0)
    assert liveness.look(1200.0)


def test_a_server_that_listens_no_more_is_hung_too(server: socket.socket, liveness: Liveness) -> None:
    server.close()
    assert silence_until_given_up(liveness, 0.0) > PATIENCE_SECONDS


def test_who_cannot_ask_says_nothing_of_the_server(liveness: Liveness) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert all(liveness.look(now / 4) for now in range(8 * int(PATIENCE_SECONDS)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert silence_until_given_up(liveness, 300.0) > 299 + PATIENCE_SECONDS
