"""What breaks under an episode: sandboxes, servers, keys, deletions, trainers. Never a score, never a thing left."""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from orchestrator.errors import EpisodeAborted, InfrastructureLost
from orchestrator.keys import Keys
from orchestrator.provider import CreateRequest, Sandbox
from orchestrator.status import read_status
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, Running
from tests.support.ground import BUDGETS, KEY, Ground
from tests.support.policies import candidate, repaired, script
from tests.support.reconcilers import reconciler_of
from tests.support.terminus import serving, terminus_server
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm"]

BOTH = ("policy", "verifier")


# the sandbox


def test_a_lost_sandbox_ends_the_terminal_call_and_every_later_one(field: Field, running: Running) -> None:
    episode = running.episode
    field.provider.delete(field.policy_sandbox(episode.episode_id))
    with pytest.raises(InfrastructureLost) as caught:
        episode.terminal("true")
    assert caught.value.outcome is Outcome.SANDBOX_LOST
    with pytest.raises(InfrastructureLost):  # the caller swallowed the first one
        episode.terminal("true")
    with pytest.raises(InfrastructureLost):
        episode.submit()
    with pytest.raises(EpisodeAborted) as again:
        episode.reward()
    assert again.value.outcome is Outcome.SANDBOX_LOST
    field.check_ended(episode.episode_id, Outcome.SANDBOX_LOST)


def test_a_lost_sandbox_is_found_at_reward_collection(field: Field, running: Running) -> None:
    episode = running.episode
    field.provider.delete(field.policy_sandbox(episode.episode_id))
    with pytest.raises(EpisodeAborted) as caught:
        episode.reward()
    assert caught.value.outcome is Outcome.SANDBOX_LOST
    field.check_ended(episode.episode_id, Outcome.SANDBOX_LOST)


def test_a_lost_sandbox_is_found_at_submission(field: Field, running: Running) -> None:
    episode = running.episode
    field.provider.delete(field.policy_sandbox(episode.episode_id))
    with pytest.raises(InfrastructureLost) as caught:
        episode.submit()
    assert caught.value.outcome is Outcome.SANDBOX_LOST
    field.check_ended(episode.episode_id, Outcome.SANDBOX_LOST)


def test_a_sandbox_lost_during_a_command_is_a_lost_sandbox(field: Field, running: Running) -> None:
    episode = running.episode
    sandbox = field.policy_sandbox(episode.episode_id)
    killer = threading.Timer(0.3, field.provider.delete, [sandbox])
    killer.start()
    with pytest.raises(InfrastructureLost) as caught:
        episode.terminal("sleep 1.9")
    killer.join()
    assert caught.value.outcome is Outcome.SANDBOX_LOST
    field.check_ended(episode.episode_id, Outcome.SANDBOX_LOST)


def test_an_exhausted_window_of_a_lost_sandbox_is_not_a_score(field: Field) -> None:
    spec = field.spec(budgets=BUDGETS.model_copy(update={"policy_window_seconds": 1.5}))
    started = field.remote(spec)
    started.episode.reset()
    field.provider.delete(field.policy_sandbox(spec.episode_id))
    started.end()
    field.check_ended(spec.episode_id, Outcome.SANDBOX_LOST)


def test_a_verifier_that_is_lost_while_it_runs_aborts_without_a_score(field: Field) -> None:
    spec = field.spec(script(candidate("import time; time.sleep(4)\n" + repaired())))
    sure: list[str] = []

    def kill_verifier() -> None:
        wait_until(
            lambda: [row for row in field.running(spec.episode_id) if row.metadata["role"] == "verifier"],
            description="a verifier",
        )
        sure.append(field.running(spec.episode_id)[0].sandbox_id)
        field.provider.delete(sure[0])

    killer = threading.Thread(target=kill_verifier)
    killer.start()
    outcome = field.run(spec)
    killer.join()
    assert sure
    assert outcome == "sandbox_lost"
    field.check_ended(spec.episode_id, Outcome.SANDBOX_LOST, roles=BOTH)


# the Terminus server


def test_a_killed_terminus_server_is_a_transport_failure(field: Field) -> None:
    with terminus_server(field.ground.sandboxes.url, BUDGETS, key=KEY) as (url, process):
        started = field.remote(field.spec(), terminus_url=url)
        episode = started.episode
        episode.terminal("true")
        process.kill()
        with pytest.raises(InfrastructureLost) as caught:
            episode.terminal("true")
    assert caught.value.outcome is Outcome.TRANSPORT
    with pytest.raises(EpisodeAborted):
        episode.reward()
    started.end()
    field.check_ended(episode.episode_id, Outcome.TRANSPORT)


def test_a_terminus_server_killed_during_a_command_is_a_transport_failure_at_once(field: Field) -> None:
    with terminus_server(field.ground.sandboxes.url, BUDGETS, key=KEY) as (url, process):
        started = field.remote(field.spec(), terminus_url=url)
        episode = started.episode
        episode.reset()
        killer = threading.Timer(0.3, process.kill)
        killer.start()
        with pytest.raises(InfrastructureLost) as caught:
            episode.terminal("sleep 1.9")
        killer.join()
    assert caught.value.outcome is Outcome.TRANSPORT
    started.end()
    field.check_ended(episode.episode_id, Outcome.TRANSPORT)


