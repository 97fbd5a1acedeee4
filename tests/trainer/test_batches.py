"""Batches of RemoteEpisodes that find no room, and what is ended of them; over slots without sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from orchestrator.episodes import Episode
from orchestrator.errors import CapacityError, EpisodeAborted, FarmError, LeaseLost, NeverFits, PlacesTaken
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.pool import Pool, Reservation
from orchestrator.presence import WorkerRow
from orchestrator.settings import Budgets, Settings
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import TASK, TinySlot, beat_slots, farm_of, farm_settings
from tests.support.fake_provider import FakeProvider
from tests.support.reconcilers import reconciler_of
from tests.support.waiting import wait_until
from trainer.environment import OnAbort, RemoteEpisode, RemoteEpisodes

ROW = TASK.model_dump_json()


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url)


@pytest.fixture
def farm(settings: Settings) -> Iterator[Farm]:
    with farm_of(settings) as farm:
        yield farm


class AskedPool(Pool):
    """Notes how long it is asked to wait for places."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[float] = []

    def reserve(self, count: int, *, wait_seconds: float = 0.0) -> Reservation:
        """Reserve."""
        self.asked.append(wait_seconds)
        return super().reserve(count, wait_seconds=wait_seconds)


@pytest.fixture
def pool(settings: Settings) -> Iterator[AskedPool]:
    pool = AskedPool(settings)
    with pool:
        yield pool
    pool.redis.close()


@pytest.fixture
def slots(settings: Settings) -> Iterator[list[TinySlot]]:
    with ExitStack() as stack:
        yield [stack.enter_context(TinySlot(settings, f"slot-{number}")) for number in range(3)]


def id_of(environment: RemoteEpisode) -> str:
    assert environment._episode is not None
    return environment._episode.episode_id


@pytest.mark.parametrize("on_abort", ["raise", "exclude"])
def test_a_batch_that_lost_its_room_ends_as_a_whole(
    farm: Farm, pool: Pool, slots: list[TinySlot], on_abort: OnAbort
) -> None:
    with RemoteEpisodes(pool, on_abort=on_abort) as episodes, episodes.batch(3):
        running, late, never_asked = [episodes() for _ in range(3)]
        running.reset(task=ROW)
        assert running.terminal("ls") == "ran ls"
        farm.limiter.change(concurrency=2)
        late.reset(task=ROW)
        never_asked.reset(task=ROW)
        with pytest.raises(EpisodeAborted, match="the concurrency limit fell below") as ended:
            late.terminal("ls")
        assert ended.value.outcome is Outcome.ADMISSION_TIMEOUT
        wait_until(lambda: farm.ledger.receipt(id_of(running)), description="the one that held a place has ended")
        with pytest.raises(EpisodeAborted, match="could not be live at once") as sibling:
            running.terminal("ls")
        assert sibling.value.outcome is Outcome.CANCELLED
    assert farm.limiter.capacity().permits == 0


def test_an_episode_without_reserved_batch_ends_no_other(farm: Farm, pool: Pool, slots: list[TinySlot]) -> None:
    with RemoteEpisodes(pool) as episodes:
        one, other = episodes(), episodes()
        for environment in (one, other):
            environment.reset(task=ROW)
        assert one.terminal("ls") == "ran ls"
        assert other._episode is not None
        error = EpisodeAborted(Outcome.ADMISSION_TIMEOUT, "no permit within 900 s of waiting")
        assert other._explained(error) is error
        assert one.terminal("pwd") == "ran pwd"


def test_a_worker_that_may_come_back_is_waited_for_only_once(farm: Farm, pool: AskedPool) -> None:
    beat_slots(farm, 2)
    episodes = RemoteEpisodes(pool, wait_seconds=2.5)
    episodes.reserve(2).release()
    farm.redis.delete(Keys.SLOTS)
    pool.asked.clear()
    with pytest.raises(NeverFits, match="0 slots are live"):
        episodes.reserve(2)
    assert len(pool.asked) > 2
    assert pool.asked == sorted(pool.asked, reverse=True)
    assert pool.asked[-1] == 0.0, "each look has what is left of the time, not the whole again"


