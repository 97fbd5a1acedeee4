"""What jails are made from: a tree that each gets a copy of (the compiled agent, a few files for /etc), and a Python.

Jails that root starts are built by a host user who cannot look below directories like /root. An interpreter that lives
there is copied, without its site-packages, to where that user can reach it.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

AGENT = Path(__file__).parent / "agent"
_SYSTEM_PYTHONS = (Path("/usr/bin/python3"), Path("/usr/local/bin/python3"))
_COMPILE = (
    "import sys, py_compile\n"
    "assert sys.version_info >= (3, 9)\n"
    "for source, target in zip(sys.argv[1::2], sys.argv[2::2]):\n"
    "    py_compile.compile(source, target, dfile=source.rpartition('/')[2], doraise=True, invalidation_mode=\n"
    "        py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
)
# Templates are written for sandboxes in which `sudo` needs no password. Here it changes nothing but HOME.
_SUDO = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    [ "$1" = -u ] && shift
    shift
done
exec env -i PATH="$PATH" HOME=/root "$@"
"""
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


_RUN = Path("/run")  # only root writes here, everybody can look into it
_UNNEEDED = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "config-*", "*.a")


class UnusablePython(Exception):
    """No interpreter on this host can run the agent."""


@dataclass(frozen=True)
class Interpreter:
    """A Python for jails: where it is found inside, and which host directory must be mounted for that."""

    path: Path
    prefix: Path | None  # None: it is in /usr, which every jail has
    source: Path | None  # the host directory to mount at `prefix`


def stage(directory: Path, python: Path | None = None, *, for_other_user: bool) -> Interpreter:
    """Fill `directory` afresh, and choose the jails' Python: `python`, the system's, or our own."""
    unstage(directory)
    (directory / "etc").mkdir(parents=True)
    for name, text in _ETC.items():
        (directory / "etc" / name).write_text(text)
    shim = directory / "opt/farm/bin/sudo"
    shim.parent.mkdir(parents=True)
    shim.write_text(_SUDO)
    shim.chmod(0o755)
    compiled = directory / "opt/farm/lib/agent"
    compiled.mkdir(parents=True)
    path = _compile(compiled, [python] if python else [*filter(Path.is_file, _SYSTEM_PYTHONS), _own_python()])
    prefix = path.parent.parent
    if path.is_relative_to("/usr"):
        return Interpreter(path, None, None)
    if for_other_user and not _reachable(prefix):
        return Interpreter(path, prefix, _copy(prefix, _copy_of(directory)))
    return Interpreter(path, prefix, prefix)


def unstage(directory: Path) -> None:
    """Remove what `stage` made."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(_copy_of(directory), ignore_errors=True)


def _copy_of(directory: Path) -> Path:
    return _RUN / f"rollout-farm-python-{hashlib.sha256(bytes(directory.absolute())).hexdigest()[:16]}"


def _reachable(path: Path) -> bool:
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


def _copy(prefix: Path, target: Path) -> Path:
    target.mkdir()
    for pattern in ("bin/python*", "lib/python*", "lib/*.so*"):
        for path in prefix.glob(pattern):
            copy = target / path.relative_to(prefix)
            copy.parent.mkdir(exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, copy, symlinks=True, ignore=_UNNEEDED)
            else:
                shutil.copy2(path, copy, follow_symlinks=False)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or os.access(path, os.X_OK) else 0o044))
    return target


def _own_python() -> Path:
    major, minor = sys.version_info[:2]
    return Path(sys.base_prefix).resolve() / "bin" / f"python{major}.{minor}"


def _compile(directory: Path, pythons: list[Path]) -> Path:
    """Compile the agent with the first interpreter that can; compiling it in each jail would cost 30 ms a start."""
    pairs = [[str(source), str(directory / f"{source.stem}.pyc")] for source in sorted(AGENT.glob("*.py"))]
    problems = []
    for python in pythons:
        command = [str(python), "-I", "-S", "-c", _COMPILE, *(word for pair in pairs for word in pair)]
        done = subprocess.run(command, capture_output=True, env={}, cwd=os.sep, check=False)
        if done.returncode == 0:
            return python
        problems.append(f"{python}: {done.stderr.decode(errors='replace').strip().rpartition(chr(10))[2]}")
    raise UnusablePython("; ".join(problems))