# the key


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Counter)
        with socket.create_connection(self.server.upstream) as upstream:
            back = threading.Thread(target=_copy, args=(upstream, self.request, None))
            back.start()
            _copy(self.request, upstream, self.server.seen)
            back.join()


def _copy(source: socket.socket, target: socket.socket, seen: bytearray | None) -> None:
    try:
        while data := source.recv(65536):
            if seen is not None:
                seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side has left: so does this one


class _Counter(socketserver.ThreadingTCPServer):
    """Passes everything on to the service and remembers what was asked."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        parts = urlsplit(url)
        self.upstream = (parts.hostname, parts.port)
        self.seen = bytearray()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def requests(self) -> list[str]:
        return [line.decode() for line in re.findall(rb"(?:GET|POST|PUT|DELETE) /\S* ", bytes(self.seen))]


@contextmanager
def _counting(url: str) -> Iterator[_Counter]:
    with _Counter(url) as counter:
        thread = threading.Thread(target=counter.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield counter
        finally:
            counter.shutdown()
            thread.join()


def test_a_wrong_key_is_fatal_at_the_first_request(field: Field) -> None:
    with (
        _counting(field.ground.sandboxes.url) as counter,
        serving(E2BProvider("wrong", api_url=counter.url), BUDGETS) as terminus_url,
    ):
        spec = field.spec(script(candidate(repaired())))
        wrong = E2BProvider("wrong", api_url=counter.url)
        assert field.run(spec, provider=wrong, terminus_url=terminus_url) == "setup_failed"
        assert counter.requests() == ["POST /v2/sandboxes "]
    settled = field.check_ended(spec.episode_id, Outcome.SETUP_FAILED, roles=())
    assert [row.state for row in settled.allocations] == ["refused"]
    assert "E2B_API_KEY" in (settled.receipt.detail or "")


def test_a_command_asks_nothing_of_the_control_plane(field: Field) -> None:
    asked = []
    for commands in (1, 8):
        with (
            _counting(field.ground.sandboxes.url) as counter,
            serving(E2BProvider(KEY, api_url=counter.url), BUDGETS) as terminus_url,
        ):
            spec = field.spec(script(*["true"] * commands, candidate(repaired())))
            provider = E2BProvider(KEY, api_url=counter.url)
            assert field.run(spec, provider=provider, terminus_url=terminus_url) == "solved"

            def calls(counter: _Counter = counter) -> list[str]:
                return sorted(line.split()[0] for line in counter.requests() if "/sandboxes" in line)

            # Create, size, delete and confirm for each of two; connect; and, a little later, the server's own deletion.
            wait_until(lambda: len(calls()) >= 10, description="the session is closed")
            asked.append(calls())
    assert [len(calls) for calls in asked] == [10, 10]
    assert asked[0] == asked[1]


# deletion


class Undeletable(E2BProvider):
    """Answers that it deletes, and does not."""

    def delete(self, sandbox_id: str) -> None: ...


@pytest.fixture(scope="module")
def undeletable(ground: Ground) -> Iterator[tuple[Undeletable, str]]:
    """Such a provider, and a Terminus server that has one too."""
    provider = Undeletable(KEY, api_url=ground.sandboxes.url)
    with serving(provider, BUDGETS) as url:
        yield provider, url


@pytest.mark.parametrize("submit", [True, False])
def test_a_policy_sandbox_that_stays_is_reported_and_no_verifier_is_made(
    field: Field, undeletable: tuple[Undeletable, str], submit: bool
) -> None:
    provider, url = undeletable
    spec = field.spec(script(candidate(repaired()), submit=submit))
    assert field.run(spec, provider=provider, terminus_url=url) == "cleanup_unresolved"
    settled = field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, unresolved=True)
    (sandbox,) = field.running(spec.episode_id)
    assert sandbox.sandbox_id in (settled.receipt.detail or "")
    assert [(row.sandbox_id, row.state) for row in settled.allocations] == [(sandbox.sandbox_id, "unresolved")]
    farm = field.farm
    assert farm.redis.zscore(Keys.PERMITS, spec.episode_id) is not None
    status = read_status(farm)
    assert [row.sandbox_id for row in status.unresolved] == [sandbox.sandbox_id]

    reconciler = reconciler_of(farm, field.provider, "r")
    reconciler.run_once()
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED)


def test_a_verifier_that_stays_takes_the_score_away(field: Field) -> None:
    class OneDeletion(E2BProvider):
        verifiers: list[str] = []

        def create(self, request: CreateRequest) -> Sandbox:
            made = super().create(request)
            self.verifiers.append(made.sandbox_id)
            return made

        def delete(self, sandbox_id: str) -> None:
            if sandbox_id not in self.verifiers:
                super().delete(sandbox_id)

    spec = field.spec(script(candidate(repaired())))
    provider = OneDeletion(KEY, api_url=field.ground.sandboxes.url)
    assert field.run(spec, provider=provider) == "cleanup_unresolved"
    settled = field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, roles=BOTH, unresolved=True)
    assert settled.receipt.reward is None
    field.provider.delete(provider.verifiers[0])
