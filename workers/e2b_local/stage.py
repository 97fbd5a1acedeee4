"""The tree that every jail gets a copy of: the compiled agent and the few files that a system needs in /etc."""

import os
import shutil
import subprocess
import sys
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


class UnusablePython(Exception):
    """No interpreter on this host can run the agent."""


def stage(directory: Path, python: Path | None = None) -> Path:
    """Fill `directory` afresh and return the interpreter that jails are to use: `python`, the system's, or our own."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "etc").mkdir(parents=True)
    for name, text in _ETC.items():
        (directory / "etc" / name).write_text(text)
    shim = directory / "opt/farm/bin/sudo"
    shim.parent.mkdir(parents=True)
    shim.write_text(_SUDO)
    shim.chmod(0o755)
    compiled = directory / "opt/farm/lib/agent"
    compiled.mkdir(parents=True)
    return _compile(compiled, [python] if python else [*filter(Path.is_file, _SYSTEM_PYTHONS), _own_python()])


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
