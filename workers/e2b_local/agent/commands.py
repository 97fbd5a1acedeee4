"""The process service's short calls, and the table of what runs."""

# Importing pathlib would cost every sandbox 8 ms of start.
# ruff: noqa: PTH112

from __future__ import annotations

import binascii
import os
import pwd
import signal

from . import paths
from .http import Exchange, Failure
from .loop import Loop
from .processes import Process
from .spawn import environment, set_size, spawn

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SIGNALS = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}


class Processes:
    """The running commands by pid."""

    def __init__(self, loop: Loop, sandbox_environment: dict[str, str]) -> None:
        self.loop = loop
        self._environment = sandbox_environment
        self._running: dict[int, Process] = {}

    def reap(self) -> None:
        """Collect every ended child; as process 1 that includes orphans nobody else waits for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if process := self._running.get(pid):
                process.exited(status)

    def find(self, selector: dict[str, Any]) -> Process:
        pid, tag = selector.get("pid"), selector.get("tag")
        for process in self._running.values():
            if process.pid == pid or (tag and process.description.get("tag") == tag):
                return process
        raise Failure(404, "not_found", f"process with pid {pid} not found")

    def rows(self) -> list[dict[str, Any]]:
        return [{"pid": process.pid, **process.description} for process in self._running.values()]

    def start(self, user: pwd.struct_passwd, request: dict[str, Any]) -> Process:
        config = request["process"]
        cwd = paths.resolve(config.get("cwd") or user.pw_dir, user)
        if not os.path.isdir(cwd) and cwd != user.pw_dir:
            raise Failure(400, "invalid_argument", f"cwd '{cwd}' does not exist")
        argv = [config["cmd"], *config.get("args", [])]
        env = environment(user, self._environment, config.get("envs") or {})
        if "pty" in request:
            pid, outputs, stdin = self._spawn_on_terminal(argv, env, cwd, request["pty"])
        else:
            pid, outputs, stdin = self._spawn_on_pipes(argv, env, cwd, wants_input=request.get("stdin", True))
        description = {"config": config, **({"tag": request["tag"]} if request.get("tag") else {})}
        process = Process(self.loop, pid, description, outputs, stdin, self._forget)
        self._running[pid] = process
        return process

    def _forget(self, process: Process) -> None:
        self._running.pop(process.pid, None)

    def _spawn_on_pipes(
        self, argv: list[str], env: dict[str, str], cwd: str, *, wants_input: bool
    ) -> tuple[int, dict[int, str], int | None]:
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        in_read, in_write = os.pipe2(os.O_CLOEXEC)
        stdin = in_write
        if not wants_input:
            os.close(in_write)
            os.close(in_read)
            in_read, stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1
        try:
            pid = spawn(argv, env, cwd, (in_read, out_write, err_write), terminal=False)
        except Failure:
            for fd in (out_read, err_read, *((stdin,) if stdin >= 0 else ())):
                os.close(fd)
            raise
        finally:
            for fd in (in_read, out_write, err_write):
                os.close(fd)
        return pid, {out_read: "stdout", err_read: "stderr"}, stdin if stdin >= 0 else None

    def _spawn_on_terminal(
        self, argv: list[str], env: dict[str, str], cwd: str, pty: dict[str, Any]
    ) -> tuple[int, dict[int, str], int | None]:
        ours, theirs = os.openpty()
        size = pty.get("size", {})
        set_size(ours, size.get("rows", 24), size.get("cols", 80))
        try:
            pid = spawn(argv, {"TERM": "xterm-256color", **env}, cwd, (theirs, theirs, theirs), terminal=True)
        except Failure:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return pid, {ours: "pty"}, ours


def answer(exchange: Exchange, processes: Processes, call: str, request: dict[str, Any]) -> None:
    """Answer a short call."""
    if call == "List":
        exchange.respond_json({"processes": processes.rows()})
        return
    process = processes.find(request["process"])
    if call == "SendInput":
        feed(process, request["input"], lambda: exchange.respond_json({}))
        return
    if call == "SendSignal":
        number = _SIGNALS.get(request.get("signal", 0), request.get("signal", 0))
        if number == signal.SIGKILL:
            process.watchers.append(_Confirmation(exchange))
            process.signal(number)
            return
        process.signal(number)
    elif call == "CloseStdin":
        process.close_input()
    elif call == "Update" and process.terminal is not None:
        size = request["pty"]["size"]
        set_size(process.terminal, size.get("rows", 24), size.get("cols", 80))
    else:
        raise Failure(501, "unimplemented", call)
    exchange.respond_json({})


def feed(process: Process, data: dict[str, str], written: Callable[[], None]) -> None:
    process.feed(binascii.a2b_base64(data.get("stdin") or data.get("pty") or ""), written)


class _Confirmation:
    """Answers a kill once the process is gone, so that nobody sees it afterwards."""

    congested = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def output(self, channel: str, chunk: bytes) -> None:
        """Others show it."""

    def ended(self, status: int) -> None:
        self._exchange.respond_json({})
