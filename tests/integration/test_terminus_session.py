"""The slot's session through a real Terminus server; the provider is a small fake where a test needs it to fail."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openenv.core.generic_client import GenericEnvClient  # type: ignore[import-untyped]

from orchestrator.errors import (
    AuthenticationFailed,
    ConcurrencyLimited,
    CreateRejected,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
    SandboxGone,
)
from orchestrator.provider import CreateRequest
from orchestrator.settings import Budgets
from tests.support.fake_provider import FakeProvider, printed
from tests.support.terminus import serving
from tests.support.waiting import wait_until
from workers.terminus.client import ServerAtCapacity, TerminusSession
from workers.terminus.environment import TerminusEnvironment

REQUEST = CreateRequest("t-1", "base", 60, allow_internet_access=False, metadata={"a": "b"}, envs={"C": "d"})
OTHER, THIRD = (replace(REQUEST, allocation_id=name) for name in ("t-2", "t-3"))
BUDGETS = Budgets(command_seconds=2, message_seconds=6)


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def url(provider: FakeProvider) -> Iterator[str]:
    with serving(provider, BUDGETS) as base_url:
        yield base_url


@pytest.fixture
def session(url: str) -> Iterator[TerminusSession]:
    made = TerminusSession(url, BUDGETS)
    yield made
    made.close()


def test_reset_makes_exactly_the_allocation_it_was_given(session: TerminusSession, provider: FakeProvider) -> None:
    assert session.reset(REQUEST) == "sbx0"
    assert provider.created == [REQUEST]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"verify": 5}, "verify: must be a command or a list of commands, got int"),
        ({"setup": {"a": 1}}, "setup: must be a command or a list of commands, got dict"),
        ({"setup": ["true", ["false"]]}, "setup: command 2 must be a string, got list"),
        ({"verify_scripts": 0.5}, "verify_scripts: must be a command or a list of commands, got float"),
        ({"setup": False}, "setup: must be a command or a list of commands, got bool"),
    ],
)
def test_what_is_no_command_is_refused_before_a_sandbox_is_made(
    url: str, provider: FakeProvider, arguments: dict[str, Any], said: str
) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        metadata = client.reset(**arguments).observation["metadata"]
        assert metadata["status"] == "error"
        assert said in metadata["error"]
        assert metadata["failure"]["kind"] == "create_rejected"
        assert provider.created == []
        assert client.reset(setup=None, verify="").observation["metadata"]["status"] == "ready"


def test_a_command_is_an_observation_with_its_facts(session: TerminusSession, provider: FakeProvider) -> None:
    session.reset(REQUEST)
    provider.last.answers = [printed(b"out", b"err\n", code=3)]
    seen = session.terminal("x")
    assert (seen.text, seen.exit_code) == ("out\nerr\n[exit code 3]", 3)
    assert (seen.timed_out, seen.truncated, seen.binary) == (False, False, False)


def test_the_episodes_own_command_limit_holds_not_the_servers(url: str, provider: FakeProvider) -> None:
    session = TerminusSession(url, BUDGETS.model_copy(update={"command_seconds": 0.75}))
    session.reset(REQUEST)
    session.terminal("true")
    session.close()
    assert provider.last.limits == [0.75]


def test_a_timed_out_command_is_an_observation_and_the_session_goes_on(
    session: TerminusSession, provider: FakeProvider
) -> None:
    session.reset(REQUEST)
    provider.last.answers = [printed(b"", code=None, timed_out=True)]
    seen = session.terminal("sleep 100")
    assert seen.timed_out
    assert seen.exit_code is None
    assert seen.text == "[timed out: killed after 2 s]"
    assert session.terminal("still here").text == "still here"


def test_binary_output_is_replaced_and_flagged(session: TerminusSession, provider: FakeProvider) -> None:
    session.reset(REQUEST)
    provider.last.answers = [printed(b"\xff\xfe", stdout_cut=True)]
    seen = session.terminal("cat picture")
    assert seen.binary
    assert seen.truncated
    assert seen.text.startswith("\ufffd\ufffd\n[output truncated]")


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationFailed("key"),
        CreateRejected("template"),
        NothingSent("refused"),
        RateLimited("slow", 7.0),
        RateLimited("slow"),
        ConcurrencyLimited("full"),
        OutcomeUnknown("lost"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failed_creation_arrives_typed_after_one_attempt(
    session: TerminusSession, provider: FakeProvider, error: ProviderError
) -> None:
    provider.refuse_creates = error
    with pytest.raises(ProviderError) as raised:
        session.reset(REQUEST)
    assert type(raised.value) is type(error)
    assert getattr(raised.value, "retry_after_seconds", None) == getattr(error, "retry_after_seconds", None)
    assert len(provider.created) == 1


def test_a_session_can_be_reset_again_after_a_refused_creation(
    session: TerminusSession, provider: FakeProvider
) -> None:
    provider.refuse_creates = ConcurrencyLimited("full")
    with pytest.raises(ConcurrencyLimited):
        session.reset(REQUEST)
    provider.refuse_creates = None
    assert session.reset(REQUEST) == "sbx0"
    assert session.terminal("x").text == "x"


@pytest.mark.parametrize("error", [SandboxGone("gone"), OutcomeUnknown("lost")], ids=lambda error: type(error).__name__)
def test_a_failed_step_arrives_typed_and_the_session_stays_failed(
    session: TerminusSession, provider: FakeProvider, error: ProviderError
) -> None:
    session.reset(REQUEST)
    provider.last.answers = [error]
    for _ in range(2):
        with pytest.raises(type(error)):
            session.terminal("x")


def test_a_command_before_reset_is_no_observation(url: str) -> None:
    session = TerminusSession(url, BUDGETS)
    with pytest.raises(SandboxGone):
        session.terminal("x")
    session.close()


def test_a_third_session_is_told_that_the_server_is_full(url: str, provider: FakeProvider) -> None:
    sessions = [TerminusSession(url, BUDGETS) for _ in range(3)]
    sessions[0].reset(REQUEST)
    sessions[1].reset(OTHER)
    with pytest.raises(ServerAtCapacity):
        sessions[2].reset(THIRD)
    assert len(provider.created) == 2
    sessions[2].close()
    sessions[0].close()
    wait_until(lambda: "sbx0" in provider.deleted, description="the closed session's sandbox is deleted")
    late = TerminusSession(url, BUDGETS)
    assert late.reset(THIRD) == "sbx2"
    late.close()
    sessions[1].close()


def test_a_session_made_over_http_keeps_its_place_until_it_was_not_used_for_long(provider: FakeProvider) -> None:
    """OpenEnv looks for such ones every five seconds at most. One that has a WebSocket may be idle for ever."""
    body = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    with serving(provider, BUDGETS, max_sessions=3, unattached_seconds=0.5) as url:
        thinking, waiting = TerminusSession(url, BUDGETS), TerminusSession(url, BUDGETS)
        thinking.reset(REQUEST)
        waiting.prepare()
        made = httpx.post(f"{url}/mcp", json=body).json()
        assert made["result"]["session_id"]
        assert "error" in httpx.post(f"{url}/mcp", json=body).json(), "the one place is taken"
        wait_until(
            lambda: "result" in httpx.post(f"{url}/mcp", json=body).json(), description="its place is free", seconds=15
        )
        assert thinking.terminal("x").text == "x"
        assert waiting.reset(OTHER) == "sbx1"
        assert provider.deleted == []
        thinking.close()
        waiting.close()


def test_what_a_session_printed_is_not_kept_after_its_end(url: str, provider: FakeProvider) -> None:
    def environments() -> int:
        gc.collect()
        return sum(type(one) is TerminusEnvironment for one in gc.get_objects())

    before = environments()
    for number in range(4):
        session = TerminusSession(url, BUDGETS)
        session.reset(replace(REQUEST, allocation_id=f"t-{number}"))
        session.terminal("x")
        session.close()
    wait_until(lambda: environments() <= before + 1, description="their environments are forgotten")


def test_closing_deletes_the_sandbox_once_and_may_be_repeated(session: TerminusSession, provider: FakeProvider) -> None:
    session.reset(REQUEST)
    session.close()
    session.close()
    wait_until(lambda: provider.deleted == ["sbx0"], description="the sandbox is deleted")
    with pytest.raises(OutcomeUnknown):
        session.terminal("x")


def test_no_server_means_nothing_was_sent() -> None:
    session = TerminusSession("http://127.0.0.1:1", BUDGETS)
    with pytest.raises(NothingSent):
        session.reset(REQUEST)
    session.close()


def test_a_server_that_dies_leaves_an_unknown_outcome_and_no_silent_new_session(provider: FakeProvider) -> None:
    with serving(provider, BUDGETS) as url:
        session = TerminusSession(url, BUDGETS)
        session.reset(REQUEST)
    assert provider.deleted == ["sbx0"]
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            session.terminal("x")
    session.close()


def test_an_answer_that_comes_too_late_is_an_unknown_outcome_and_ends_the_session(
    url: str, provider: FakeProvider
) -> None:
    session = TerminusSession(url, Budgets(command_seconds=0.2, message_seconds=0.5))
    session.reset(REQUEST)
    provider.last.gate = threading.Event()
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            session.terminal("x")
    provider.last.gate.set()
    session.close()
    wait_until(lambda: provider.deleted == ["sbx0"], description="the place is freed")


def test_a_failed_teardown_is_listed(provider: FakeProvider, url: str) -> None:
    session = TerminusSession(url, BUDGETS)
    session.reset(REQUEST)
    provider.refuse_deletes = OutcomeUnknown("no answer")
    session.close()
    rows = wait_until(lambda: httpx.get(f"{url}/teardown-failures").json(), description="the failure is listed")
    assert [(row["sandbox_id"], row["kind"]) for row in rows] == [("sbx0", "outcome_unknown")]


def test_a_sandbox_that_is_created_while_the_server_stops_is_deleted(provider: FakeProvider) -> None:
    provider.create_gate = threading.Event()
    with serving(provider, BUDGETS) as url:
        session = TerminusSession(url, BUDGETS)
        failed: list[ProviderError] = []
        resetting = threading.Thread(target=_reset_failing, args=(session, failed), daemon=True)
        resetting.start()
        wait_until(lambda: bool(provider.created), description="the creation is under way")
        threading.Timer(1.5, provider.create_gate.set).start()  # the server stops meanwhile
    assert provider.deleted == ["sbx0"]
    resetting.join(10)
    assert [type(error) for error in failed] == [OutcomeUnknown]
    session.close()


def _reset_failing(session: TerminusSession, failed: list[ProviderError]) -> None:
    try:
        session.reset(REQUEST)
    except ProviderError as error:
        failed.append(error)


def test_a_plain_clients_setup_may_reach_the_internet(url: str, provider: FakeProvider) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        client.reset()
    assert [request.allow_internet_access for request in provider.created] == [True]


def test_a_wrong_allocation_is_rejected_before_anything_is_created(url: str, provider: FakeProvider) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        metadata = client.reset(allocation={"allocation_id": "t-1"}).observation["metadata"]
    assert metadata["status"] == "error"
    assert metadata["failure"]["kind"] == "create_rejected"
    assert provider.created == []


@pytest.mark.parametrize("path", ["/reset", "/step"])
def test_the_stateless_routes_that_bypass_the_places_are_not_there(url: str, provider: FakeProvider, path: str) -> None:
    assert httpx.post(f"{url}{path}", json={}).status_code in (404, 405)
    assert provider.created == []


def test_with_a_token_every_request_needs_it(provider: FakeProvider) -> None:
    with serving(provider, BUDGETS, token="secret") as url:
        assert httpx.get(f"{url}/health").status_code == 401
        for kind in ("Bearer", "bearer"):
            assert httpx.get(f"{url}/health", headers={"Authorization": f"{kind} secret"}).status_code == 200
        refused = TerminusSession(url, BUDGETS, token="wrong")
        with pytest.raises(NothingSent):
            refused.reset(REQUEST)
        refused.close()
        session = TerminusSession(url, BUDGETS, token="secret")
        assert session.reset(REQUEST) == "sbx0"
        session.close()
