"""RemoteEpisode over real workers: what TRL makes of it, what the model may call, what is remembered and closed."""

from __future__ import annotations

import inspect
import json

import pytest

from orchestrator.errors import CapacityError, CommandTooLarge, EpisodeAborted, EpisodeClosed, FarmError
from orchestrator.pool import Pool
from orchestrator.tasks import TaskError
from orchestrator.vocabulary import EpisodeState, Outcome
from tests.support.bare_farm import beat_slots, farm_settings, opened_farm
from tests.support.farm import Field
from tests.support.policies import candidate, repaired, weekly_sales
from tests.support.redis_server import announced
from tests.support.waiting import wait_until
from trainer import RemoteEpisode, RemoteEpisodes

PROMPT = [{"role": "user", "content": "fix it"}]
TASK = weekly_sales().model_dump_json()


def reset(environment: RemoteEpisode, **columns: object) -> RemoteEpisode:
    environment.reset(task=TASK, prompt=PROMPT, **columns)
    return environment


def id_of(environment: RemoteEpisode) -> str:
    assert environment._episode is not None
    return environment._episode.episode_id


def test_the_models_tools_are_terminal_and_submit_only() -> None:
    public = [name for name, _ in inspect.getmembers(RemoteEpisode, inspect.isfunction) if not name.startswith("_")]
    assert public == ["get_reward", "reset", "submit", "terminal"]
    assert list(inspect.signature(RemoteEpisode.terminal).parameters) == ["self", "command"]
    assert list(inspect.signature(RemoteEpisode.submit).parameters) == ["self"]


def test_making_one_allocates_nothing(pool: Pool, episodes: RemoteEpisodes) -> None:
    for _ in range(3):
        episodes()
    assert pool.submitted == []
    assert pool.capacity().free == 4


def test_an_episode_is_repaired_submitted_and_scored(farm: Field, episodes: RemoteEpisodes) -> None:
    environment = reset(episodes())
    assert '"east": 5' in environment.terminal("python3 -B /home/user/report.py")
    environment.terminal(candidate(repaired()))
    assert "closed" in environment.submit()
    assert environment.get_reward() == 1.0
    assert environment.get_reward() == 1.0
    with pytest.raises(EpisodeClosed):
        environment.terminal("ls")
    farm.check_ended(id_of(environment), Outcome.SOLVED, roles=("policy", "verifier"))


def test_a_reset_enqueues_and_returns(redis_url: str) -> None:
    settings = farm_settings(redis_url)
    with opened_farm(redis_url) as farm, Pool(settings) as pool, RemoteEpisodes(pool, start_seconds=20) as episodes:
        beat_slots(farm, 4)  # they say that they are alive, and take nothing: who waits for one is given up
        with episodes.batch(4):
            made = [reset(episodes()) for _ in range(4)]
            assert pool.submitted == [id_of(environment) for environment in made]
            assert [pool.ledger.state(name) for name in pool.submitted] == [EpisodeState.QUEUED] * 4


def test_a_task_may_be_a_dict_and_its_prompt_reaches_the_model(episodes: RemoteEpisodes) -> None:
    task = weekly_sales()
    empty = [{"role": "user", "content": ""}]
    assert episodes().reset(task=json.loads(TASK), prompt=empty) == task.prompt
    assert episodes().reset(task=TASK) == task.prompt
    assert episodes().reset(task=TASK, prompt=PROMPT, other_column=3) is None


@pytest.mark.parametrize(
    "column", [None, "not json", "[]", '"text"', 5, '{"id": "x"}', '{"a": 1, "a": 2', "[" * 100_000]
)
def test_a_column_that_is_no_task_is_refused_with_what_to_do(
    pool: Pool, episodes: RemoteEpisodes, column: object
) -> None:
    with pytest.raises(TaskError) as refused:
        episodes().reset(task=column, prompt=PROMPT)  # type: ignore[arg-type]
    if column != '{"id": "x"}':
        assert "json.dumps" in str(refused.value)
    assert pool.submitted == []


def test_what_a_model_may_write_is_no_infrastructure_failure(episodes: RemoteEpisodes) -> None:
    environment = reset(episodes())
    with pytest.raises(TypeError):
        environment.terminal(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="UTF-8"):
        environment.terminal("\ud800")
    with pytest.raises(CommandTooLarge):
        environment.terminal("x" * 200_000)
    assert "NUL" in environment.terminal("a\0b")
    assert "3" in environment.terminal("exit 3")
    assert environment.get_reward() == 0.0


def lose(farm: Field, environment: RemoteEpisode) -> None:
    """Delete the sandbox under a running episode."""
    assert environment.terminal("echo alive") == "alive\n"
    farm.provider.delete(farm.policy_sandbox(id_of(environment)))


def test_a_swallowed_tool_exception_is_raised_again_at_reward_time(farm: Field, episodes: RemoteEpisodes) -> None:
    environment = reset(episodes())
    lose(farm, environment)
    for _ in range(2):
        with pytest.raises(EpisodeAborted):
            environment.terminal("ls")
    for _ in range(2):
        with pytest.raises(EpisodeAborted) as raised:
            environment.get_reward()
        assert raised.value.outcome is Outcome.SANDBOX_LOST


