"""The mailbox on a real Redis: each action at most once, each result under its number, nobody woken for nothing."""

from __future__ import annotations

import statistics
import threading
import time

import pytest
from redis import Redis

from orchestrator.errors import ActionPending, EpisodeClosed, FarmError
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.mailbox import PARTS, RESET_NUMBER, Action, Mailbox, Result
from orchestrator.rows import Lease
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import a_receipt, a_spec, expire, leased, opened_farm


@pytest.fixture
def lease(farm: Farm) -> Lease:
    """A slot's lease of a running episode."""
    return leased(farm)[1]


@pytest.fixture
def mailbox(farm: Farm, lease: Lease) -> Mailbox:
    return Mailbox(farm.redis, lease.episode_id)


def command(text: str) -> Action:
    return Action(name="terminal", command=text)


def test_an_action_travels_there_and_its_result_back(mailbox: Mailbox, lease: Lease) -> None:
    assert mailbox.post(1, command("ls")) is None
    assert mailbox.take(1, lease.token, 1) == command("ls")
    mailbox.finish(1, lease.token, Result(text="report.py", exit_code=0))
    assert mailbox.wait(1, 1) == Result(text="report.py", exit_code=0)


def test_two_takers_execute_an_action_once(mailbox: Mailbox, lease: Lease) -> None:
    for number in range(1, 13):
        barrier = threading.Barrier(3)
        taken: list[Action] = []

        def take(number: int = number, barrier: threading.Barrier = barrier, taken: list[Action] = taken) -> None:
            barrier.wait(5)
            if action := mailbox.take(number, lease.token, 0.02):
                taken.append(action)

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait(5)
        mailbox.post(number, command(str(number)))
        for thread in threads:
            thread.join(5)
        if not taken:  # it came after both had gone: then it is still there, once
            taken += filter(None, [mailbox.take(number, lease.token, 0.02)])
        assert taken == [command(str(number))]


def test_an_action_taken_is_never_taken_again(mailbox: Mailbox, lease: Lease) -> None:
    mailbox.post(1, command("rm -r work"))
    assert mailbox.take(1, lease.token, 0.01) is not None
    for _ in range(3):
        mailbox.post(1, command("rm -r work"))
        assert mailbox.take(1, lease.token, 0.01) is None


def test_posting_a_number_again_changes_nothing(mailbox: Mailbox, lease: Lease) -> None:
    mailbox.post(1, command("first"))
    assert mailbox.post(1, command("first")) is None
    with pytest.raises(FarmError):
        mailbox.post(1, command("second"))
    assert mailbox.take(1, lease.token, 0.01) == command("first")


def test_anothers_answer_is_never_given_to_a_second_handle(mailbox: Mailbox, lease: Lease) -> None:
    mailbox.post(1, command("echo first"))
    mailbox.finish(1, lease.token, Result(text="first"))
    with pytest.raises(FarmError):
        mailbox.post(1, command("rm x"))


def test_asking_again_returns_the_result_that_stands(mailbox: Mailbox, lease: Lease) -> None:
    mailbox.post(1, command("ls"))
    mailbox.take(1, lease.token, 0.01)
    mailbox.finish(1, lease.token, Result(text="first"))
    mailbox.finish(1, lease.token, Result(text="second"))
    for _ in range(2):
        assert mailbox.wait(1, 0.01).text == "first"
        assert mailbox.post(1, command("ls")) == Result(text="first")


def test_asking_again_is_answered_at_once_by_whoever_asks(farm: Farm, mailbox: Mailbox, lease: Lease) -> None:
    for number in (1, 2):
        mailbox.post(number, command("ls"))
        mailbox.finish(number, lease.token, Result(text=str(number)))
        assert mailbox.wait(number, 5).text == str(number)
    began = time.monotonic()
    for asker in (mailbox, Mailbox(farm.redis, lease.episode_id)):
        for number in (2, 1, 2):
            assert asker.wait(number, 5).text == str(number)
    assert time.monotonic() - began < 2.5


def test_an_action_in_hand_is_pending(mailbox: Mailbox, lease: Lease) -> None:
    mailbox.post(1, command("sleep"))
    for _ in range(2):
        with pytest.raises(ActionPending):
            mailbox.wait(1, 0.02)
        mailbox.take(1, lease.token, 0.01)


