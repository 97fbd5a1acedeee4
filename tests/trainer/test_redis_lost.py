"""A Redis that goes away in the middle of a batch: the run ends with what to do, and its episodes end by themselves."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.embedded import EmbeddedRedis
from orchestrator.connection import Patience
from orchestrator.errors import EpisodeAborted, RedisUnavailable
from orchestrator.pool import Pool
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import TASK, TinySlot, farm_settings, opened_farm
from tests.support.tiny_policy import grpo_config, make_model, make_tokenizer, rows, script_words, scripted, shell
from tests.support.waiting import wait_until
from trainer import FarmGRPOTrainer, RemoteEpisodes


@pytest.mark.parametrize("on_abort", ["raise", "exclude"])
def test_a_redis_lost_in_mid_batch_ends_the_run_and_leaves_nothing_running(tmp_path: Path, on_abort: str) -> None:
    scripts = [[[shell("first")], [shell("second")], []]]
    tokenizer = make_tokenizer([*script_words(scripts), "fix"])
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(tmp_path / "redis"))
        settings = farm_settings(server.url, trainer_beat_seconds=0.2, trainer_lost_seconds=1)
        slots = [stack.enter_context(TinySlot(settings, f"slot-{name}")) for name in "ab"]
        turns = 0

        def lose(self: object, *args: object, **options: object) -> object:
            nonlocal turns
            turns += 1
            if turns == 2:  # the first calls are answered, the second are about to be made
                server.kill()
            return sample(self, *args, **options)

        with (
            Pool(settings) as pool,
            RemoteEpisodes(pool, on_abort="exclude" if on_abort == "exclude" else "raise") as it,
        ):
            trainer = scripted(FarmGRPOTrainer, scripts)(
                model=make_model(tokenizer),
                args=grpo_config(tmp_path / "out", batch=2),
                train_dataset=rows(TASK),
                processing_class=tokenizer,
                environment_factory=it,
            )
            sample = type(trainer)._generate_single_turn
            type(trainer)._generate_single_turn = lose
            pool.redis.set_retry(Retry(NoBackoff(), 0))  # a patient client would try for ten seconds
            with pytest.raises(RedisUnavailable, match="ask again when it is back"):
                trainer.train()
        assert [slot.commands for slot in slots] == [["first"], ["first"]]
        server.start()
        with opened_farm(server.url) as farm:
            for name in pool.submitted:
                wait_until(
                    lambda name=name: farm.ledger.receipt(name),  # type: ignore[misc]
                    description=f"{name} ended by itself",
                    seconds=20,
                )
                settled = farm.ledger.receipt(name)
                assert settled is not None
                assert settled.receipt.outcome in (Outcome.TRAINER_LOST, Outcome.CANCELLED)
            wait_until(lambda: farm.limiter.capacity().permits == 0, description="all places are free")


def test_what_redis_lost_is_raised_again_at_reward_time(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        settings = farm_settings(server.url)
        with TinySlot(settings), Pool(settings) as pool, RemoteEpisodes(pool) as episodes:
            environment = episodes()
            environment.reset(task=TASK.model_dump_json())
            assert environment.terminal("ls") == "ran ls"
            pool.redis.set_retry(Retry(NoBackoff(), 0))
            server.kill()
            with pytest.raises(RedisUnavailable):
                environment.terminal("pwd")
            server.start()
            for _ in range(2):
                with pytest.raises(RedisUnavailable) as raised:
                    environment.get_reward()
                assert not isinstance(raised.value, EpisodeAborted)


class Counted(NoBackoff):
    """Waits between attempts that take no time, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def compute(self, failures: int) -> float:
        """The next wait."""
        self.waits += 1
        return 0.0


def test_an_outage_is_waited_out_once_and_not_again_for_each_episode(tmp_path: Path) -> None:
    waits = Counted()
    with EmbeddedRedis(tmp_path / "redis") as server, ExitStack() as stack:
        settings = farm_settings(server.url, trainer_beat_seconds=60, trainer_lost_seconds=120)
        slots = [stack.enter_context(TinySlot(settings, f"slot-{name}")) for name in "abcd"]
        with Pool(settings) as pool, RemoteEpisodes(pool) as episodes, episodes.batch(4):
            made = [episodes() for _ in slots]
            for environment in made:
                environment.reset(task=TASK.model_dump_json())
                assert environment.terminal("ls") == "ran ls"
            Patience(waits).shared_by(pool.redis, pool._queue.rq.connection)
            server.kill()
            with pytest.raises(RedisUnavailable):
                made[0].terminal("pwd")
            once = waits.waits
            assert once >= 5, "a short outage is waited out"
            for environment in made[1:]:
                with pytest.raises(RedisUnavailable):
                    environment.terminal("pwd")
        assert waits.waits == once, "neither their calls nor their ends have waited again"
        server.start()
        pool.capacity()
        server.kill()
        with pytest.raises(RedisUnavailable):
            pool.capacity()
        assert waits.waits >= once + 5, "the next outage is waited out again"
        server.start()
