"""OpenEnv's own clients, unmodified, against the Terminus server in a process of its own, on real jails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import workers.terminus  # noqa: F401 - blocks gradio before openenv.core is imported
from orchestrator.errors import ArtifactMissing
from orchestrator.provider import Provider, Sandbox
from orchestrator.settings import Budgets
from tests.support.e2b_local import API_KEY, LocalService
from tests.support.forge import forged
from tests.support.terminus import terminus_server
from tests.support.waiting import wait_until
from tests.support.warm import WarmProcess

from openenv.core.env_server.mcp_types import CallToolAction  # type: ignore[import-untyped]  # isort: skip
from openenv.core.generic_client import GenericEnvClient  # type: ignore[import-untyped]  # isort: skip
from openenv.core.mcp_client import MCPToolClient  # type: ignore[import-untyped]  # isort: skip

pytest_plugins = ["tests.support.e2b_local"]

BUDGETS = Budgets(command_seconds=4)
VANISHED_SECONDS = 0.5


@contextmanager
def terminus(service: LocalService, budgets: Budgets = BUDGETS) -> Iterator[tuple[str, WarmProcess]]:
    """A Terminus server of two places in a process of its own."""
    with terminus_server(
        service.url, budgets, key=API_KEY, metadata={"farm": "interop"}, vanished_seconds=VANISHED_SECONDS
    ) as started:
        yield started


@contextmanager
def holding(kind: str, url: str, *, busy: bool = False) -> Iterator[WarmProcess]:
    """A client process that holds a session after its reset."""
    with forged(_hold, kind, url, busy) as (done, process):
        assert not done
        yield process


def _hold(tell: Callable[[bool], None], kind: str, url: str, busy: bool) -> None:
    client = {"mcp": MCPToolClient, "generic": GenericEnvClient}[kind](base_url=url).sync()
    tell(client.reset().done)
    if busy:
        client.step(CallToolAction(tool_name="terminal", arguments={"command": "touch busy; sleep 60"}))
    time.sleep(600)


@pytest.fixture(scope="module")
def server_url(service: LocalService) -> Iterator[str]:
    with terminus(service) as (url, _):
        yield url


@pytest.fixture
def url(server_url: str, provider: Provider) -> Iterator[str]:
    """The shared server; a test leaves no sandbox behind."""
    yield server_url
    wait_until(lambda: provider.list({"farm": "interop"}) == [], description="every session's sandbox is gone")


def step(client: Any, **arguments: str) -> Any:
    return client.step(CallToolAction(tool_name="terminal", arguments=arguments))


def test_mcp_client_lists_one_tool_and_calls_it_both_ways(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        assert [tool.name for tool in client.list_tools()] == ["terminal"]
        ready = client.reset(setup=["echo prepared > note"], verify=["test -f answer"], seed=1, episode_id="e1")
        metadata = ready.observation.metadata
        assert not ready.done
        assert metadata["status"] == "ready"
        assert metadata["sandbox_id"]
        assert metadata["message"].endswith("Setup commands run: 1. Verify commands registered: 1.")
        assert metadata["setup_results"][0]["success"] is True
        assert metadata["verify_commands"] == []
        seen = step(client, command="cat note")
        assert seen.observation.error is None
        assert seen.observation.result["data"] == "prepared\n"
        assert seen.observation.result["content"][0]["text"] == "prepared\n"
        assert client.call_tool("terminal", command="pwd") == "/home/user\n"


def test_every_call_is_a_step_however_it_comes(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset()
        for number in (1, 3):
            client.call_tool("terminal", command="true")
            assert client.state().step_count == number
            step(client, command="true")
            assert client.state().step_count == number + 1
        client.step(CallToolAction(tool_name="nope", arguments={}))
        assert client.state().step_count == 5
        client.reset()
        assert client.state().step_count == 0


def test_the_reward_is_the_share_of_verify_commands_that_pass(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset(verify=["test -f answer", "false"])
        assert not step(client, command="touch answer").done
        end = step(client, final_answer="done")
    assert end.done
    assert end.reward == 0.5
    assert end.observation.result["data"] == "Answer submitted: done\nVerification: 1/2 passed; reward=0.5"


def test_the_first_reward_stands(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset(verify=["test -f answer"])
        assert step(client, final_answer="too early").reward == 0.0
        step(client, command="touch answer")
        again = step(client, final_answer="and now")
        assert (again.done, again.reward) == (True, 0.0)
        assert again.observation.result["data"].startswith("Error: an answer was submitted already; reward=0.0")
        assert client.call_tool("terminal", final_answer="and now").startswith("Error: an answer was submitted already")
        client.reset(verify=["true"])
        assert step(client, final_answer="in another episode").reward == 1.0


def test_verify_commands_find_the_directory_for_their_logs(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset(setup=["test -d /home/user/logs/verifier"], verify=["echo ok > /home/user/logs/verifier/out.txt"])
        step(client, command="rm -r /home/user/logs")
        end = step(client, final_answer="done")
    assert end.reward == 1.0


@pytest.mark.parametrize("forged", ["1.0", "nan", "inf", "1.5"])
def test_a_reward_file_changes_nothing(url: str, forged: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset(verify=["false"])
        step(client, command=f"mkdir -p ~/logs/verifier; echo {forged} > ~/logs/verifier/reward.txt")
        end = step(client, final_answer="done")
    assert end.reward == 0.0


def test_a_final_answer_without_verify_commands_is_only_stored(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset()
        end = step(client, final_answer="42")
    assert (end.done, end.reward) == (False, None)
    assert end.observation.result["data"] == "Answer submitted: 42"


def test_verify_commands_are_nowhere_in_what_a_session_holder_can_read(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        ready = client.reset(verify=["test held-out = held-out"])
        end = client.step({"type": "call_tool", "tool_name": "terminal", "arguments": {"final_answer": "x"}})
        state = client.state()
    assert end.reward == 1.0
    assert "held-out" not in repr((ready, end, state))
    assert state["verify_results"][0]["success"] is True


def test_a_failed_setup_command_ends_the_reset_with_an_error(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        ready = client.reset(setup_scripts=["true", "echo why >&2; exit 4"])
    metadata = ready.observation.metadata
    assert ready.done
    assert metadata["status"] == "error"
    assert metadata["message"] == "Setup command failed."
    assert [result["success"] for result in metadata["setup_results"]] == [True, False]
    assert "why" in metadata["setup_results"][1]["output"]


def test_without_a_reset_the_tool_says_so(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        seen = step(client, command="pwd")
        assert seen.observation.result["data"] == "Error: environment not reset. Call reset() first."
        client.reset()
        assert step(client).observation.result["data"] == "Error: command or final_answer is required."
        assert client.step(CallToolAction(tool_name="nope", arguments={})).observation.error is not None
        assert step(client, nonsense="1").observation.error is not None


def test_an_infrastructure_failure_is_an_error_for_a_plain_client(url: str, provider: Provider) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        sandbox_id = client.reset().observation.metadata["sandbox_id"]
        provider.delete(sandbox_id)
        for _ in range(2):
            seen = step(client, command="true").observation
            assert seen.error is not None
            assert seen.metadata["failure"]["kind"] == "sandbox_gone"


def test_a_long_command_full_of_quotes_passes_through_unchanged(url: str) -> None:
    text = 'it\'s "quoted" `x` $HOME é\n' * 1500
    with MCPToolClient(base_url=url).sync() as client:
        client.reset()
        seen = step(client, command=f"cat <<'END'\n{text}END")
    assert seen.observation.result["data"] == text


def test_a_gigabyte_of_output_is_cut_with_a_notice(service: LocalService) -> None:
    budgets = Budgets(command_seconds=20)  # it takes two seconds, on a busy machine more
    with terminus(service, budgets) as (url, _), MCPToolClient(base_url=url).sync() as client:
        client.reset()
        seen = step(client, command="yes x | head -c 1000000000").observation
    assert len(seen.result["data"]) < 70_000
    assert seen.result["data"].endswith("x\n[output truncated]")
    assert seen.metadata["truncated"] is True


def test_a_third_client_is_refused_until_a_place_is_free(url: str) -> None:
    first, second, third = (MCPToolClient(base_url=url).sync() for _ in range(3))
    first.reset()
    second.reset()
    with pytest.raises(RuntimeError, match="capacity"):
        third.reset()
    with GenericEnvClient(base_url=url).sync() as fourth, pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        fourth.reset()
    first.close()
    assert third.reset().observation.metadata["status"] == "ready"
    second.close()
    third.close()


@pytest.mark.parametrize("kind", ["mcp", "generic"])
def test_a_killed_clients_places_are_free_within_seconds(url: str, provider: Provider, kind: str) -> None:
    with holding(kind, url) as one, holding(kind, url) as two:
        assert len(provider.list({"farm": "interop"})) == 2
        one.kill()
        two.kill()
        wait_until(
            lambda: provider.list({"farm": "interop"}) == [], description="both sandboxes are deleted", seconds=6
        )
    with MCPToolClient(base_url=url).sync() as a, MCPToolClient(base_url=url).sync() as b:
        assert a.reset().observation.metadata["status"] == "ready"
        assert b.reset().observation.metadata["status"] == "ready"


@pytest.mark.parametrize("kind", ["mcp", "generic"])
def test_a_client_killed_in_mid_step_frees_its_place_within_the_commands_limit(
    service: LocalService, provider: Provider, kind: str
) -> None:
    with terminus(service, Budgets(command_seconds=1.5)) as (url, _), holding(kind, url, busy=True) as client:
        (row,) = provider.list({"farm": "interop"})
        sandbox = provider.attach(row.sandbox_id, lifetime_seconds=60)
        wait_until(lambda: _exists(sandbox, "/home/user/busy"), description="the step is in flight")
        client.kill()
        wait_until(lambda: provider.list({"farm": "interop"}) == [], description="it is deleted", seconds=1.5 + 8)


def _exists(sandbox: Sandbox, path: str) -> bool:
    try:
        sandbox.read(path, limit_bytes=10, timeout_seconds=5)
    except ArtifactMissing:
        return False
    return True


def test_an_idle_live_client_keeps_its_session(url: str, provider: Provider) -> None:
    with MCPToolClient(base_url=url).sync() as client:
        client.reset()
        began = client.state().step_count
        with pytest.raises(AssertionError):
            wait_until(
                lambda: provider.list({"farm": "interop"}) == [], description="reaped", seconds=4 * VANISHED_SECONDS
            )
        assert step(client, command="echo here").observation.result["data"] == "here\n"
        assert client.state().step_count == began + 1


def test_sigterm_deletes_the_sandboxes_of_all_sessions(service: LocalService, provider: Provider) -> None:
    with terminus(service) as (url, server), holding("mcp", url), holding("generic", url):
        assert len(provider.list({"farm": "interop"})) == 2
        server.terminate()
        assert server.wait(10) == -signal.SIGTERM
        assert provider.list({"farm": "interop"}) == []
