"""One connected sandbox: its agent is asked for a sign of life, for files, and to run commands.

Nothing here asks the control plane. What is buffered on this host is bounded by the limits that the caller gives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import e2b

from orchestrator.errors import (
    AnswerLate,
    ArtifactMissing,
    ArtifactTooLarge,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
    SandboxGone,
)
from orchestrator.provider import CommandResult, File
from workers.sandboxes import shell
from workers.sandboxes.failures import AgentGaveUp, in_sandbox
from workers.sandboxes.headers import last_answer, last_page

_READ_ATTEMPTS = 3
"""How often an artifact is read while the answers are odd: a lost connection heals, the file's own doing does not."""

_COPY_SECONDS = 2.0
"""The least that the last way to read an artifact is given."""

_OTHERS_ANSWER = {408, 429, 502, 503, 504}
"""What a proxy before the sandbox says: nothing about a file."""

_REFUSED = (e2b.SandboxException, e2b.InvalidArgumentException)
"""What the SDK raises, these classes and none of their subclasses, when the agent itself said no."""

_EXECUTABLE = 0o111

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
            if (answer := last_answer()) is not None and answer.status != 204:
                raise OutcomeUnknown(f"probe: something else answered {answer.status} in place of the agent")

    def run(
        self, command: str, *, timeout_seconds: float, output_limit_bytes: int, response_seconds: float
    ) -> CommandResult:
        """Run one shell command in the sandbox: a login bash in the user's home, stdin empty.

        The command's limit holds inside the sandbox. When nothing has come of it all the same, and the agent gives it
        up, the command has stopped what was to answer: that is its own doing, and a timeout. When the agent's word does
        not come either, it was lost on the way: AnswerLate.
        """
        program = shell.program(timeout_seconds=timeout_seconds, limit_bytes=output_limit_bytes)
        handle: e2b.CommandHandle[None] | None = None
        try:
            handle = self._start(program, command, response_seconds)
            stdout, stderr = self._reply(handle, limit_chars=shell.reply_bytes(output_limit_bytes))
        except AgentGaveUp:
            return CommandResult(
                exit_code=None, stdout=b"", stderr=b"", timed_out=True, stdout_cut=True, started=handle is not None
            )
        except ProviderError as error:
            self._require_own_refusal(error)
            return CommandResult(
                exit_code=shell.NOT_STARTED,
                stdout=b"",
                stderr=_NOT_STARTED,
                timed_out=False,
                started=False,
            )
        return shell.parse(stdout, stderr, timeout_seconds=timeout_seconds, limit_bytes=output_limit_bytes)

    def _require_own_refusal(self, error: ProviderError) -> None:
        """Raise it, unless a healthy sandbox's agent said that it starts nothing: too many processes, a closed home."""
        if type(error.__cause__) not in _REFUSED or last_page() is not None:
            raise error
        self.probe()

    def _start(self, program: str, command: str, response_seconds: float) -> e2b.CommandHandle[None]:
        with in_sandbox("run"):
            return self._e2b.commands.run(
                program,
                background=True,
                envs={**shell.ENVIRONMENT, shell.COMMAND_VARIABLE: command},
                timeout=response_seconds,
                retain_output=False,
            )

    def _reply(self, handle: e2b.CommandHandle[None], *, limit_chars: int) -> tuple[str, str]:
        """What the program printed, at most `limit_chars` a channel: more than that only a forger sends."""
        channels: tuple[list[str], list[str]] = ([], [])
        room = [limit_chars, limit_chars]
        with in_sandbox("run"):
            for out, err, _ in handle:
                for index, text in enumerate((out, err)):
                    channels[index].append((text or "")[: room[index]])
                    room[index] -= len(text or "")
                if min(room) < 0:
                    handle.disconnect()
                    break
            else:
                with suppress(e2b.CommandExitException):
                    handle.wait()  # raises where the stream ended and the command had not
        return "".join(channels[0]), "".join(channels[1])

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        """Write one file; directories on the way are made."""
        with in_sandbox(f"write {path}"):
            self._e2b.files.write(path, data, request_timeout=timeout_seconds / 2)

    def read(self, path: str, *, limit_bytes: int, timeout_seconds: float) -> File:
        """Read one regular file; raises ArtifactMissing (also for a symlink) or ArtifactTooLarge."""
        until = time.monotonic() + timeout_seconds
        for left in reversed(range(_READ_ATTEMPTS)):
            try:
                entry = self._entry(path, limit_bytes, until)
                data = self._download(path, limit_bytes, until)
                if len(data) == entry.size or self._entry(path, limit_bytes, until) != entry:
                    return File(data, executable=bool(entry.mode & _EXECUTABLE))
            except ProviderError as error:
                if not _is_about_the_file(error) or time.monotonic() > until:
                    raise
                if left == 0:
                    if last_page() is not None:
                        raise  # not the agent's answer
                    self.probe()  # healthy: then it is the file, and who wrote it
                    raise ArtifactMissing(f"{path} cannot be read: {error}") from error
        # a page in place of its bytes, or a writer that hides his work
        return File(self._copy(path, limit_bytes, until), executable=bool(entry.mode & _EXECUTABLE))

    def _entry(self, path: str, limit_bytes: int, until: float) -> e2b.EntryInfo:
        """What the agent says of a regular file; raises what `read` raises of anything else."""
        with _reading(path):
            entry = self._e2b.files.get_info(path, request_timeout=_half_until(until))
            if entry.type is not e2b.FileType.FILE or entry.symlink_target is not None:
                raise ArtifactMissing(f"{path} is no regular file")
            if entry.size > limit_bytes:
                raise ArtifactTooLarge(f"{path} holds {entry.size} bytes, the limit is {limit_bytes}")
            return entry

    def _download(self, path: str, limit_bytes: int, until: float) -> bytes:
        data = bytearray()
        with (
            _reading(path),
            self._e2b.files.read(path, format="stream", request_timeout=_half_until(until)) as stream,
        ):
            for chunk in stream:
                data += chunk
                if len(data) > limit_bytes:
                    raise ArtifactTooLarge(f"{path} grew past the limit of {limit_bytes} bytes")
                if time.monotonic() > until:
                    raise OutcomeUnknown(f"read {path}: not done in time")
        return bytes(data)

    def _copy(self, path: str, limit_bytes: int, until: float) -> bytes:
        """Its bytes by way of a command, for whose reply no page can pass."""
        seconds = max(_COPY_SECONDS, until - time.monotonic())
        try:
            handle = self._start(shell.copying(path, limit_bytes=limit_bytes), "", seconds)
            reply, _ = self._reply(handle, limit_chars=shell.reply_bytes(limit_bytes))
        except AgentGaveUp as error:
            raise ArtifactMissing(f"{path} cannot be read: {error}") from error
        except ProviderError as error:
            self._require_own_refusal(error)
            raise ArtifactMissing(f"{path} cannot be read: {error}") from error
        copy = shell.parse(reply, "", timeout_seconds=seconds, limit_bytes=limit_bytes)
        if copy.stdout_cut:
            raise ArtifactTooLarge(f"{path} grew past the limit of {limit_bytes} bytes")
        if copy.exit_code != 0:
            raise ArtifactMissing(f"{path} cannot be read")
        return copy.stdout


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Translate what a call about a file raises; that it is not there is the agent's to say, not a proxy's."""
    with in_sandbox(f"read {path}"):
        try:
            yield
        except e2b.FileNotFoundException as error:
            if last_page() is not None:
                raise
            raise ArtifactMissing(f"{path} does not exist") from error


def _half_until(until: float) -> float:
    """Half of what is left: the SDK waits twice (see provider.py)."""
    return max(0.05, (until - time.monotonic()) / 2)


def _is_about_the_file(error: ProviderError) -> bool:
    """Whether the sandbox's agent has answered, and what it said, or could not finish, may be the file's own doing.

    A policy can make its artifact unreadable in many ways: closed, swapped meanwhile, cut while it is sent, with a time
    that no calendar has. None of them may turn its own failure into one of ours.
    """
    if isinstance(error, ArtifactMissing | ArtifactTooLarge | SandboxGone | NothingSent | AnswerLate | RateLimited):
        return False
    answer = last_answer()
    if answer is not None:
        return answer.status not in _OTHERS_ANSWER
    # The SDK sends its calls about a file's entry another way. An agent that may open no file knows no user either, and
    # says so as if we were the wrong one.
    return type(error.__cause__) in (*_REFUSED, e2b.AuthenticationException)
