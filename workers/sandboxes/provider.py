"""The sandbox provider of the farm, over the e2b SDK: E2B's cloud, or any service that speaks its wire.

Owns no sandbox: whoever creates one deletes it. Every method makes one attempt. Importing this module and building
`E2BProvider` starts no thread and sends nothing, so both may come before a fork; the SDK's Rust runtime starts at the
first call, and a process that forked after its own first call must not use the child's copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import e2b

from orchestrator.errors import SandboxGone
from orchestrator.provider import CreateRequest, Sandbox, SandboxRow
from workers.sandboxes.failures import control_plane
from workers.sandboxes.headers import open_pools
from workers.sandboxes.sandbox import E2BSandbox

_DEBUG_IS_OFF = False
"""Given to the SDK explicitly: E2B_DEBUG in the environment would make it skip create and kill."""


class E2BProvider:
    """Implements `orchestrator.provider.Provider`; with `api_url`, another service takes the place of E2B's cloud."""

    def __init__(self, api_key: str, *, api_url: str | None = None, request_seconds: float = 5) -> None:
        bound: dict[str, Any] = {"api_key": api_key, "retries": 0, "debug": _DEBUG_IS_OFF}
        if api_url is not None:
            bound |= {"api_url": api_url, "sandbox_url": api_url}
        # The SDK waits twice its request_timeout on REST and file calls (measured), but exactly once on commands.
        self._seconds = request_seconds / 2
        self._sandboxes = e2b.E2B(**bound, request_timeout=self._seconds).Sandbox
        self._bound = bound

    def prepare(self) -> None:
        """Start the SDK's runtime and pools and connect; from here on this process must not be forked."""
        open_pools(e2b.ConnectionConfig(**self._bound))
        self.describe("nobody")

    def create(self, request: CreateRequest) -> Sandbox:
        """Create once under the allocation's id; the same id names the same sandbox."""
        with control_plane(f"create {request.allocation_id}", creates=True):
            created = self._sandboxes.create(
                template=request.template,
                timeout=request.lifetime_seconds,
                metadata=dict(request.metadata),
                envs=dict(request.envs),
                allow_internet_access=request.allow_internet_access,
                idempotency_key=request.allocation_id,
            )
        return E2BSandbox(created)

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> Sandbox:
        """Connect to a sandbox and extend its life to at least `lifetime_seconds` from now."""
        with control_plane(f"attach {sandbox_id}"):
            return E2BSandbox(self._sandboxes.connect(sandbox_id, timeout=lifetime_seconds))

    def delete(self, sandbox_id: str) -> None:
        """Ask for deletion; not existing is success."""
        with control_plane(f"delete {sandbox_id}"):
            self._sandboxes.kill(sandbox_id)

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """The sandbox's row, or None when the provider answered that it does not exist."""
        try:
            with control_plane(f"describe {sandbox_id}"):
                return _row(self._sandboxes.get_info(sandbox_id))
        except SandboxGone:
            return None

    def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
        """Running and paused sandboxes that carry all of `metadata`, over all pages."""
        rows: list[SandboxRow] = []
        with control_plane("list"):
            pages = self._sandboxes.list(query=e2b.SandboxQuery(metadata=dict(metadata)))
            while pages.has_next:
                rows += [_row(info) for info in pages.next_items()]
        return [row for row in rows if metadata.items() <= row.metadata.items()]


def _row(info: e2b.SandboxInfo) -> SandboxRow:
    return SandboxRow(
        sandbox_id=info.sandbox_id,
        metadata=dict(info.metadata),
        started_at=info.started_at.timestamp(),
        vcpus=info.cpu_count,
        memory_mb=info.memory_mb,
    )
