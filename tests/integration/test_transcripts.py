"""Transcripts on a real Redis: in order, capped, apart from the receipt, gone at retention."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from orchestrator.dashboard.episode import episode_page
from orchestrator.dashboard.lookout import Lookout
from orchestrator.errors import LeaseLost
from orchestrator.keys import Keys
from orchestrator.settings import Budgets
from orchestrator.transcripts import Transcript, read_transcript
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import a_spec
from tests.support.farm import open_field
from tests.support.ground import Ground
from tests.support.policies import script
from workers.executor import Executor, Parts

pytest_plugins = ["tests.support.farm"]


def test_entries_are_kept_in_order(redis: Redis) -> None:
    transcript = Transcript(redis, "e-1", limit_bytes=10_000, retention_seconds=100)
    transcript.add("terminal", "cat report.py")
    transcript.add("observation", "größer\n\ufffd")
    transcript.flush()
    assert read_transcript(redis, "e-1") == [
        {"role": "terminal", "text": "cat report.py"},
        {"role": "observation", "text": "größer\n\ufffd"},
    ]
    assert 95 <= redis.ttl(Keys.transcript("e-1")) <= 100


def test_past_its_cap_it_says_so_once_and_keeps_no_more(redis: Redis) -> None:
    transcript = Transcript(redis, "e-1", limit_bytes=1000, retention_seconds=100)
    for _ in range(5):
        transcript.add("observation", "x" * 400)
    transcript.add("terminal", "short")
    transcript.flush()
    entries = read_transcript(redis, "e-1")
    assert [entry["role"] for entry in entries] == ["observation", "observation", "notice"]
    kept = sum(len(entry) for entry in redis.lrange(Keys.transcript("e-1"), 0, -1))
    assert kept <= 1000 + len('{"role": "notice", "text": "transcript cut at its cap"}')


def test_a_late_flush_keeps_what_a_longer_retention_was_given(redis: Redis) -> None:
    """Its slot stood still, and another process has written the receipt meanwhile."""
    transcript = Transcript(redis, "e-1", limit_bytes=10_000, retention_seconds=100)
    for life, kept in ((1000, 1000), (10, 100)):
        transcript.add("terminal", "ls")
        transcript.flush()
        redis.expire(Keys.transcript("e-1"), life)
        transcript.add("terminal", "late")
        transcript.flush()
        assert kept - 5 <= redis.ttl(Keys.transcript("e-1")) <= kept
    assert len(read_transcript(redis, "e-1")) == 4


def test_an_idle_slot_looks_at_its_lease_before_it_writes(redis: Redis) -> None:
    class Settling(Transcript):
        def settle(self) -> None:
            raise AssertionError("written for an episode that may be another's")

    def check() -> None:
        raise LeaseLost("the lease is lost")

    none: Any = None
    transcript = Settling(redis, "e-1", limit_bytes=1000, retention_seconds=100)
    parts = Parts(none, none, none, none, none, transcript, "tag", "worker-1", check, none)
    with pytest.raises(LeaseLost):
        Executor(a_spec("e-1"), none, Budgets(), parts, none).idle()


def test_a_cap_of_zero_keeps_nothing(redis: Redis) -> None:
    Transcript(redis, "e-1", limit_bytes=0, retention_seconds=100).add("terminal", "ls")
    assert not redis.exists(Keys.transcript("e-1"))
    assert read_transcript(redis, "e-1") == []


def test_a_transcript_lives_as_long_as_its_receipt_and_the_setting_keeps_it_away(ground: Ground) -> None:
    with open_field(ground, receipt_retention_seconds=500) as kept:
        spec = kept.spec(script("echo hello"))
        kept.run(spec)
        lives = [kept.farm.redis.ttl(key(spec.episode_id)) for key in (Keys.transcript, Keys.receipt)]
        assert all(400 < life <= 500 for life in lives)
        assert [entry["text"] for entry in read_transcript(kept.farm.redis, spec.episode_id)] == [
            "echo hello",
            "hello\n",
            "",
        ]
    with open_field(ground, transcript_bytes=0) as off:
        spec = off.spec(script("echo hello"))
        off.run(spec)
        off.check_ended(spec.episode_id, Outcome.WRONG_ANSWER, roles=("policy", "verifier"))
        assert not off.farm.redis.exists(Keys.transcript(spec.episode_id))
        assert "No transcript: none was kept" in episode_page(Lookout(off.farm).episode(spec.episode_id))
