"""What the farm needs of a sandbox provider, as data and protocols; `workers/sandboxes` implements it over E2B.

Every method makes one attempt and raises a `ProviderError` that tells what is known about its effect. Whoever calls
decides whether and when to try again: retries live at that one layer only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.errors import OutcomeUnknown


@dataclass(frozen=True)
class CreateRequest:
    """The exact body of a creation, stored with the intent so that it can be repeated under the same key."""

    allocation_id: str
    template: str
    lifetime_seconds: int
    allow_internet_access: bool
    metadata: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandResult:
    """What one command printed and how it ended; each stream is cut at the source, bytes are as written."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    stdout_cut: bool = False
    stderr_cut: bool = False
    started: bool = True
    """False when nothing of it has run: the sandbox could not start it."""

    @property
    def truncated(self) -> bool:
        """Whether any of its output is missing."""
        return self.stdout_cut or self.stderr_cut


@dataclass(frozen=True)
class File:
    """What was read of one regular file."""

    data: bytes
    executable: bool = False


@dataclass(frozen=True)
class SandboxRow:
    """One row of the provider's list or info: sizes are what is billed."""

    sandbox_id: str
    metadata: Mapping[str, str]
    started_at: float
    vcpus: int
    memory_mb: int


class Sandbox(Protocol):
    """A live connection to one sandbox."""

    @property
    def sandbox_id(self) -> str:
        """The provider's id."""

    def probe(self) -> None:
        """Ask the agent inside for a sign of life; raises SandboxGone or OutcomeUnknown."""

    def run(
        self, command: str, *, timeout_seconds: float, output_limit_bytes: int, response_seconds: float
    ) -> CommandResult:
        """Run one shell command, killed in the sandbox after `timeout_seconds`, each of its two streams cut there.

        Without an answer within `response_seconds` it is OutcomeUnknown, unless the sandbox itself says that the
        command was not done by then: it has kept the answer from coming, and is reported as timed out.
        """

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        """Write one file."""

    def read(self, path: str, *, limit_bytes: int, timeout_seconds: float) -> File:
        """Read one regular file; raises ArtifactMissing (also for a symlink) or ArtifactTooLarge."""


class Provider(Protocol):
    """Creating, finding and deleting sandboxes."""

    def prepare(self) -> None:
        """Do ahead what a first call would have to wait for, with one question that changes nothing."""

    def create(self, request: CreateRequest) -> Sandbox:
        """Create once under the request's key; the same key names the same sandbox."""

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> Sandbox:
        """Connect to a running sandbox and extend its life to at least `lifetime_seconds` from now."""

    def delete(self, sandbox_id: str) -> None:
        """Ask for deletion; not existing is success."""

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """The sandbox's row, or None when the provider says that it does not exist: confirmed absence."""

    def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
        """Rows that carry all of `metadata`; every row is checked again here, whatever the server filtered."""


class Deleting(Protocol):
    """The part of a provider that deletion needs."""

    def delete(self, sandbox_id: str) -> None:
        """Ask for deletion; not existing is success."""

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """The sandbox's row, or None when the provider says that it does not exist."""


def delete_confirmed(provider: Deleting, sandbox_id: str) -> None:
    """Delete once and ask whether it is gone, which alone is believed; raises OutcomeUnknown when it is still there."""
    provider.delete(sandbox_id)
    if provider.describe(sandbox_id) is not None:
        raise OutcomeUnknown(f"{sandbox_id} is still there after its deletion was answered")
