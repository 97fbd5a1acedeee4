"""The slot's client of a Terminus server: synchronous, one WebSocket that owns its session, typed failures only.

Always holds: a session never reconnects by itself (a new connection is a new, empty session); after a failed call every
later one fails; when this process dies the server frees the place and deletes the sandbox. Make one after a fork, never
before: it runs an event loop in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict
from typing import Any

import openenv.core.sync_client  # type: ignore[import-untyped]  # noqa: F401 - else imported after each fork
from openenv.core.env_server.types import WSErrorCode  # type: ignore[import-untyped]
from openenv.core.generic_client import GenericEnvClient  # type: ignore[import-untyped]
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from orchestrator.errors import NothingSent, OutcomeUnknown, ServerAtCapacity
from orchestrator.provider import CreateRequest
from orchestrator.settings import Budgets
from workers.terminus.observation import Observation
from workers.terminus.wire import from_wire

__all__ = ["Observation", "ServerAtCapacity", "TerminusSession"]


class _ServerError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Client(GenericEnvClient):  # type: ignore[misc]
    """GenericEnvClient, with the server's error code kept and silent reconnection refused."""

    _opened = False

    async def _ensure_connected(self) -> None:
        if self._opened and (self._ws is None or self._ws.state is not State.OPEN):
            raise ConnectionError("the session's connection is gone")
        await super()._ensure_connected()
        self._opened = True

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        # A refusal may close the connection before we have sent; its frame is then still there to be read.
        with contextlib.suppress(ConnectionClosed):
            await self._send(message)
        response: dict[str, Any] = await self._receive()
        if response.get("type") == "error":
            data = response.get("data") or {}
            raise _ServerError(str(data.get("code")), str(data.get("message")))
        return response


class TerminusSession:
    """One session of one episode. Not for use by two threads at once."""

    def __init__(self, base_url: str, budgets: Budgets, *, token: str | None = None) -> None:
        self._client = _Client(
            base_url=base_url,
            connect_timeout_s=budgets.message_seconds,
            message_timeout_s=budgets.message_seconds,
            headers={"Authorization": f"Bearer {token}"} if token else None,
        ).sync()
        self._budgets = budgets.model_dump(mode="json")
        self._connected = False
        self._connecting: threading.Thread | None = None
        self._refused: NothingSent | None = None

    def prepare(self) -> None:
        """Begin to connect, without waiting: what comes before the reset then costs no extra time."""
        if self._connecting is None and not self._connected:
            self._refused = None
            self._connecting = threading.Thread(target=self._open, name="terminus-connect", daemon=True)
            self._connecting.start()

    def reset(self, request: CreateRequest) -> str:
        """Create the allocation's sandbox, in one attempt; its id, or the typed error of the creation."""
        self._connect()
        answer = self._call(lambda: self._client.reset(allocation=_plain(request), budgets=self._budgets))
        metadata = answer.observation.get("metadata", {})
        if metadata.get("status") == "ready":
            return str(metadata["sandbox_id"])
        raise from_wire(metadata.get("failure", {"detail": str(metadata)}))

    def terminal(self, command: str) -> Observation:
        """Run one command in the sandbox; a failed or timed-out command is an observation."""
        action = {"type": "call_tool", "tool_name": "terminal", "arguments": {"command": command}}
        seen = self._call(lambda: self._client.step(action)).observation
        facts = seen.get("metadata", {})
        if "failure" in facts:
            raise from_wire(facts["failure"])
        if seen.get("error"):
            raise OutcomeUnknown(f"terminal: {seen['error'].get('message')}")
        return Observation(
            text=seen["result"]["data"],
            exit_code=facts.get("exit_code"),
            timed_out=facts.get("timed_out", False),
            truncated=facts.get("truncated", False),
            binary=facts.get("binary", False),
        )

    def close(self) -> None:
        """End the session; the server deletes its sandbox. May be called again."""
        self._settle()
        with contextlib.suppress(OSError, ConnectionClosed):
            self._client.close()

    def _connect(self) -> None:
        if self._connected:
            return
        self.prepare()
        self._settle()
        if self._refused is not None:
            raise self._refused

    def _open(self) -> None:
        try:
            self._client.connect()
            self._connected = True
        except (OSError, ConnectionClosed) as error:  # ConnectionError is what openenv makes of any failure here
            self._refused = NothingSent(f"no Terminus server answers: {error}")

    def _settle(self) -> None:
        if self._connecting is not None:
            self._connecting.join()
            self._connecting = None

    def _call(self, request: Any) -> Any:
        try:
            return request()
        except _ServerError as error:
            if error.code == WSErrorCode.CAPACITY_REACHED.value:
                raise ServerAtCapacity(str(error)) from error
            raise OutcomeUnknown(f"Terminus server: {error.code}: {error}") from error
        except (OSError, ConnectionClosed) as error:
            raise OutcomeUnknown(f"Terminus server: {type(error).__name__}: {error}") from error


def _plain(request: CreateRequest) -> dict[str, Any]:
    return {**asdict(request), "metadata": dict(request.metadata), "envs": dict(request.envs)}
