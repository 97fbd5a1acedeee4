"""The filesystem service's calls: Stat, ListDir, MakeDir, Remove, Move."""

# Importing pathlib would cost every sandbox 8 ms of start.
# ruff: noqa: PTH103, PTH104, PTH106, PTH108, PTH110, PTH112, PTH114, PTH116, PTH118, PTH119, PTH120, PTH208

from __future__ import annotations

import grp
import os
import pwd
import stat
import time

from . import paths
from .http import Exchange, Failure

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_ATTRIBUTE = "user.e2b."
_ATTRIBUTE_BYTES = 64 * 1024


def answer(exchange: Exchange, call: str, request: dict[str, Any]) -> None:
    user = paths.user_of(exchange.headers)
    if call == "Move":
        source = paths.resolve(request["source"], user)
        exchange.respond_json({"entry": _move(source, paths.resolve(request["destination"], user))})
        return
    path = paths.resolve(request.get("path", ""), user)
    if call == "Stat":
        exchange.respond_json({"entry": describe(path)})
    elif call == "ListDir":
        exchange.respond_json({"entries": _list(path, request.get("depth") or 1)})
    elif call == "MakeDir":
        exchange.respond_json({"entry": _make_directory(path)})
    elif call == "Remove":
        _remove(path)
        exchange.respond_json({})
    else:
        raise Failure(501, "unimplemented", call)


def attributes(path: str) -> dict[str, str]:
    """The metadata that was stored with a file, as far as it fits: a command may attach any amount of it."""
    metadata = {}
    room = _ATTRIBUTE_BYTES
    try:
        for name in _attribute_names(path):
            value = os.getxattr(path, name)
            room -= len(name) + len(value)
            if room < 0:
                break
            metadata[name[len(_ATTRIBUTE) :]] = value.decode(errors="replace")
    except OSError:
        return {}
    return metadata


def _attribute_names(path: str) -> list[str]:
    return [name for name in os.listxattr(path) if name.startswith(_ATTRIBUTE)]


def set_attributes(path: str, metadata: dict[str, str]) -> None:
    for name in _attribute_names(path):
        os.removexattr(path, name)
    for name, value in metadata.items():
        os.setxattr(path, _ATTRIBUTE + name, value.encode())


def describe(path: str) -> dict[str, Any]:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        raise Failure(404, "not_found", f"file not found: {path}") from None
    mode, target = status.st_mode, None
    if stat.S_ISLNK(mode):
        target = os.path.realpath(path)
        try:
            mode = os.stat(target).st_mode
        except OSError:
            mode, target = 0, path
    permissions = stat.filemode(status.st_mode)
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    modified = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    entry = {
        "name": os.path.basename(path),
        "type": _kind(mode),
        "path": path,
        "size": str(status.st_size),
        "mode": stat.S_IMODE(mode) & 0o777,
        "permissions": f"L{permissions[1:]}" if target else permissions,
        "owner": _name(lambda number: pwd.getpwuid(number).pw_name, status.st_uid),
        "group": _name(lambda number: grp.getgrgid(number).gr_name, status.st_gid),
        "modifiedTime": f"{modified}.{nanoseconds:09d}Z",
        "metadata": attributes(path),
    }
    return {**entry, **({"symlinkTarget": target} if target else {})}


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "FILE_TYPE_FILE"
    return "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(mode) else "FILE_TYPE_UNSPECIFIED"


def _name(look_up: Callable[[int], str], number: int) -> str:
    try:
        return look_up(number)
    except KeyError:
        return str(number)


def _list(path: str, depth: int) -> list[dict[str, Any]]:
    real = os.path.realpath(path)
    if not os.path.exists(real):
        raise Failure(404, "not_found", f"path not found: {path}")
    if not os.path.isdir(real):
        raise Failure(400, "invalid_argument", f"path is not a directory: {path}")
    return list(_walk(real, path, depth))


def _walk(real: str, shown: str, depth: int) -> Iterator[dict[str, Any]]:
    try:
        names = sorted(os.listdir(real))
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        inner = os.path.join(real, name)
        try:
            entry = describe(inner)
        except Failure:  # it vanished meanwhile
            continue
        entry["path"] = os.path.join(shown, name)
        yield entry
        if depth > 1 and os.path.isdir(inner) and not os.path.islink(inner):
            yield from _walk(inner, entry["path"], depth - 1)


def _make_directory(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        raise Failure(409, "already_exists", f"directory already exists: {path}")
    if os.path.lexists(path):
        raise Failure(400, "invalid_argument", f"path already exists but it is not a directory: {path}")
    os.makedirs(path)
    return describe(path)


def _remove(path: str) -> None:
    """Remove a file, a link or a whole tree; what is not there is removed already."""
    if not os.path.isdir(path) or os.path.islink(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    # With descriptors, not names, deep trees and swapped links do no harm; shutil would cost 2 MB when imported.
    for directory, names, files, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
        for name in files:
            os.unlink(name, dir_fd=fd)
        for name in names:
            inner = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(inner.st_mode):
                os.rmdir(name, dir_fd=fd)
            else:
                os.unlink(name, dir_fd=fd)
        del directory
    os.rmdir(path)


def _move(source: str, destination: str) -> dict[str, Any]:
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    try:
        os.rename(source, destination)
    except FileNotFoundError:
        raise Failure(404, "not_found", f"source file not found: {source}") from None
    return describe(destination)
