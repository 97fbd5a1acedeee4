"""The slot's client of a Terminus server: synchronous, one WebSocket that owns its session, typed failures only.

It speaks OpenEnv's messages over websockets' own synchronous client: the one that OpenEnv has costs 0.4 ms more a call
(an event loop in a thread) and reconnects by itself. Always holds: a session never reconnects (a new connection is a
new, empty session); after a call whose answer was lost every later one fails; when this process dies the server frees
the place and deletes the sandbox. Make one after a fork, never before: its connection is read by a thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from openenv.core.env_server.types import WSErrorCode  # type: ignore[import-untyped]
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from orchestrator.errors import NothingSent, OutcomeUnknown, ServerAtCapacity
from orchestrator.provider import CreateRequest
from orchestrator.settings import Budgets
from workers.terminus.observation import Observation
from workers.terminus.wire import from_wire

__all__ = ["Observation", "ServerAtCapacity", "TerminusSession"]

_LARGEST_ANSWER = 100 << 20
"""Bytes; OpenEnv's own bound."""

_GOODBYE_SECONDS = 1.0
"""What a server that is there answers a close within; one that hangs deletes the sandbox when the socket is gone."""


class TerminusSession:
    """One session of one episode. Not for use by two threads at once."""

    def __init__(self, base_url: str, budgets: Budgets, *, token: str | None = None) -> None:
        where = urlsplit(base_url)
        self._url = where._replace(scheme="wss" if where.scheme == "https" else "ws", path="/ws").geturl()
        self._headers = {"Authorization": f"Bearer {token}"} if token else None
        self._seconds = budgets.message_seconds
        self._budgets = budgets.model_dump(mode="json")
        self._connection: ClientConnection | None = None
        self._opened = contextlib.ExitStack()
        self._connecting: threading.Thread | None = None
        self._refused: NothingSent | None = None
        self._over = False

    def prepare(self) -> None:
        """Begin to connect, without waiting: what comes before the reset then costs no extra time."""
        if self._connecting is None and self._connection is None:
            self._refused = None
            self._connecting = threading.Thread(target=self._open, name="terminus-connect", daemon=True)
            self._connecting.start()

    def reset(self, request: CreateRequest) -> str:
        """Create the allocation's sandbox, in one attempt; its id, or the typed error of the creation."""
        seen = self._call("reset", {"allocation": _plain(request), "budgets": self._budgets})
        metadata = seen.get("metadata", {})
        if metadata.get("status") == "ready":
            return str(metadata["sandbox_id"])
        raise from_wire(metadata.get("failure", {"detail": str(metadata)}))

    def terminal(self, command: str) -> Observation:
        """Run one command in the sandbox; a failed or timed-out command is an observation."""
        action = {"type": "call_tool", "tool_name": "terminal", "arguments": {"command": command}}
        seen = self._call("step", action)
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
        self._over = True
        if self._connection is None:
            return
        with contextlib.suppress(OSError, WebSocketException):
            self._connection.send(json.dumps({"type": "close"}))
        self._opened.close()

    def _connected(self) -> ClientConnection:
        if self._over:
            raise OutcomeUnknown("Terminus server: the session is over")
        if self._connection is None:
            self.prepare()
            self._settle()
        if self._connection is None:
            raise self._refused or NothingSent("no Terminus server answers")
        return self._connection

    def _open(self) -> None:
        try:
            self._connection = self._opened.enter_context(
                connect(
                    self._url,
                    additional_headers=self._headers,
                    compression=None,  # both ends are on one host
                    proxy=None,
                    open_timeout=self._seconds,
                    ping_interval=None,  # the server pings; what hangs is found by the bound of the call
                    close_timeout=_GOODBYE_SECONDS,
                    max_size=_LARGEST_ANSWER,
                )
            )
        except (OSError, WebSocketException) as error:
            self._refused = NothingSent(f"no Terminus server answers: {error}")

    def _settle(self) -> None:
        if self._connecting is not None:
            self._connecting.join()
            self._connecting = None

    def _call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The observation that answers one message."""
        connection = self._connected()
        self._over = True  # unless it is answered now: a late answer would be read as the next call's
        try:
            answer = self._exchange(connection, json.dumps({"type": kind, "data": data}))
        except (OSError, ConnectionClosed) as error:
            raise OutcomeUnknown(f"Terminus server: {type(error).__name__}: {error}") from error
        self._over = False
        said = answer.get("data") or {}
        if answer.get("type") == "error":
            text = str(said.get("message"))
            if said.get("code") == WSErrorCode.CAPACITY_REACHED.value:
                raise ServerAtCapacity(text)
            raise OutcomeUnknown(f"Terminus server: {said.get('code')}: {text}")
        observation: dict[str, Any] = said.get("observation", {})
        return observation

    def _exchange(self, connection: ClientConnection, message: str) -> dict[str, Any]:
        # A refusal may close the connection before we have sent; its frame is then still there to be read.
        with contextlib.suppress(ConnectionClosed):
            connection.send(message)
        answer: dict[str, Any] = json.loads(connection.recv(timeout=self._seconds))
        return answer


def _plain(request: CreateRequest) -> dict[str, Any]:
    return {**asdict(request), "metadata": dict(request.metadata), "envs": dict(request.envs)}
