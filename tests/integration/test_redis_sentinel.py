"""A farm behind Sentinels: episodes go on over a failover, and what cannot be found is said with what to do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.connection import client
from orchestrator.errors import RedisUnavailable
from orchestrator.pool import Pool
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.vocabulary import Outcome
from tests.support import whole_farm
from tests.support.bare_farm import farm_settings
from tests.support.certificates import Authority
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.redis_processes import RedisProcess, Replicated
from tests.support.tls_port import TlsPort
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm"]

EPISODES = 6


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Replicated]:
    with Replicated(tmp_path / "replicated") as started:
        yield started


@pytest.fixture
def field(ground: Ground, replicated: Replicated) -> Iterator[Field]:
    with open_field(ground, redis_url=replicated.url, trainer_beat_seconds=1) as opened:
        yield opened


def crash(replicated: Replicated) -> None:
    """The primary dies when its replica has all that was answered: writes wait meanwhile."""
    primary = replicated.primary()
    with primary.client() as redis:
        redis.client_pause(20_000, all=False)
        assert redis.wait(1, 5_000) == 1
    primary.kill()


def shut_down(replicated: Replicated) -> None:
    """The primary is stopped in order; it waits for its replica itself."""
    with replicated.primary().client() as redis:
        redis.shutdown()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("leave", [crash, shut_down])
def test_episodes_go_on_over_a_failover(
    field: Field, replicated: Replicated, tmp_path: Path, leave: Callable[[Replicated], None]
) -> None:
    with whole_farm.orchestrator(field.settings, tmp_path / "orchestrator") as (_, metrics):
        field.worker("w1")
        with Pool(field.settings) as pool:
            driven = pool.submit(weekly_sales())
            assert '"east": 5' in driven.terminal("python3 -B /home/user/report.py")
            alone = [pool.submit(weekly_sales(), policy=script(candidate(repaired()))) for _ in range(EPISODES)]
            old = replicated.primary()
            failures: list[BaseException] = []

            def wait() -> None:  # blocks at the primary while it goes away
                try:
                    assert all(receipt.receipt.reward == 1.0 for receipt in pool.receipts(alone))
                except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                    failures.append(error)

            waiter = threading.Thread(target=wait)
            waiter.start()
            wait_until(
                lambda: any(episode.receipt() for episode in alone), description="the first episode ends", seconds=30
            )
            leave(replicated)
            driven.terminal(candidate(repaired()))
            driven.submit()
            assert driven.reward() == 1.0
            waiter.join(90)
            assert not waiter.is_alive()
            assert failures == []
            replicated.wait_failover(old)
        found = Counter(
            settled.receipt.episode_id
            for settled in Receipts(field.farm.redis, field.farm.ledger.allocations).select(ReceiptFilter())
        )
        assert found == Counter(pool.submitted)
        for episode in (driven, *alone):
            field.check_ended(episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
        whole_farm.check_metrics(field, metrics)


def test_a_connection_in_use_leaves_a_primary_that_was_replaced_while_it_lives(replicated: Replicated) -> None:
    old = replicated.primary()
    with client(farm_settings(replicated.url)) as redis:
        redis.set("written", 0)
        with replicated.sentinels[0].client() as sentinel:
            sentinel.sentinel_failover(Replicated.NAME)
        replicated.wait_failover(old)
        with replicated.primary().client() as new:

            def arrives() -> bool:
                redis.incr("written")
                return bool(new.get("written") == redis.get("written"))

            wait_until(arrives, description="writes go to the new primary", seconds=5)
        with old.client() as left:
            assert left.role()[0] == "master", "it was demoted: this shows nothing"


def test_a_primary_without_its_replicas_is_an_outage_that_passes(replicated: Replicated) -> None:
    primary = replicated.primary()
    with primary.client() as redis, client(farm_settings(replicated.url)) as ours:
        redis.config_set("min-replicas-to-write", 2)
        with client(farm_settings(replicated.url), patient=False) as impatient:
            with pytest.raises(RedisConnectionError, match="NOREPLICAS"):
                impatient.set("written", 1)
        later = threading.Timer(1.0, redis.config_set, ["min-replicas-to-write", 0])
        later.start()
        assert ours.set("written", 2)
        later.join()


def unavailable(url: str) -> str:
    with pytest.raises(RedisUnavailable) as told:
        Pool(farm_settings(url))
    return str(told.value)


def test_no_primary_is_said_with_what_to_do(replicated: Replicated) -> None:
    assert "correct the name in REDIS_URL" in unavailable(replicated.url.replace("/farm", "/other"))
    for sentinel in replicated.sentinels:
        sentinel.kill()
    assert "see that the Sentinels run" in unavailable(replicated.url)


def test_sentinels_with_a_password_are_asked_with_it(replicated: Replicated, tmp_path: Path) -> None:
    lines = [f"sentinel monitor farm 127.0.0.1 {replicated.servers[0].port} 2", "requirepass hunter2"]
    with RedisProcess(tmp_path / "sentinel", lines, sentinel=True) as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/farm"
        assert "sentinel_password" in unavailable(url)
        text = unavailable(f"{url}?sentinel_password=hunter3")
        assert "sentinel_password" in text
        assert "hunter3" not in text
        Pool(farm_settings(f"{url}?sentinel_password=hunter2")).close()


def test_a_sentinel_that_is_gone_is_passed_over(replicated: Replicated) -> None:
    replicated.sentinels[0].kill()
    Pool(farm_settings(replicated.url)).close()


def test_sentinels_and_servers_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("server", "127.0.0.1")
    with RedisProcess(tmp_path / "server") as server, TlsPort(server.port, certificate) as secured:
        monitor = f"sentinel monitor farm 127.0.0.1 {secured.port} 1"
        with (
            RedisProcess(tmp_path / "sentinel", [monitor], sentinel=True) as sentinel,
            TlsPort(sentinel.port, certificate) as asked,
        ):
            url = f"rediss+sentinel://127.0.0.1:{asked.port}/farm/2"
            with client(farm_settings(url, redis_ca_file=authority.ca_file)) as redis:
                redis.set("farm:tag", "here")
            with Redis(port=server.port, db=2, decode_responses=True) as plain:
                assert plain.get("farm:tag") == "here"
            assert (secured.handshakes, asked.handshakes) == (1, 1)
            assert "FARM_REDIS_CA_FILE" in unavailable(url)