def test_an_excluded_episode_has_no_reward(farm: Field, pool: Pool) -> None:
    with RemoteEpisodes(pool, on_abort="exclude") as episodes, episodes.batch(2):
        environment = reset(episodes())
        lose(farm, environment)
        with pytest.raises(EpisodeAborted):
            environment.terminal("ls")
        assert environment.get_reward() is None
        reset(environment)
        assert environment.get_reward() == 0.0


def test_a_reset_replaces_an_unfinished_episode(farm: Field, episodes: RemoteEpisodes) -> None:
    environment = reset(episodes())
    environment.terminal("touch /home/user/mark")
    first = id_of(environment)
    reset(environment)
    assert "mark" not in environment.terminal("ls /home/user")
    farm.wait_receipt(first)
    farm.check_ended(first, Outcome.CANCELLED)


def test_closing_ends_every_episode_also_of_forgotten_environments(farm: Field, pool: Pool) -> None:
    with RemoteEpisodes(pool) as episodes:
        first = reset(episodes())
        first.terminal("true")
        ids = [id_of(first), id_of(reset(episodes()))]
        del first
    assert [farm.receipt(name).receipt.outcome for name in ids] == [Outcome.CANCELLED] * 2
    assert [farm.running(name) for name in ids] == [[], []]
    episodes.close()


def test_a_run_holds_no_more_episodes_than_it_has_environments(farm: Field, pool: Pool) -> None:
    with RemoteEpisodes(pool, on_abort="exclude") as episodes:
        solved, lost = episodes(), episodes()
        for _ in range(3):
            with episodes.batch(2):
                reset(solved), reset(lost)
                lose(farm, lost)
                assert [solved.get_reward(), lost.get_reward()] == [0.0, None]
            assert pool.submitted == [id_of(solved), id_of(lost)]


# places


def test_a_batch_has_its_places_before_it_starts(pool: Pool) -> None:
    with RemoteEpisodes(pool) as episodes:
        with episodes.batch(3):
            assert pool.capacity().reserved == 0, "nothing before the first reset"
            reset(episodes())
            wait_until(lambda: pool.capacity().permits == 1, description="the first is admitted")
            assert pool.capacity().free == 1, "one runs, two places are kept"
        assert pool.capacity().reserved == 0


def test_a_batch_that_can_never_be_live_is_refused_before_anything_starts(pool: Pool) -> None:
    with RemoteEpisodes(pool, batch_size=6) as episodes:
        with pytest.raises(CapacityError, match="add 1 worker"):
            reset(episodes())
    assert pool.submitted == []


def test_with_trls_own_trainer_every_batch_reserves_its_places(pool: Pool) -> None:
    with RemoteEpisodes(pool, batch_size=2) as episodes:
        made = [episodes() for _ in range(2)]
        for _ in range(2):
            for environment in made:
                reset(environment)
            assert [environment.get_reward() for environment in made] == [0.0, 0.0]
        rows = [pool.ledger.row(name) for name in announced(pool.redis, pool.run_id)]
        reservations = [row.spec.reservation_id for row in rows if row is not None]
        assert reservations[0] == reservations[1] != reservations[2] == reservations[3]


def test_an_episode_that_no_worker_takes_is_given_up(redis_url: str) -> None:
    settings = farm_settings(redis_url)
    with opened_farm(redis_url) as farm, Pool(settings) as pool, RemoteEpisodes(pool, start_seconds=0.2) as episodes:
        beat_slots(farm, 2)  # they say that they are alive, and take nothing
        with episodes.batch(1):
            environment = reset(episodes())
            with pytest.raises(EpisodeAborted, match="no worker took it"):
                environment.terminal("ls")
            with pytest.raises(EpisodeAborted, match="rollout-farm status"):
                environment.get_reward()


def test_with_no_worker_alive_nothing_is_waited_for_without_a_batch_either(redis_url: str) -> None:
    with Pool(farm_settings(redis_url)) as pool, RemoteEpisodes(pool) as episodes:
        with pytest.raises(CapacityError, match="0 slots are live"):
            reset(episodes())
        assert pool.submitted == []


def test_trls_own_trainer_cannot_leave_an_episode_out(redis_url: str) -> None:
    with Pool(farm_settings(redis_url)) as pool, RemoteEpisodes(pool, on_abort="exclude", batch_size=2) as episodes:
        with pytest.raises(FarmError, match="takes FarmGRPOTrainer"):
            episodes().reset(task=TASK, prompt=[{"role": "user", "content": "fix it"}])
        assert pool.submitted == []


def test_with_no_worker_alive_nothing_is_begun(redis_url: str) -> None:
    with Pool(farm_settings(redis_url)) as pool, RemoteEpisodes(pool) as episodes, episodes.batch(2):
        with pytest.raises(CapacityError, match="0 slots are live"):
            reset(episodes())
        assert pool.submitted == []