def test_a_batch_that_is_larger_than_any_before_is_refused_at_once(farm: Farm, pool: AskedPool) -> None:
    beat_slots(farm, 2)
    episodes = RemoteEpisodes(pool)
    episodes.reserve(2).release()
    pool.asked.clear()
    with pytest.raises(NeverFits, match="a batch of 3"):
        episodes.reserve(3)
    assert len(pool.asked) == 1, "no worker comes back for a batch that never had one"


def test_a_batch_is_looked_at_without_waiting_for_its_places(farm: Farm, pool: AskedPool) -> None:
    beat_slots(farm, 2)
    episodes = RemoteEpisodes(pool)
    with pytest.raises(NeverFits):
        episodes.refuse_too_many(3)
    episodes.refuse_too_many(2)
    assert farm.limiter.capacity().reserved == 0
    with pool.reserve(2):
        episodes.refuse_too_many(2)
    assert set(pool.asked) == {0.0}


def test_places_that_others_hold_are_not_taken_for_missing_ones(farm: Farm, pool: AskedPool) -> None:
    beat_slots(farm, 2)
    episodes = RemoteEpisodes(pool, wait_seconds=0.1)
    with pool.reserve(2), pytest.raises(PlacesTaken):
        episodes.reserve(2)
    assert pool.asked[1:] == [pytest.approx(0.1, abs=0.05)]


def test_a_generation_of_fewer_episodes_leaves_the_next_one_whole(
    farm: Farm, pool: AskedPool, slots: list[TinySlot]
) -> None:
    """As TRL's own trainer resets them: an evaluation has fewer rows than a training batch."""
    with RemoteEpisodes(pool, batch_size=3, wait_seconds=5.0) as episodes:
        made = [episodes() for _ in range(3)]
        reserved = []
        for rows in (made, made[:2], made, made[:1], made[:1], made):
            for environment in rows:
                environment.reset(task=ROW)
            ledger_rows = [pool.ledger.row(id_of(environment)) for environment in rows]
            reserved.append({row.spec.reservation_id for row in ledger_rows if row is not None})
            for environment in rows:
                environment.terminal("ls")
                environment.submit()
                environment.get_reward()
    assert [len(names) for names in reserved] == [1] * 6, "no generation is of two batches"
    assert len(set.union(*reserved)) == 6
    assert len(pool.asked) == 6


@pytest.mark.parametrize("on_abort", ["raise", "exclude"])
def test_a_batch_whose_slots_died_ends_before_a_window_runs_out(redis_url: str, on_abort: OnAbort) -> None:
    """Its places were counted while the dead slots were not known to be dead; nobody took the other episode."""
    settings = farm_settings(redis_url, budgets=Budgets(policy_window_seconds=4))
    with farm_of(settings) as farm, Pool(settings) as pool, TinySlot(settings, "slot-0"):
        dead = WorkerRow("dead", "here", 1, "running", 1, "-")
        farm.presence.beat_worker(dead, ["dead-1"])
        reconciler = reconciler_of(farm, FakeProvider(), lease_seconds=0.2)
        with RemoteEpisodes(pool, on_abort=on_abort) as episodes, episodes.batch(2):
            runs, waits = episodes(), episodes()
            for environment in (runs, waits):
                environment.reset(task=ROW)
            assert runs.terminal("ls") == "ran ls"

            def ended() -> bool:
                reconciler.run_once()
                return farm.ledger.receipt(id_of(waits)) is not None

            wait_until(ended, description="the one that nobody took has ended")
            with pytest.raises(EpisodeAborted, match="others of its reserved batch ran") as late:
                waits.terminal("ls")
            assert late.value.outcome is Outcome.ADMISSION_TIMEOUT
            with pytest.raises(EpisodeAborted, match="could not be live at once"):
                runs.terminal("ls")
            if on_abort == "exclude":
                assert [runs.get_reward(), waits.get_reward()] == [None, None]


