"""A sandbox provider in memory, which can be told to misbehave as real ones do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.errors import OutcomeUnknown, ProviderError, SandboxGone
from orchestrator.provider import CommandResult, CreateRequest, File, SandboxRow

_GATE_SECONDS = 10.0


def printed(stdout: bytes, stderr: bytes = b"", *, code: int | None = 0, **flags: bool) -> CommandResult:
    """A command's result."""
    flags = {"timed_out": False, **flags}
    return CommandResult(exit_code=code, stdout=stdout, stderr=stderr, **flags)


@dataclass
class FakeSandbox:
    """Answers every command with the next of `answers`, or prints the command."""

    sandbox_id: str
    answers: list[CommandResult | ProviderError] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    """The time limit of every command."""
    gate: threading.Event | None = None
    """No command ends before it is set."""

    def probe(self) -> None:
        """Alive."""

    def run(
        self, command: str, *, timeout_seconds: float, output_limit_bytes: int, response_seconds: float
    ) -> CommandResult:
        """Runs nothing."""
        self.limits.append(timeout_seconds)
        if self.gate is not None:
            self.gate.wait(_GATE_SECONDS)
        answer = self.answers.pop(0) if self.answers else printed(command.encode())
        if isinstance(answer, ProviderError):
            raise answer
        return answer

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        """Writes nothing."""

    def read(self, path: str, *, limit_bytes: int, timeout_seconds: float) -> File:
        """Reads nothing."""
        return File(b"")


@dataclass
class FakeProvider:
    """Implements `orchestrator.provider.Provider`; each switch is one way in which providers go wrong."""

    started_at: float = 0.0
    """What its list says of when a sandbox started."""
    lose_create_answers: int = 0
    """So many creations happen and their answers are lost."""
    refuse_creates: ProviderError | None = None
    """Every creation ends with this; nothing is made and nothing is told."""
    create_gate: threading.Event | None = None
    """No creation goes on before it is set."""
    refuse_deletes: ProviderError | None = None
    """Every deletion ends with this."""
    undeletable: set[str] = field(default_factory=set)
    """Deletions of these ids fail."""
    answers_before_true: set[str] = field(default_factory=set)
    """Deletions of these ids are answered while the sandbox stays."""
    ignore_filter: bool = False
    """The list names every sandbox, whatever was asked for."""
    refuse_list: ProviderError | None = None
    """Every list ends with this."""

    running: dict[str, SandboxRow] = field(default_factory=dict)
    sandboxes: dict[str, FakeSandbox] = field(default_factory=dict)
    """Every one that was made, oldest first."""
    deleted: list[str] = field(default_factory=list)
    created: list[CreateRequest] = field(default_factory=list)
    """Every request for a creation, whatever came of it."""
    _by_key: dict[str, str] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def last(self) -> FakeSandbox:
        """The newest sandbox."""
        return list(self.sandboxes.values())[-1]

    def create(self, request: CreateRequest) -> FakeSandbox:
        """Once per key; the same key names the same sandbox, also after it is gone."""
        self.created.append(request)
        if self.create_gate is not None:
            self.create_gate.wait(_GATE_SECONDS)
        if self.refuse_creates is not None:
            raise self.refuse_creates
        sandbox_id = self._by_key.get(request.allocation_id)
        if sandbox_id is None:
            sandbox_id = self.add(request.metadata)
            self._by_key[request.allocation_id] = sandbox_id
        if self.lose_create_answers > 0:
            self.lose_create_answers -= 1
            raise OutcomeUnknown("the connection broke before the answer")
        return self.sandboxes[sandbox_id]

    def add(self, metadata: Mapping[str, str]) -> str:
        """A sandbox that somebody made."""
        sandbox_id = f"sbx{next(self._numbers)}"
        self.running[sandbox_id] = SandboxRow(sandbox_id, dict(metadata), self.started_at, vcpus=2, memory_mb=512)
        self.sandboxes[sandbox_id] = FakeSandbox(sandbox_id)
        return sandbox_id

    def prepare(self) -> None:
        """Nothing to start."""

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> FakeSandbox:
        """A connection to a running sandbox."""
        if sandbox_id not in self.running:
            raise SandboxGone(sandbox_id)
        return self.sandboxes[sandbox_id]

    def delete(self, sandbox_id: str) -> None:
        """Gone, unless a switch says otherwise."""
        self.deleted.append(sandbox_id)
        if self.refuse_deletes is not None:
            raise self.refuse_deletes
        if sandbox_id in self.undeletable:
            raise ProviderError(f"500: {sandbox_id} cannot be deleted now")
        if sandbox_id not in self.answers_before_true:
            self.running.pop(sandbox_id, None)

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """What runs."""
        return self.running.get(sandbox_id)

    def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
        """Rows with this metadata, or every row."""
        if self.refuse_list is not None:
            raise self.refuse_list
        rows = list(self.running.values())
        return rows if self.ignore_filter else [r for r in rows if metadata.items() <= r.metadata.items()]