def test_a_late_answer_is_never_read_as_anothers(mailbox: Mailbox, lease: Lease) -> None:
    for number in (1, 2):
        mailbox.post(number, command(str(number)))
        mailbox.take(number, lease.token, 0.01)
    mailbox.finish(1, lease.token, Result(text="late answer to 1"))
    with pytest.raises(ActionPending):
        mailbox.wait(2, 0.05)
    mailbox.finish(2, lease.token, Result(text="answer to 2"))
    assert mailbox.wait(2, 1).text == "answer to 2"
    assert mailbox.wait(1, 1).text == "late answer to 1"


def test_a_foreign_token_neither_takes_nor_finishes(farm: Farm, mailbox: Mailbox, lease: Lease, redis: Redis) -> None:
    mailbox.post(1, command("ls"))
    assert mailbox.take(1, "999", 0.01) is None
    expire(redis, lease.episode_id)
    token = farm.ledger.seize(lease.episode_id, "reconciler", lease_seconds=30)
    assert token is not None
    assert mailbox.take(1, lease.token, 0.01) is None, "its old owner"
    mailbox.finish(1, lease.token, Result(text="forged"))
    assert mailbox.result(1) is None
    assert mailbox.take(1, token, 0.01) is not None
    mailbox.finish(1, token, Result(text="real"))
    assert mailbox.wait(1, 0.01).text == "real"


def test_posting_to_an_ended_episode_is_closed(farm: Farm) -> None:
    spec, lease = leased(farm)
    mailbox = Mailbox(farm.redis, spec.episode_id)
    mailbox.post(1, command("ls"))
    mailbox.take(1, lease.token, 0.01)
    farm.ledger.commit(a_receipt(spec, Outcome.CANCELLED), lease.token)
    mailbox.finish(1, lease.token, Result(outcome=Outcome.CANCELLED))
    with pytest.raises(EpisodeClosed):
        mailbox.post(2, command("ls"))
    assert mailbox.post(1, command("ls")) == Result(outcome=Outcome.CANCELLED), "what was answered stays answered"
    with pytest.raises(EpisodeClosed):
        Mailbox(farm.redis, "e-nobody").post(1, command("ls"))


def test_nothing_is_taken_from_an_ended_episode(farm: Farm) -> None:
    spec, lease = leased(farm)
    mailbox = Mailbox(farm.redis, spec.episode_id)
    mailbox.post(1, command("ls"))
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert mailbox.take(1, lease.token, 0.01) is None


def test_an_action_may_be_posted_before_the_episode_is_taken(farm: Farm) -> None:
    spec = a_spec()
    farm.ledger.open(spec)
    mailbox = Mailbox(farm.redis, spec.episode_id)
    assert mailbox.post(1, command("ls")) is None
    _, lease = leased(farm, spec)
    assert mailbox.take(1, lease.token, 0.01) == command("ls")


def test_the_reset_needs_no_action(mailbox: Mailbox, lease: Lease) -> None:
    mailbox.finish(RESET_NUMBER, lease.token, Result(text="ready"))
    assert mailbox.wait(RESET_NUMBER, 0.01).text == "ready"


def test_numbers_that_were_read_already_do_not_cut_a_wait_short(mailbox: Mailbox, lease: Lease) -> None:
    """A result that is there at once leaves its number in the list that wakes; the next wait still waits."""
    for number in range(1, 6):
        mailbox.finish(number, lease.token, Result(text=str(number)))
        assert mailbox.wait(number, 1).text == str(number)
        mailbox.post(number, command(str(number)))
    began = time.monotonic()
    with pytest.raises(ActionPending):
        mailbox.wait(6, 0.3)
    assert time.monotonic() - began >= 0.3
    for number in range(11, 16):
        mailbox.post(number, command(str(number)))
        assert mailbox.take(number, lease.token, 0.01) is not None
    began = time.monotonic()
    assert mailbox.take(16, lease.token, 0.3) is None
    assert time.monotonic() - began >= 0.3


