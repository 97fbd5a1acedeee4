"""What a sandbox's commands come to when its agent gives up or refuses: the SDK's own mapping of the agent's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import e2b
import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.rpc import handle_rpc_exception

from orchestrator.errors import ArtifactMissing
from workers.sandboxes.sandbox import E2BSandbox

_ENTRY = e2b.EntryInfo(
    name="a",
    type=e2b.FileType.FILE,
    path="/home/user/a",
    size=5,
    mode=0o644,
    permissions="rw",
    owner="u",
    group="u",
    modified_time=0,  # type: ignore[arg-type]
    symlink_target=None,
)


def sandbox(code: Code) -> E2BSandbox:
    """Healthy; its agent ends each command with this error before its start, and sends three of a file's five bytes."""

    def run(*_: Any, **__: Any) -> NoReturn:
        try:
            raise ConnectError(code, "before the start event")
        except ConnectError as error:
            raise handle_rpc_exception(error)  # noqa: B904 - as the SDK raises it

    @contextmanager
    def read(*_: Any, **__: Any) -> Iterator[Iterator[bytes]]:
        yield iter([b"abc"])

    commands, files = SimpleNamespace(run=run), SimpleNamespace(get_info=lambda *_, **__: _ENTRY, read=read)
    connected: Any = SimpleNamespace(commands=commands, files=files, sandbox_id="s", is_running=lambda: True)
    return E2BSandbox(connected)


def test_what_the_agent_gave_up_before_it_began_was_not_started() -> None:
    """A verifier's command of that kind is no failure of the candidate."""
    result = sandbox(Code.DEADLINE_EXCEEDED).run(
        "true", timeout_seconds=10, output_limit_bytes=1000, response_seconds=20
    )
    assert (result.timed_out, result.started) == (True, False)


@pytest.mark.parametrize("code", [Code.DEADLINE_EXCEEDED, Code.INVALID_ARGUMENT, Code.UNKNOWN])
def test_an_artifact_that_never_fits_in_a_sandbox_that_starts_nothing_is_missing(code: Code) -> None:
    with pytest.raises(ArtifactMissing):
        sandbox(code).read("/home/user/a", limit_bytes=100, timeout_seconds=5)