def test_a_reserved_batch_of_which_one_is_never_taken_ends_as_a_whole(farm: Farm, pool: Pool) -> None:
    with TinySlot(pool.settings, "slot-0"), RemoteEpisodes(pool, start_seconds=1.0) as episodes, episodes.batch(2):
        beat_slots(farm, 2)
        runs, waits = episodes(), episodes()
        for environment in (runs, waits):
            environment.reset(task=ROW)
        assert runs.terminal("ls") == "ran ls"
        with pytest.raises(EpisodeAborted, match="no worker took it"):
            waits.terminal("ls")
        wait_until(lambda: farm.ledger.receipt(id_of(runs)), description="the one that ran has ended")
        with pytest.raises(EpisodeAborted, match="not live at once: no worker took it"):
            runs.terminal("ls")


def test_a_generation_larger_than_its_batch_is_refused_at_once(
    farm: Farm, pool: AskedPool, slots: list[TinySlot]
) -> None:
    """As TRL's own trainer resets an evaluation of more rows than `batch_size`: all of them before any acts."""
    with RemoteEpisodes(pool, batch_size=2) as episodes:
        made = [episodes() for _ in range(3)]
        for environment in made[:2]:
            environment.reset(task=ROW)
        with pytest.raises(CapacityError, match=r"more than batch_size=2 .*per_device_eval_batch_size"):
            made[2].reset(task=ROW)
        assert len(pool.asked) == 1, "no place is waited for while the windows of others run"
        assert made[0].terminal("ls") == "ran ls"


def test_a_loop_of_ones_own_may_act_between_the_resets_of_a_batch(
    farm: Farm, pool: AskedPool, slots: list[TinySlot]
) -> None:
    with RemoteEpisodes(pool, batch_size=3) as episodes:
        for _ in range(3):
            environment = episodes()
            environment.reset(task=ROW)
            assert environment.terminal("ls") == "ran ls"
        assert len(pool.asked) == 1


@pytest.mark.parametrize("acts", ["terminal", "get_reward"])
def test_fresh_environments_after_a_batch_that_acted_are_another_generation(
    farm: Farm, pool: AskedPool, slots: list[TinySlot], acts: str
) -> None:
    with RemoteEpisodes(pool, batch_size=2) as episodes:
        for _ in range(2):
            made = [episodes() for _ in range(2)]
            for environment in made:
                environment.reset(task=ROW)
            for environment in made:
                getattr(environment, acts)(*["ls"] * (acts == "terminal"))
            for environment in made:
                environment.get_reward()


class Refusing(Episode):
    """An episode whose end is refused, such as one that was seized while it was ended."""

    def cancel(self) -> None:
        """Refuse."""
        raise LeaseLost(f"{self.episode_id}: not ours to end")


def test_one_episode_that_cannot_be_cancelled_keeps_no_other_running(
    farm: Farm, pool: Pool, slots: list[TinySlot], caplog: pytest.LogCaptureFixture
) -> None:
    episodes = RemoteEpisodes(pool)
    made = [episodes() for _ in range(3)]
    for environment in made:
        environment.reset(task=ROW)
        assert environment.terminal("ls") == "ran ls"
    first, *others = [environment._episode for environment in made]
    assert first is not None
    first.__class__ = Refusing
    episodes.cancel()
    for other in others:
        assert other is not None
        assert other.wait(timeout_seconds=10).outcome is Outcome.CANCELLED
    assert first.receipt() is None
    assert "not ours to end" in caplog.text
    first.__class__ = Episode
    episodes.close()


@pytest.mark.parametrize("changes", [{"wait_seconds": float("nan")}, {"start_seconds": "x"}, {"batch_size": "2"}])
def test_a_factory_that_cannot_be_is_refused_when_it_is_made(pool: Pool, changes: dict[str, Any]) -> None:
    with pytest.raises(FarmError, match="got"):
        RemoteEpisodes(pool, **changes)