def test_stale_wakes_make_nobody_late(mailbox: Mailbox, lease: Lease) -> None:
    for number in range(1, 6):
        mailbox.finish(number, lease.token, Result(text=str(number)))
        mailbox.wait(number, 1)
    answers: list[tuple[str, float]] = []

    def wait() -> None:
        answers.append((mailbox.wait(6, 5).text, time.monotonic()))

    waiter = threading.Thread(target=wait)
    waiter.start()
    began = time.monotonic()
    mailbox.finish(6, lease.token, Result(text="six"))
    waiter.join(10)
    [(text, at)] = answers
    assert text == "six"
    assert at - began < 2.5


def test_everything_in_a_mailbox_expires(farm: Farm, mailbox: Mailbox, lease: Lease, redis: Redis) -> None:
    mailbox.post(1, command("ls"))
    mailbox.finish(RESET_NUMBER, lease.token, Result(text="ready"))
    for part in ("actions", "inbox", "results", "outbox"):
        assert 4100 < redis.ttl(Keys.mailbox(lease.episode_id, part)) <= 4200
    mailbox.take(1, lease.token, 0.01)
    assert 4100 < redis.ttl(Keys.mailbox(lease.episode_id, "taken")) <= 4200


def test_with_the_receipt_a_mailbox_has_ten_minutes_left(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    mailbox = Mailbox(farm.redis, spec.episode_id)
    mailbox.finish(RESET_NUMBER, lease.token, Result(text="ready"))
    mailbox.post(1, command("ls"))
    mailbox.take(1, lease.token, 0.01)
    mailbox.post(2, Action(name="close"))
    farm.ledger.commit(a_receipt(spec, Outcome.CANCELLED), lease.token)
    mailbox.finish(1, lease.token, Result(outcome=Outcome.CANCELLED))
    for part in PARTS:
        assert 500 < redis.ttl(Keys.mailbox(spec.episode_id, part)) <= 600


def test_only_what_may_still_be_asked_for_is_kept(farm: Farm, mailbox: Mailbox, lease: Lease, redis: Redis) -> None:
    """An episode of a thousand commands that each print 64 KiB would hold as much of Redis for over an hour."""
    mailbox.finish(RESET_NUMBER, lease.token, Result(text="ready"))
    asked = 30
    for number in range(1, asked + 1):
        mailbox.post(number, command(f"{number}{'#' * 10_000}"))
        assert mailbox.take(number, lease.token, 0.01) is not None
        mailbox.finish(number, lease.token, Result(text=f"{number}{'x' * 10_000}"))
        assert mailbox.wait(number, 1).text.startswith(f"{number}x")
    keys = redis.scan_iter(f"{Keys.mailbox(lease.episode_id, '')}*")
    held = sum(redis.memory_usage(key, samples=0) or 0 for key in keys)
    assert held < 100_000  # thirty of them held 600,000
    again = Mailbox(farm.redis, lease.episode_id)
    for number in (RESET_NUMBER, asked - 1, asked):
        assert again.result(number) is not None
    assert again.post(asked, command(f"{asked}{'#' * 10_000}")) == again.result(asked)
    with pytest.raises(FarmError, match="another action"):
        again.post(1, command(f"1{'#' * 10_000}"))
    assert again.take(1, lease.token, 0.01) is None, "forgotten, and still taken"


def test_there_and_back_takes_milliseconds(farm: Farm, mailbox: Mailbox, lease: Lease, redis_url: str) -> None:
    rounds = 200
    with opened_farm(redis_url) as slots_side:
        slot = Mailbox(slots_side.redis, lease.episode_id)

        def serve() -> None:
            for number in range(1, rounds + 1):
                while slot.take(number, lease.token, 5) is None:
                    pass
                slot.finish(number, lease.token, Result(text="done"))

        server = threading.Thread(target=serve)
        server.start()
        seconds = []
        for number in range(1, rounds + 1):
            began = time.monotonic()
            mailbox.post(number, command("true"))
            mailbox.wait(number, 5)
            seconds.append(time.monotonic() - began)
        server.join(10)
    median = statistics.median(seconds)
    assert median < 0.1
    assert max(seconds) < 2.5, "somebody missed a wake"
