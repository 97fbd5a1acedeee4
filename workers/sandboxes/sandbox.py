"""One connected sandbox: its agent is asked for a sign of life, for files, and to run commands.

Nothing here asks the control plane. What is buffered on this host is bounded by the limits that the caller gives.
"""

from __future__ import annotations

import time

import e2b

from orchestrator.errors import (
    AnswerLate,
    ArtifactMissing,
    ArtifactTooLarge,
    OutcomeUnknown,
    ProviderError,
    SandboxGone,
)
from orchestrator.provider import CommandResult
from workers.sandboxes import shell
from workers.sandboxes.failures import in_sandbox
from workers.sandboxes.headers import last_answer

_FORBIDDEN = 403

_NOT_STARTED = b"the sandbox could not start this command\n"


class E2BSandbox:
    """Implements `orchestrator.provider.Sandbox`."""

    def __init__(self, connected: e2b.Sandbox) -> None:
        self._e2b = connected

    @property
    def sandbox_id(self) -> str:
        """The provider's id."""
        return self._e2b.sandbox_id

    def probe(self) -> None:
        """Ask the agent inside for a sign of life; raises SandboxGone or OutcomeUnknown."""
        with in_sandbox("probe"):
            if not self._e2b.is_running():
                raise SandboxGone(f"probe: the agent of {self.sandbox_id} is not there")

    def run(
        self, command: str, *, timeout_seconds: float, output_limit_bytes: int, response_seconds: float
    ) -> CommandResult:
        """Run one shell command in the sandbox: a login bash in the user's home, stdin empty.

        The command's limit holds inside the sandbox. When the answer is late all the same and the sandbox is healthy,
        the command has stopped what was to answer: that is its own doing, and a timeout.
        """
        try:
            stdout, stderr = self._reply(
                shell.program(timeout_seconds=timeout_seconds, limit_bytes=output_limit_bytes),
                command,
                limit_chars=shell.reply_bytes(output_limit_bytes),
                response_seconds=response_seconds,
            )
        except AnswerLate:
            self.probe()
            return CommandResult(exit_code=None, stdout=b"", stderr=b"", timed_out=True, truncated=True)
        except ProviderError as error:
            if type(error.__cause__) not in (e2b.SandboxException, e2b.InvalidArgumentException):
                raise
            self.probe()  # healthy, and its agent said that it cannot start it: too many processes, a closed home
            return CommandResult(
                exit_code=shell.NOT_STARTED, stdout=b"", stderr=_NOT_STARTED, timed_out=False, truncated=False
            )
        return shell.parse(stdout, stderr, timeout_seconds=timeout_seconds, limit_bytes=output_limit_bytes)

    def _reply(self, program: str, command: str, *, limit_chars: int, response_seconds: float) -> tuple[str, str]:
        """What the program printed, at most `limit_chars` a channel: more than that only a forger sends."""
        channels: tuple[list[str], list[str]] = ([], [])
        room = [limit_chars, limit_chars]
        with in_sandbox("run"):
            handle = self._e2b.commands.run(
                program,
                background=True,
                envs={**shell.ENVIRONMENT, shell.COMMAND_VARIABLE: command},
                timeout=response_seconds,
                retain_output=False,
            )
            for out, err, _ in handle:
                for index, text in enumerate((out, err)):
                    channels[index].append((text or "")[: room[index]])
                    room[index] -= len(text or "")
                if min(room) < 0:
                    handle.disconnect()
                    break
        return "".join(channels[0]), "".join(channels[1])

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        """Write one file; directories on the way are made."""
        with in_sandbox(f"write {path}"):
            self._e2b.files.write(path, data, request_timeout=timeout_seconds / 2)

    def read(self, path: str, *, limit_bytes: int, timeout_seconds: float) -> bytes:
        """Read one regular file; raises ArtifactMissing (also for a symlink) or ArtifactTooLarge."""
        until = time.monotonic() + timeout_seconds
        with in_sandbox(f"read {path}"):
            try:
                entry = self._e2b.files.get_info(path, request_timeout=timeout_seconds)
                if entry.type is not e2b.FileType.FILE or entry.symlink_target is not None:
                    raise ArtifactMissing(f"{path} is no regular file")
                if entry.size > limit_bytes:
                    raise ArtifactTooLarge(f"{path} holds {entry.size} bytes, the limit is {limit_bytes}")
                return self._download(path, limit_bytes, until)
            except e2b.FileNotFoundException as error:
                raise ArtifactMissing(f"{path} does not exist") from error
            except e2b.SandboxException as error:
                answer = last_answer()
                if answer is not None and answer.status == _FORBIDDEN:  # the sandbox's own answer about this file
                    raise ArtifactMissing(f"{path} cannot be read") from error
                raise

    def _download(self, path: str, limit_bytes: int, until: float) -> bytes:
        data = bytearray()
        # Half of what is left: the SDK waits twice (see provider.py).
        seconds = max(0.05, (until - time.monotonic()) / 2)
        with self._e2b.files.read(path, format="stream", request_timeout=seconds) as stream:
            for chunk in stream:
                data += chunk
                if len(data) > limit_bytes:
                    raise ArtifactTooLarge(f"{path} grew past the limit of {limit_bytes} bytes")
                if time.monotonic() > until:
                    raise OutcomeUnknown(f"read {path}: not done in time")
        return bytes(data)
